"""The heads that are left in a module that runs on filled parameters, picked out of tensors that hold all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HeadsLeft:
    """Picks the heads that are left, and puts them back among zeros; layouts are those of `taps.AttentionCall`."""

    def __init__(self, left: dict[str, Any]) -> None:
        """`left` holds the "axis" of heads in the context (0: with the sequences), how many "heads" and "kv_heads"
        there were, and the places of those "kept" and "kv_kept".
        """
        self._axis, self._query = left["axis"], (left["heads"], left["kept"])
        self._key = (left["kv_heads"], left["kv_kept"])

    @classmethod
    def of(cls, module: nn.Module) -> HeadsLeft | None:
        """Those of a module; None where it counts its heads itself."""
        left = module.__dict__.get("headscope_left")
        return None if left is None else cls(left)

    def query(self, tensor: Tensor) -> Tensor:
        """The part of a query or of attention rows."""
        return _picked(tensor, *self._query, self._axis_of(tensor, self._query[0]))

    def key(self, tensor: Tensor) -> Tensor:
        """The part of a key or value, which hold the key/value heads, or these once for each query head."""
        heads = self._key if self._axis_of(tensor, self._key[0]) is not None else self._query
        return _picked(tensor, *heads, self._axis_of(tensor, heads[0]))

    def context(self, tensor: Tensor) -> Tensor:
        """The part of a context."""
        return _picked(tensor, *self._query, self._axis)

    def whole(self, part: Tensor) -> Tensor:
        """A context of the heads that are left, among zeros for those that are gone."""
        heads, places = self._query
        kept, axis = torch.tensor(places, device=part.device), self._axis
        split = part if axis else part.unflatten(0, (-1, len(places)))
        shape = list(split.shape)
        shape[axis or 1] = heads
        filled = split.new_zeros(shape).index_copy(axis or 1, kept, split)
        return filled if axis else filled.flatten(0, 1)

    def _axis_of(self, tensor: Tensor, heads: int) -> int | None:
        """The axis of a tensor's heads: 0 with the sequences, as in the context, else the first one of that size."""
        axes = [axis for axis in range(1, tensor.dim() - 1) if tensor.dim() > 3 and tensor.shape[axis] == heads]
        flat = [0] if tensor.dim() > 2 and tensor.shape[0] % heads == 0 else []
        return next(iter(axes + flat if self._axis else flat + axes), None)


def _picked(tensor: Tensor, heads: int, places: list[int], axis: int | None) -> Tensor:
    kept = torch.tensor(places, device=tensor.device)
    if axis is None:
        return tensor
    if axis:
        return tensor.index_select(axis, kept)
    return tensor.unflatten(0, (-1, heads)).index_select(1, kept).flatten(0, 1)
