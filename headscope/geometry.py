"""Geometry of one attention call: how many heads of what width, where they lie in each tensor, and what kind it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.heads import AttentionKind
from headscope.taps import AttentionCall

_TRIED_HEADS = 65
"""Where the projection does not tell, fewer heads than this are tried."""


@dataclass(frozen=True)
class Geometry:
    """The geometry of one call: its heads, their widths, and the axis of the context along which they lie (0: that of
    sequences and heads together).
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    head_axis: int


def geometries(call: AttentionCall, n_channels: int) -> list[Geometry] | str:
    """The geometries that a call may have whose output projection has `n_channels` inputs, likely ones first; or in
    words why there is none. Only in the right one does each channel of the projection come from one head.
    """
    query, key, value, context = call.query, call.key, call.value, call.context
    if call.on_interface:
        assert query is not None and key is not None and value is not None
        if query.dim() != 4:
            return f"its query has {query.dim()} axes, not 4"
        if not query.shape[1] or not key.shape[1]:
            return "it has no heads"
        axis = 2 if context.shape[2] == query.shape[1] else 1
        return [Geometry(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], axis)]
    d_head = context.shape[-1] if query is None else query.shape[-1]
    found: list[Geometry] = []
    for axis, n_heads in _head_axes(call, n_channels):
        n_kv_heads = n_heads
        if query is not None and key is not None and query.dim() == key.dim() == 4 and query.shape[1] == n_heads:
            n_kv_heads = key.shape[1] if 0 < key.shape[1] < n_heads and n_heads % key.shape[1] == 0 else n_heads
        found.append(Geometry(n_heads, n_kv_heads, d_head, context.shape[-1], axis))
    return found or f"its context {tuple(context.shape)} shows no head axis"


def _head_axes(call: AttentionCall, n_channels: int) -> list[tuple[int, int]]:
    """Axes of a context, with the number of heads that they would hold; an axis of one index is the last resort."""
    shape = call.context.shape
    found = [(axis, shape[axis]) for axis in range(1, len(shape) - 1)] if len(shape) > 3 else []
    rows = call.probabilities
    if rows is not None and rows.dim() == 4:
        found.sort(key=lambda one: one[1] != rows.shape[1])
    sizes = {n_channels // shape[-1], *range(1, _TRIED_HEADS)}  # most often the heads' values are the channels
    flat = [(0, n_heads) for n_heads in sorted(sizes, reverse=True) if n_heads and shape[0] % n_heads == 0]
    flat.sort(key=lambda one: one[1] * shape[-1] != n_channels)
    return sorted(found + flat, key=lambda one: one[1] == 1)


def head_numbers(tensor: Tensor, n_heads: int, axis: int) -> Tensor:
    """The head number of each element, broadcastable to `tensor`, whose heads lie along `axis` (0: with sequences)."""
    numbers = torch.arange(n_heads, device=tensor.device)
    if axis == 0:
        numbers = numbers.repeat(tensor.shape[0] // n_heads)
    return numbers.view([-1 if dim == axis else 1 for dim in range(tensor.dim())])


def head_axes(tensor: Tensor, n_heads: int, on_interface: bool) -> list[int]:
    """The axes of a query, key or value that may hold `n_heads` heads, likely ones first."""
    if on_interface:
        return [1]
    axes = [axis for axis in range(1, tensor.dim() - 1) if tensor.shape[axis] == n_heads and tensor.dim() > 3]
    return axes + [0] * (tensor.dim() > 2 and tensor.shape[0] % n_heads == 0)


def attention_kind(call: AttentionCall, shape: Geometry, path: str, *, alone: bool) -> AttentionKind:
    """Self, causal or cross, from how the call behaves: which keys its first query can reach.

    `alone` says that the module was given one sequence, whose keys may be fewer (pooled) or in windows.
    """
    probabilities, query, key, value = call.probabilities, call.query, call.key, call.value
    named = re.search(r"cross|encoder_attn|EncDecAttention", path.rpartition(".")[2])
    if named or getattr(call.module, "is_cross_attention", False):
        return AttentionKind.CROSS  # stacks of equally many tokens do not show it
    if probabilities is not None:
        n_queries, n_keys = probabilities.shape[-2:]
        if n_queries != n_keys:
            return AttentionKind.SELF if alone else AttentionKind.CROSS
        ahead = torch.ones(n_queries, n_keys, dtype=torch.bool, device=probabilities.device).triu(1)
        return AttentionKind.SELF if bool((probabilities[..., ahead] != 0).any()) else AttentionKind.CAUSAL
    assert query is not None and key is not None and value is not None
    if query.shape[-2] != key.shape[-2]:
        return AttentionKind.SELF if alone else AttentionKind.CROSS
    positions = 1 if shape.head_axis == 2 and call.context.dim() == 4 else call.context.dim() - 2
    (gradient,) = torch.autograd.grad(
        call.context.select(positions, 0).sum(), value, retain_graph=True, allow_unused=True
    )
    looks_ahead = gradient is None or bool((gradient.narrow(-2, 1, gradient.shape[-2] - 1) != 0).any())
    return AttentionKind.SELF if looks_ahead else AttentionKind.CAUSAL
