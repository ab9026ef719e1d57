"""Attention rows of a running model in blocks of queries, from the model's own eager function, never a whole map.

Soft caps, sinks, biases, windows and padding come out as the model computes them, whatever backend it was loaded with.
Families that bypass the attention interface show the probabilities that they compute themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope.heads import Site
from headscope.shapes import Bool, Float
from headscope.taps import AttentionCall

BLOCK_VALUES = 2**20
"""Probabilities held at once: 4 MiB in float32, which stays in a CPU's cache."""


@dataclass(frozen=True)
class Block:
    """Attention rows of the queries from `first` on: `rows` and which keys each query may look at (`visible`).

    Keys behind the last one that any of these queries may see can be left out.
    """

    site: Site
    first: int
    rows: Float[Tensor, "sequence head query key"]
    visible: Bool[Tensor, "#sequence query key"]


def blocks(site: Site, call: AttentionCall) -> Iterator[tuple[Block, Tensor | None]]:
    """The blocks of one attention call in order, each with the context of its queries as eager attention returns it.

    The context is None where the model has already computed its probabilities itself.
    """
    if call.probabilities is not None:
        yield from ((block, None) for block in _cut(site, call.probabilities))
        return
    query, key, value, eager = call.query, call.key, call.value, call.eager
    assert query is not None and key is not None and value is not None and eager is not None
    mask = _Mask(call)
    n_queries, n_keys = query.shape[2], key.shape[2]
    size = max(1, BLOCK_VALUES // (query.shape[0] * query.shape[1] * n_keys))
    for first in range(0, n_queries, size):
        last = min(first + size, n_queries)
        reach = mask.reach(last)
        allowed = mask.allowed(first, last, reach)
        context, rows = eager(
            call.module,
            query[:, :, first:last],
            key[:, :, :reach],
            value[:, :, :reach],
            mask.additive(first, last, reach),
            *call.arguments,
            **_sliced(call.keywords, first, last, reach, n_queries=n_queries, n_keys=n_keys),
        )[:2]
        yield Block(site, first, rows, allowed), context


class _Mask:
    """The mask of a call in any of the forms that transformers makes it: none, boolean or additive."""

    def __init__(self, call: AttentionCall) -> None:
        assert call.query is not None and call.key is not None
        self.query, self.key = call.query, call.key
        self.n_queries, self.n_keys = call.query.shape[2], call.key.shape[2]
        given = call.mask if isinstance(call.mask, Tensor) else None
        self.mask = given if given is None else given[(None,) * (4 - given.dim())]
        declared = call.keywords.get("is_causal")
        causal = getattr(call.module, "is_causal", True) if declared is None else declared
        self.causal = self.mask is None and bool(causal) and self.n_queries > 1

    def reach(self, last: int) -> int:
        """How many keys the queries before `last` may see at most."""
        return min(self.n_keys, last + self.n_keys - self.n_queries) if self.causal else self.n_keys

    def allowed(self, first: int, last: int, reach: int) -> Bool[Tensor, "#sequence query key"]:
        """Which keys each query may look at (one table for all heads)."""
        device = self.query.device
        if self.mask is not None:
            part = self.mask[:, :, first:last, :reach]
            seen = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
            return seen.any(dim=1).expand(-1, last - first, -1)
        if not self.causal:
            return torch.ones(1, last - first, reach, dtype=torch.bool, device=device)
        queries = torch.arange(first, last, device=device) + self.n_keys - self.n_queries
        return (torch.arange(reach, device=device) <= queries[:, None])[None]

    def additive(self, first: int, last: int, reach: int) -> Tensor | None:
        """The mask as eager attention adds it to the scores."""
        if self.mask is not None and self.mask.dtype != torch.bool:
            return self.mask[:, :, first:last, :reach]
        if self.mask is None and not self.causal:
            return None
        allowed = self.mask[:, :, first:last, :reach] if self.mask is not None else None
        allowed = self.allowed(first, last, reach)[:, None] if allowed is None else allowed
        zeros = torch.zeros((), dtype=self.query.dtype, device=self.query.device)
        return torch.where(allowed, zeros, torch.finfo(self.query.dtype).min)


def _sliced(
    keywords: dict[str, Any], first: int, last: int, reach: int, *, n_queries: int, n_keys: int
) -> dict[str, Any]:
    """Keyword arguments for a block: biases of every query and key are cut to its queries and keys."""
    cut: dict[str, Any] = {}
    for name, value in keywords.items():
        if isinstance(value, Tensor) and value.dim() == 4 and value.shape[-2:] == (n_queries, n_keys):
            cut[name] = value[..., first:last, :reach]
        else:
            cut[name] = value
    return cut


def _cut(site: Site, probabilities: Tensor) -> Iterator[Block]:
    """Blocks of probabilities that a model made itself, `[sequence head query key]` or `[sequence*head query key]`."""
    n_queries, n_keys = probabilities.shape[-2:]
    whole = probabilities.detach().reshape(-1, site.n_heads, n_queries, n_keys)
    size = max(1, BLOCK_VALUES // (whole.shape[0] * site.n_heads * n_keys))
    for first in range(0, n_queries, size):
        rows = whole[:, :, first : first + size]
        yield Block(site, first, rows, (rows > 0).any(dim=1))
