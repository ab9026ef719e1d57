"""Rows of scaled-dot-product attention for long texts, in buffers that are used again.

For models that run torch's own scaled-dot-product attention the rows are `softmax(scale · Q Kᵀ + mask)` by definition,
so they need not be asked of the eager function. Whoever reads a block must be done with it before the next is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.losses import wide
from headscope.taps import AttentionCall

VALUES = 2**22
"""Rows held at once, as numbers."""
LONG = 2**18
"""From this many pairs of queries and keys on the buffers are worth their making."""
MASKED = -1e30


@dataclass(frozen=True)
class Tile:
    """Rows `[head query key]` of one sequence from query `first` on, with log A up to a constant of each query, and the
    context `[query head d_value]`.
    """

    sequence: int
    first: int
    rows: Tensor
    logits: Tensor
    context: Tensor


def fits(call: AttentionCall) -> bool:
    """Whether the call is plain scaled-dot-product attention over a text long enough."""
    query, key = call.query, call.key
    if query is None or key is None or query.dim() != 4 or query.shape[2] * key.shape[2] < LONG:
        return False
    plain = call.implementation == "sdpa" and call.keywords.get("position_bias") is None
    return plain and call.keywords.get("softcap") is None


def tiles(call: AttentionCall, mask: Tensor | None, *, causal: bool) -> Iterator[Tile]:
    """The tiles of a call; `mask` is boolean or additive, `[batch head query key]` (head 1 or all), or None."""
    assert call.query is not None and call.key is not None and call.value is not None
    scale = call.keywords.get("scaling", call.keywords.get("scale"))
    scale = call.query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = wide(call.query) * scale, wide(call.key), wide(call.value)
    n_heads, n_queries, n_keys = query.shape[1], query.shape[2], key.shape[2]
    n_kv_heads = key.shape[1]
    size = max(1, min(n_queries, VALUES // (n_heads * n_keys)))
    buffers = [query.new_empty(n_heads * size * n_keys) for _ in range(2)]
    ahead = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    for sequence in range(query.shape[0]):
        keys = key[sequence].transpose(1, 2).contiguous()  # [kv_head d_head key]
        values = value[sequence].contiguous()
        for first in range(0, n_queries, size):
            count = min(size, n_queries - first)
            reach = min(n_keys, first + count) if causal else n_keys
            logits, rows = (buffer[: n_heads * count * reach].view(n_kv_heads, -1, reach) for buffer in buffers)
            asked = query[sequence, :, first : first + count].reshape(n_kv_heads, -1, query.shape[-1])
            torch.bmm(asked, keys[..., :reach], out=logits)
            whole = logits.view(n_heads, count, reach)
            if causal:
                whole[..., first:].masked_fill_(ahead[:count, : reach - first], MASKED)
            elif mask is not None:
                _apply(whole, mask[min(sequence, len(mask) - 1)], first)
            torch.sub(logits, logits.amax(dim=-1, keepdim=True), out=logits)
            torch.exp(logits, out=rows)
            rows /= rows.sum(dim=-1, keepdim=True)
            context = torch.bmm(rows, values[:, :reach]).view(n_heads, count, -1).transpose(0, 1)
            yield Tile(sequence, first, rows.view(n_heads, count, reach), whole, context)


def _apply(logits: Tensor, mask: Tensor, first: int) -> None:
    """Put a mask `[head query key]`, whose heads or queries may be one for all, on logits of the same axes."""
    part = mask[:, first : first + logits.shape[1]] if mask.shape[1] > 1 else mask
    if part.dtype == torch.bool:
        logits.masked_fill_(~part, MASKED)
    else:
        logits += part.to(logits.dtype)
        logits.clamp_min_(MASKED)
