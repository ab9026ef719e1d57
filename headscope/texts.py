"""What stands at each position of a batch: real or padding, which token, special or not; for reading attention rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope.examples import Batch
from headscope.heads import AttentionKind, Site
from headscope.patterns import Block
from headscope.scores import RowBlock


@dataclass(frozen=True)
class Side:
    """One stack's sequence: `real` and `tokens` are `[example position]`."""

    real: Tensor
    tokens: Tensor | None


class Texts:
    """The sequences of one batch: those that the encoder (or only stack) reads, and those that a decoder reads."""

    def __init__(self, inputs: Mapping[str, Any], decoded: Tensor | None, special: Tensor | None) -> None:
        """`decoded` says which positions of `decoder_input_ids` are real, `special` lists special token ids."""
        self.special = special
        self.source = _side(inputs.get("input_ids"), inputs.get("attention_mask"))
        ids = inputs.get("decoder_input_ids")
        self.target = None if ids is None else _side(ids, decoded)

    @classmethod
    def of(cls, inputs: Mapping[str, Any], batch: Batch, special: Tensor | None = None) -> Texts:
        """The sequences of a batch as an objective prepared its `inputs`; a decoder may read the text itself."""
        ids, decoded = inputs.get("decoder_input_ids"), batch.predicted
        if ids is not None and ids.shape != decoded.shape:
            decoded = inputs["attention_mask"]
        return cls(inputs, decoded, special)

    def block(self, block: Block, examples: int) -> RowBlock:
        """A block of rows with what stands at its queries and keys; keys that are padding are not visible.

        Sequences that are no text of the batch (patches, windows, frames) are all real and hold no token.
        """
        site, count, width = block.site, block.rows.shape[2], block.rows.shape[3]
        positions = torch.arange(block.first, block.first + count, device=block.rows.device)
        sequences = block.rows.shape[0]
        queries, keys = self.queries(site), self.keys(site)
        real = torch.ones(sequences, count, dtype=torch.bool, device=block.rows.device)
        visible, query_tokens, key_tokens, special = block.visible, None, None, None
        here = slice(None) if block.sequence is None else slice(block.sequence, block.sequence + 1)
        aligned = block.sequence is not None or sequences == examples
        if queries is not None and aligned and queries.real.shape[1] >= block.first + count:
            real = queries.real[here, block.first : block.first + count]
            query_tokens = None if queries.tokens is None else queries.tokens[here, block.first : block.first + count]
        if keys is not None and aligned and keys.real.shape[1] >= width:
            visible = visible & keys.real[here, None, :width]
            key_tokens = None if keys.tokens is None else keys.tokens[here, :width]
            if key_tokens is not None and self.special is not None:
                special = torch.isin(key_tokens, self.special) & keys.real[here, :width]
        if site.id.kind is AttentionKind.CROSS:
            query_tokens = None  # tokens of two languages or alphabets are not compared
        tokens = (query_tokens, key_tokens, special)
        return RowBlock(site, positions, block.rows, visible, real, *tokens, logits=block.logits, first=block.first)

    def queries(self, site: Site) -> Side | None:
        """The sequence that a site's queries stand in, if it is a text."""
        if site.id.stack in ("vision", "audio"):
            return None
        return self.target if self.target is not None and site.id.stack == "decoder" else self.source

    def real(self, site: Site, values: Tensor) -> Tensor:
        """Which tokens of a site's `values`, `[batch token ...]`, are no padding: `[batch token]`, on their device.

        All are, where the site's queries stand in no text of the batch (patches, windows, frames).
        """
        side = self.queries(site)
        if side is not None and side.real.shape == values.shape[:2]:
            return side.real.to(values.device)
        return torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)

    def keys(self, site: Site) -> Side | None:
        """The sequence that a site's keys stand in, if it is a text."""
        return self.source if site.id.kind is AttentionKind.CROSS else self.queries(site)


def _side(tokens: Tensor | None, real: Tensor | None) -> Side | None:
    if tokens is None and real is None:
        return None
    if real is None:
        assert tokens is not None
        real = torch.ones_like(tokens, dtype=torch.bool)
    return Side(real.bool(), tokens)
