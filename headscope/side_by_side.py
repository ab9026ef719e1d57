"""Side by side: the whole model and one without some of its heads on the same batch, up to one output projection.

What the whole model's projection writes, less what the other's writes, is what that projection lacks. Where what it
writes is added to a stream at once, the sums are compared instead: the projection then also lacks what the stream
lost before it. The smaller model's run stops as soon as that is known; for the next projection it goes on from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headscope.capture import Layout, gate
from headscope.examples import Batch
from headscope.heads import Site, SiteId
from headscope.least_squares import Moments, exact
from headscope.original import Original
from headscope.output_weights import Patch, output_bias, swapped
from headscope.streams import Call


class _Reached(BaseException):
    """The projection has run: the rest of the model is not needed."""


class SideBySide:
    """An original, and the same model with gates of 0 (`closed`) for the heads that it is to lose.

    Projections must be asked for in the order of running, each after the one before has its repair for good.
    """

    def __init__(self, original: Original, closed: Mapping[SiteId, Tensor]) -> None:
        self.original, self.closed = original, closed
        self._resuming = original.resuming()

    def moments(
        self, batch: Batch, sites: Sequence[Site], places: Sequence[int], *, repairs: Sequence[Patch]
    ) -> Moments | None:
        """What the heads at `places` put out in the model with closed gates, and what their projection lacks.

        `sites` are all layers that share the projection, whose moments are summed; `repairs` stand in the model with
        closed gates only. Real tokens count, padding does not. None where the batch does not reach the projection.
        """
        model = self.original.objective.model
        whole = self.original.wrote(batch, sites[0].output)
        with gate(model, self.closed, self.original.study.sites), swapped(repairs):
            less = self._calls(batch, sites)
        constant = output_bias(model, sites[0]) is not None
        found: Moments | None = None
        for site, full, part in zip(sites, whole, less, strict=False):
            z = Layout(site).heads(part.read, len(batch))
            z = z[:, :, torch.tensor(places, device=z.device)].flatten(2)  # [batch token feature]
            real = self.original.texts.real(site, z)
            weights = self.original.weights(site.id, batch, real)
            there = exact(z[:0]).device
            lack = exact(_rows(site, full.to(part.wrote.device), len(batch))) - exact(
                _rows(site, part.wrote, len(batch))
            )
            one = Moments.of(z[real], lack[real.to(there)], constant=constant, weights=weights)
            found = one if found is None else found + one
        return found

    def _calls(self, batch: Batch, sites: Sequence[Site]) -> list[Call]:
        """What the projection read and wrote for each layer that uses it."""
        found: list[Call] = []

        def keep(call: Call) -> None:
            found.append(call)
            if len(found) == len(sites):
                raise _Reached

        original = self.original
        with (
            self._resuming.until(sites[0].id, batch.numbers),
            contextlib.suppress(_Reached),
            torch.no_grad(),
            original.streams.shown([sites[0].output], keep),
        ):
            original.objective.body(batch)
        return found


def _rows(site: Site, raw: Tensor, batch: int) -> Tensor:
    """What a projection wrote, laid out as `Layout` lays out what it reads: `[batch token d_model]`."""
    values = raw.movedim(site.channel_axis, -1)
    if site.batch_axis:
        values = values.movedim(site.batch_axis, 0)
    return values.reshape(batch, -1, values.shape[-1])
