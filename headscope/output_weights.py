"""Output projections by head: the part of a site's weight that each head writes by, read, replaced and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headscope.heads import ParameterSlice, Role, Site
from headscope.offload import stored


def obstacle(model: nn.Module, site: Site) -> str:
    """Why the weights that the heads of a site write by cannot be replaced head by head; empty where they can."""
    if site.mixes_heads:
        return "its heads are mixed before the output projection"
    pieces = site.slices_of(Role.OUTPUT)
    if len(pieces) != 1 or pieces[0].module != site.output or pieces[0].owner != site.channels:
        return "its output projection is no single matrix"
    weight = _parameter(model, pieces[0])
    if not weight.is_floating_point() or weight.device.type == "meta":
        return "its output projection is quantised or not in memory"
    if weight.numel() != len(site.channels) * site.d_model:
        return "its output projection is no matrix from heads to the model's width"
    return ""


def head_columns(model: nn.Module, site: Site, places: Sequence[int]) -> Tensor:
    """What the heads at these places write by, `[head d_value d_model]` in float64, on the CPU."""
    piece = site.slices_of(Role.OUTPUT)[0]
    weight = stored(model.get_submodule(piece.module), piece.name)
    rows = weight.detach().movedim(piece.axis, 0).flatten(1)
    return torch.stack([rows[_indices(piece, place, rows)].cpu().double() for place in places])


def output_bias(model: nn.Module, site: Site) -> nn.Parameter | None:
    """The bias of a site's output projection; None where it has none."""
    bias = getattr(model.get_submodule(site.output), "bias", None)
    return bias if isinstance(bias, nn.Parameter) else None


@dataclass(frozen=True)
class Patch:
    """A parameter and the values that are to stand there."""

    parameter: nn.Parameter
    values: Tensor

    def write(self) -> None:
        """Put the values there for good."""
        with torch.no_grad():
            self.parameter.copy_(self.values)


def patches(
    model: nn.Module, site: Site, places: Sequence[int], columns: Tensor, *, bias: Tensor | None
) -> list[Patch]:
    """The output projection with other `columns` `[head d_value d_model]` at these places, and another bias if given.

    Values take the parameters' number format and device; what belongs to other heads stays.
    """
    piece = site.slices_of(Role.OUTPUT)[0]
    weight = _parameter(model, piece)
    values = weight.detach().clone()
    rows = values.movedim(piece.axis, 0)  # a view: writing to it fills `values`
    for place, new in zip(places, columns, strict=True):
        index = _indices(piece, place, values)
        rows[index] = new.to(values).reshape(len(index), *rows.shape[1:])
    found = [Patch(weight, values)]
    if bias is not None:
        own = output_bias(model, site)
        assert own is not None, "a repair never makes a bias"
        found.append(Patch(own, bias.to(own.detach()).clone()))
    return found


@contextlib.contextmanager
def swapped(changes: Sequence[Patch]) -> Iterator[None]:
    """Other values in some parameters while the block runs; the very tensors that were there come back."""
    before = [patch.parameter.data for patch in changes]
    try:
        for patch in changes:
            patch.parameter.data = patch.values
        yield
    finally:
        for patch, data in zip(changes, before, strict=True):
            patch.parameter.data = data


def _parameter(model: nn.Module, piece: ParameterSlice) -> nn.Parameter:
    return getattr(model.get_submodule(piece.module), piece.name)


def _indices(piece: ParameterSlice, place: int, like: Tensor) -> Tensor:
    return torch.tensor(piece.indices(place), device=like.device, dtype=torch.long)
