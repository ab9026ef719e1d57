"""Which heads touch which elements of which tensors, found from gradients and exact for any number format.

Group testing on structural zeros: for every bit of the head number two backward passes are made, one from the heads
whose number has that bit and one from the others. What a single head touches is non-zero in exactly one of each pair,
and the pairs spell its number; what several heads touch is non-zero in both of some pair. No ratio of gradients is
formed, so the answer is exact in bfloat16 too, and it takes 2 * ceil(log2 heads) passes through a small local graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscope.parallel import local


@dataclass(frozen=True)
class AxisTouch:
    """Per index along one axis of a tensor: whether any head touches it, whether several do, and which head if one."""

    touched: Tensor
    mixed: Tensor
    number: Tensor

    @property
    def clean(self) -> bool:
        """No index is touched by several heads."""
        return not bool(self.mixed.any())

    def owners(self) -> tuple[int, ...]:
        """The head of each index, -1 where none or several touch it."""
        return tuple(torch.where(self.touched & ~self.mixed, self.number, -1).tolist())


Touch = list[AxisTouch]
"""What heads do to one tensor, seen along each of its axes."""


def touches(target: Tensor, heads: Tensor, n_heads: int, tensors: Sequence[Tensor]) -> list[Touch | None]:
    """How the heads in `target` depend on each of `tensors`; None where they do not at all.

    `heads` holds the head number of each element of `target` (broadcastable to its shape, 0 ≤ number < n_heads).
    """
    found: list[Touch | None] = [None] * len(tensors)
    if not target.requires_grad or not tensors:
        return found
    weights = _weights(target)
    for bit in range(max(1, (n_heads - 1).bit_length())):
        has_bit = ((heads >> bit) & 1).to(target.dtype)
        ones = _nonzero(target, weights * has_bit, tensors)
        zeros = _nonzero(target, weights * (1 - has_bit), tensors)
        for index in range(len(tensors)):
            found[index] = _merge(found[index], ones[index], zeros[index], bit)
    return [touch if touch and bool(touch[0].touched.any()) else None for touch in found]


def touched_by_each(target: Tensor, heads: Tensor, n_heads: int, tensor: Tensor) -> list[Tensor]:
    """Which indices each head touches, `[head index]` for each axis; a backward pass a head, for shared slices."""
    weights = _weights(target)
    rows = [_nonzero(target, weights * (heads == head).to(target.dtype), [tensor])[0] for head in range(n_heads)]
    held = local(tensor)
    blank = [torch.zeros(size, dtype=torch.bool, device=held.device) for size in held.shape]
    return [torch.stack([(row or blank)[axis] for row in rows]) for axis in range(tensor.dim())]


def fed_by(target: Tensor, source: Tensor, heads: Tensor, n_heads: int) -> Touch:
    """Which head of `source` feeds each index of `target`, along each of its axes.

    Forward influence from backward passes: `Jᵀu` is linear in `u`, so its derivative from the elements of one head is
    `J` applied to them.
    """
    probe = _weights(target).requires_grad_(True)
    (pulled,) = torch.autograd.grad(target, source, probe, create_graph=True, retain_graph=True, materialize_grads=True)
    touch = touches(pulled, heads, n_heads, [probe])[0]
    if touch is None:
        sizes = [torch.zeros(size, dtype=torch.bool, device=target.device) for size in target.shape]
        return [AxisTouch(blank, blank, blank.long()) for blank in sizes]
    return touch


def owned_axis(touch: Touch, n_heads: int, module: nn.Module) -> int | None:
    """The axis along which every index belongs to at most one head; for a single head, the output axis."""
    clean = [axis for axis, seen in enumerate(touch) if seen.clean]
    if not clean or n_heads == 1:
        partial = [axis for axis in clean if not bool(touch[axis].touched.all())]
        output = 1 if isinstance(module, Conv1D) and len(touch) > 1 else 0
        return None if not clean else partial[0] if partial else output
    covering = [axis for axis in clean if len(set(touch[axis].owners()) - {-1}) == n_heads]
    return covering[0] if covering else None


def group_owner(table: Tensor) -> tuple[int, ...] | None:
    """From `[head index]`, the group that each index serves; None unless the groups are equal and neighbouring."""
    n_heads = table.shape[0]
    sets = sorted({tuple(column.nonzero().flatten().tolist()) for column in table.T} - {()})
    flat = [head for group in sets for head in group]
    if flat != list(range(n_heads)) or len({len(group) for group in sets}) != 1:
        return None
    number = {group: index for index, group in enumerate(sets)}
    return tuple(number.get(tuple(column.nonzero().flatten().tolist()), -1) for column in table.T)


def depends(target: Tensor, source: Tensor) -> bool:
    """Whether `source` lies in the graph below `target`."""
    if not target.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(
        target, source, torch.ones_like(target), retain_graph=True, allow_unused=True, materialize_grads=False
    )
    return gradient is not None


def _weights(target: Tensor) -> Tensor:
    """Positive pseudo-random weights, the same on every device, so that no two contributions cancel."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(target.shape, generator=generator, dtype=torch.float32) + 0.5
    return drawn.to(device=target.device, dtype=target.dtype)


def _nonzero(target: Tensor, cotangent: Tensor, tensors: Sequence[Tensor]) -> list[list[Tensor] | None]:
    """For each tensor and each of its axes, the indices with a non-zero gradient; None where no graph leads there."""
    gradients = torch.autograd.grad(target, list(tensors), cotangent, retain_graph=True, allow_unused=True)
    return [None if gradient is None else _axes(local(gradient) != 0) for gradient in gradients]


def _axes(pattern: Tensor) -> list[Tensor]:
    axes = range(pattern.dim())
    return [pattern.any(dim=[other for other in axes if other != axis]) if len(axes) > 1 else pattern for axis in axes]


def _merge(before: Touch | None, ones: list[Tensor] | None, zeros: list[Tensor] | None, bit: int) -> Touch | None:
    if ones is None or zeros is None:
        return before
    seen = [AxisTouch(one | zero, one & zero, one.long() << bit) for one, zero in zip(ones, zeros, strict=True)]
    if before is None:
        return seen
    return [
        AxisTouch(old.touched | new.touched, old.mixed | new.mixed, old.number | new.number)
        for old, new in zip(before, seen, strict=True)
    ]
