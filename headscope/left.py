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

    def query(self, tensor: Tensor) -> Tensor:
        """The part of a query or of attention rows."""
        return _picked(tensor, self._query, self._axis(tensor, self._query["heads"]))

    def key(self, tensor: Tensor) -> Tensor:
        """The part of a key or value, which hold the key/value heads, or these once for each query head."""
        piece = self._key if self._axis(tensor, self._key["heads"]) is not None else self._query
        return _picked(tensor, piece, self._axis(tensor, piece["heads"]))

    def context(self, tensor: Tensor) -> Tensor:
        """The part of a context."""
        return _picked(tensor, self._query, self._query["axis"])

    def whole(self, part: Tensor) -> Tensor:
        """A context of the heads that are left, among zeros for those that are gone."""
        kept, axis = torch.tensor(self._query["kept"], device=part.device), self._query["axis"]
        split = part if axis else part.unflatten(0, (-1, len(kept)))
        shape = list(split.shape)
        shape[axis or 1] = self._query["heads"]
        filled = split.new_zeros(shape).index_copy(axis or 1, kept, split)
        return filled if axis else filled.flatten(0, 1)

    def _axis(self, tensor: Tensor, heads: int) -> int | None:
        """The axis of a tensor's heads: 0 with the sequences, as in the context, else the first one of that size."""
        axes = [axis for axis in range(1, tensor.dim() - 1) if tensor.dim() > 3 and tensor.shape[axis] == heads]
        flat = [0] if tensor.dim() > 2 and tensor.shape[0] % heads == 0 else []
        return next(iter(axes + flat if self._query["axis"] else flat + axes), None)


def _picked(tensor: Tensor, piece: dict[str, Any], axis: int | None) -> Tensor:
    kept = torch.tensor(piece["kept"], device=tensor.device)
    if axis is None:
        return tensor
    if axis:
        return tensor.index_select(axis, kept)
    return tensor.unflatten(0, (-1, piece["heads"])).index_select(1, kept).flatten(0, 1)
