"""Side by side: the whole model and one without some of its heads on the same batch, up to one output projection.

What the whole model's projection writes, less what the other's writes, is what that projection lacks. Both runs stop
as soon as the projection has run, and nothing is kept of a batch but its moments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.capture import Layout, gate
from headscope.examples import Batch
from headscope.heads import Site, SiteId
from headscope.least_squares import Moments, exact
from headscope.objective import Objective
from headscope.output_weights import Patch, output_bias, swapped
from headscope.texts import Texts


class _Reached(BaseException):
    """The projection has run: the rest of the model is not needed."""


@dataclass(frozen=True)
class _Call:
    """What one call of a projection read and wrote."""

    read: Tensor
    wrote: Tensor


class SideBySide:
    """A model whole, and with gates of 0 (`closed`) for the heads that it is to lose."""

    def __init__(self, objective: Objective, closed: Mapping[SiteId, Tensor]) -> None:
        self.objective, self.closed = objective, closed
        self._texts = Texts({}, None, None)
        objective.on_inputs = self._begin

    def _begin(self, inputs: dict[str, Any], batch: Batch) -> None:
        self._texts = Texts.of(inputs, batch)

    def order(self, batch: Batch) -> list[str]:
        """The paths of the output projections in the order in which they first run on a batch."""
        model = self.objective.model
        found: dict[str, None] = {}

        def noting(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            return lambda module, args: found.setdefault(path)

        with contextlib.ExitStack() as stack, torch.no_grad():
            for path in {site.output for site in self.objective.sites}:
                stack.callback(model.get_submodule(path).register_forward_pre_hook(noting(path)).remove)
            self.objective.forward(batch)
        return list(found)

    def moments(
        self, batch: Batch, sites: Sequence[Site], places: Sequence[int], *, repairs: Sequence[Patch]
    ) -> Moments | None:
        """What the heads at `places` put out in the model with closed gates, and what their projection lacks.

        `sites` are all layers that share the projection, whose moments are summed; `repairs` stand in the model with
        closed gates only. Real tokens count, padding does not. None where the batch does not reach the projection.
        """
        model = self.objective.model
        whole = self._calls(batch, sites)
        with gate(model, self.closed, self.objective.sites), swapped(repairs):
            less = self._calls(batch, sites)
        constant = output_bias(model, sites[0]) is not None
        features: list[Tensor] = []
        lacks: list[Tensor] = []
        for site, full, part in zip(sites, whole, less, strict=False):
            z = Layout(site).heads(part.read, len(batch))
            z = z[:, :, torch.tensor(places, device=z.device)].flatten(2)  # [batch token feature]
            real = self._texts.real(site, z)
            features.append(z[real])
            real = real.to(exact(z[:0]).device)
            lacks.append(
                (exact(_rows(site, full.wrote, len(batch))) - exact(_rows(site, part.wrote, len(batch))))[real]
            )
        if not features:
            return None
        return Moments.of(torch.cat(features), torch.cat(lacks), constant=constant)

    def _calls(self, batch: Batch, sites: Sequence[Site]) -> list[_Call]:
        """What the projection read and wrote for each layer that uses it."""
        found: list[_Call] = []

        def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            found.append(_Call(args[0], output))
            if len(found) == len(sites):
                raise _Reached

        handle = self.objective.model.get_submodule(sites[0].output).register_forward_hook(note)
        try:
            with torch.no_grad(), contextlib.suppress(_Reached):
                self.objective.forward(batch)
        finally:
            handle.remove()
        return found


def _rows(site: Site, raw: Tensor, batch: int) -> Tensor:
    """What a projection wrote, laid out as `Layout` lays out what it reads: `[batch token d_model]`."""
    values = raw.movedim(site.channel_axis, -1)
    if site.batch_axis:
        values = values.movedim(site.batch_axis, 0)
    return values.reshape(batch, -1, values.shape[-1])
