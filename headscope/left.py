"""The heads that are left in a module that runs on filled parameters, picked out of tensors that hold all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HeadsLeft:
    """Picks the heads that are left, and puts them back among zeros; layouts are those of `taps.AttentionCall`."""

    def __init__(self, pieces: list[dict[str, Any]]) -> None:
        by_name = {piece["name"]: piece for piece in pieces if piece["where"] == "heads"}
        self._query, self._key = by_name["query"], by_name["key"]

    @classmethod
    def of(cls, module: nn.Module) -> HeadsLeft | None:
        """Those of a module; None where it counts its heads itself."""
        pieces = module.__dict__.get("headscope_arguments", ())
        return cls(list(pieces)) if any(piece["where"] == "heads" for piece in pieces) else None

    def query(self, tensor: Tensor, axes: tuple[int, ...] = (1, 2)) -> Tensor:
        """The part of a tensor that holds something for every query head; the first of `axes` of that size has them."""
        return _picked(tensor, self._query, axes)

    def key(self, tensor: Tensor) -> Tensor:
        """The part of a key or value, which hold the key/value heads, or these once for each query head."""
        shared = self._key["heads"] != self._query["heads"] and _axis(tensor, self._key["heads"], (1, 2)) is None
        return _picked(tensor, self._query if shared else self._key, (1, 2))

    def whole(self, part: Tensor, like: Tensor, axes: tuple[int, ...] = (1, 2)) -> Tensor:
        """`part`, picked from `like` (or made for it, where that is empty), among zeros for the heads that are gone."""
        heads, kept = self._query["heads"], torch.tensor(self._query["kept"], device=part.device)
        axis = _axis(like, heads, axes) if len(like) else _axis(part, len(kept), axes)
        if axis is not None:
            return part.new_zeros(_resized(part, axis, heads)).index_copy(axis, kept, part)
        split = part.unflatten(0, (-1, len(kept)))
        return split.new_zeros(_resized(split, 1, heads)).index_copy(1, kept, split).flatten(0, 1)


def _resized(tensor: Tensor, axis: int, size: int) -> tuple[int, ...]:
    return (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])


def _axis(tensor: Tensor, heads: int, axes: tuple[int, ...]) -> int | None:
    return next((axis for axis in axes if tensor.dim() == 4 and tensor.shape[axis] == heads), None)


def _picked(tensor: Tensor, piece: dict[str, Any], axes: tuple[int, ...]) -> Tensor:
    heads, kept = piece["heads"], torch.tensor(piece["kept"], device=tensor.device)
    axis = _axis(tensor, heads, axes)
    if axis is not None:
        return tensor.index_select(axis, kept)
    if tensor.dim() == 3 and tensor.shape[0] % heads == 0:  # [batch*head position width]
        return tensor.unflatten(0, (-1, heads)).index_select(1, kept).flatten(0, 1)
    return tensor
