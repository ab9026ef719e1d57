"""Geometry of one attention call: how many heads of what width, where they lie in each tensor, and what kind it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.heads import AttentionKind
from headscope.taps import AttentionCall


@dataclass(frozen=True)
class Geometry:
    """The geometry of one call; `batch` counts sequences (windows count as such)."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    batch: int


def geometry(call: AttentionCall, projected: Tensor) -> Geometry | str:
    """The geometry of a call whose output projection reads `projected`, or in words why it cannot be told."""
    query, key, value = call.query, call.key, call.value
    if call.on_interface:
        assert query is not None and key is not None and value is not None
        if query.dim() != 4:
            return f"its query has {query.dim()} axes, not 4"
        if not query.shape[1] or not key.shape[1]:
            return "it has no heads"
        return Geometry(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], query.shape[0])
    batch = projected.shape[0]
    reference = call.probabilities if call.probabilities is not None else call.context
    n_heads = reference.shape[1] if reference.dim() == 4 else reference.shape[0] // batch
    if n_heads < 1 or head_numbers(call.context, n_heads) is None:
        return f"its context {tuple(call.context.shape)} shows no head axis"
    n_kv_heads = key.shape[1] if key is not None and key.dim() == 4 and n_heads % key.shape[1] == 0 else n_heads
    d_head = call.context.shape[-1] if query is None else query.shape[-1]
    return Geometry(n_heads, n_kv_heads, d_head, call.context.shape[-1], batch)


def head_numbers(tensor: Tensor, n_heads: int) -> Tensor | None:
    """The head number of each element, broadcastable to `tensor`; None where no axis holds the heads."""
    numbers = torch.arange(n_heads, device=tensor.device)
    if tensor.dim() == 3 and tensor.shape[0] % n_heads == 0:  # [batch*head position width]
        return numbers.repeat(tensor.shape[0] // n_heads)[:, None, None]
    if tensor.dim() != 4:
        return None
    axis = next((axis for axis in (1, 2) if tensor.shape[axis] == n_heads), None)
    return None if axis is None else numbers.view([-1 if dim == axis else 1 for dim in range(4)])


def context_numbers(call: AttentionCall, n_heads: int) -> Tensor:
    """The head number of each element of the context, broadcastable to it."""
    context = call.context
    if call.on_interface and context.dim() == 4:  # [batch query head width], as the interface returns it
        axis = 2 if context.shape[2] == n_heads else 1
        numbers = torch.arange(n_heads, device=context.device)
        return numbers.view([-1 if dim == axis else 1 for dim in range(4)])
    numbers = head_numbers(context, n_heads)
    assert numbers is not None
    return numbers


def attention_kind(call: AttentionCall, shape: Geometry, path: str) -> AttentionKind:
    """Self, causal or cross, from how the call behaves: which keys its first query can reach."""
    probabilities, query, key, value = call.probabilities, call.query, call.key, call.value
    named = re.search(r"cross|encoder_attn|EncDecAttention", path.rpartition(".")[2])
    if named or getattr(call.module, "is_cross_attention", False):
        return AttentionKind.CROSS  # stacks of equally many tokens do not show it
    if probabilities is not None:
        n_queries, n_keys = probabilities.shape[-2:]
        if n_queries != n_keys:
            return AttentionKind.CROSS
        ahead = torch.ones(n_queries, n_keys, dtype=torch.bool, device=probabilities.device).triu(1)
        return AttentionKind.SELF if bool((probabilities[..., ahead] != 0).any()) else AttentionKind.CAUSAL
    assert query is not None and key is not None and value is not None
    if query.shape[-2] != key.shape[-2]:
        return AttentionKind.CROSS
    positions = 1 if call.on_interface and call.context.shape[2] == shape.n_heads else call.context.dim() - 2
    (gradient,) = torch.autograd.grad(
        call.context.select(positions, 0).sum(), value, retain_graph=True, allow_unused=True
    )
    looks_ahead = gradient is None or bool((gradient.narrow(-2, 1, gradient.shape[-2] - 1) != 0).any())
    return AttentionKind.SELF if looks_ahead else AttentionKind.CAUSAL
