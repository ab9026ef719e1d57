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

VALUES = 2**23
"""Rows held at once, as numbers: 32 MiB in float32, and as much again for their logits."""
WIDEST = 128
"""Queries in a tile at most: near the start of a causal text, a higher tile would be for the greater part masked."""
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
    n_heads, n_keys, n_kv_heads = query.shape[1], key.shape[2], key.shape[1]
    cuts = list(_cuts(query.shape[2], n_keys, n_heads, causal=causal))
    largest = max((last - first) * reach for first, last, reach in cuts)
    buffers = [query.new_empty(n_heads * largest) for _ in range(2)]
    for sequence in range(query.shape[0]):
        keys = key[sequence].transpose(1, 2).contiguous()  # [kv_head d_head key]
        values = value[sequence].contiguous()
        for first, last, reach in cuts:
            count = last - first
            logits, rows = (buffer[: n_heads * count * reach].view(n_kv_heads, -1, reach) for buffer in buffers)
            whole = logits.view(n_heads, count, reach)
            asked = query[sequence, :, first:last].reshape(n_kv_heads, -1, query.shape[-1])
            torch.bmm(asked, keys[..., :reach], out=logits)
            if causal:
                ahead = torch.ones(count, reach - first, dtype=torch.bool, device=query.device).triu(1)
                whole[..., first:].masked_fill_(ahead, MASKED)
            elif mask is not None:
                _apply(whole, mask[min(sequence, len(mask) - 1)], first)
            logits -= logits.amax(dim=-1, keepdim=True)
            torch.softmax(logits, dim=-1, out=rows)
            context = torch.bmm(rows, values[:, :reach]).view(n_heads, count, -1).transpose(0, 1)
            yield Tile(sequence, first, rows.view(n_heads, count, reach), whole, context)


def _cuts(n_queries: int, n_keys: int, n_heads: int, *, causal: bool) -> Iterator[tuple[int, int, int]]:
    """First query, the one after the last, and how many keys these may see, of each tile of a sequence."""
    first = 0
    while first < n_queries:
        last = min(n_queries, first + WIDEST)
        reach = min(n_keys, last) if causal else n_keys
        last = min(last, first + max(1, VALUES // (n_heads * reach)))
        yield first, last, min(n_keys, last) if causal else n_keys
        first = last


def _apply(logits: Tensor, mask: Tensor, first: int) -> None:
    """Put a mask `[head query key]`, whose heads or queries may be one for all, on logits of the same axes."""
    part = mask[:, first : first + logits.shape[1]] if mask.shape[1] > 1 else mask
    if part.dtype == torch.bool:
        logits.masked_fill_(~part, MASKED)
    else:
        logits += part.to(logits.dtype)
        logits.clamp_min_(MASKED)
