"""Side by side: the whole model and one without some of its heads on the same batch, up to one output projection.

What the whole model's projection writes, less what the other's writes, is what that projection lacks. Where what it
writes is added to a stream at once, the sums are compared instead: the projection then also lacks what the stream
lost before it. Both runs stop as soon as that is known, and nothing is kept of a batch but its moments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
    """What one call of a projection read, and what it wrote or the sum that this joined."""

    read: Tensor
    wrote: Tensor


_SUMS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


class _Joining(TorchFunctionMode):
    """Notes the first sum of what a projection wrote with something else of its shape.

    The tensor `wrote` is kept, so that no other can come to lie where it lies; dropout that is off returns it as it is.
    """

    def __init__(self, on_sum: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.on_sum = on_sum
        self.wrote: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        wrote = self.wrote
        if wrote is not None and getattr(func, "__name__", "") in _SUMS and isinstance(result, Tensor):
            same = [one for one in args[:2] if isinstance(one, Tensor) and one.shape == wrote.shape]
            if len(same) == 2 and any(one.data_ptr() == wrote.data_ptr() for one in same):
                self.wrote = None
                self.on_sum(result)
        return result


class SideBySide:
    """A model whole, and with gates of 0 (`closed`) for the heads that it is to lose.

    With `streams`, what a projection lacks is seen in the stream that it writes to, where there is one.
    """

    def __init__(self, objective: Objective, closed: Mapping[SiteId, Tensor], *, streams: bool = True) -> None:
        self.objective, self.closed, self.streams = objective, closed, streams
        self._texts = Texts({}, None, None)
        self._joined: set[str] = set()
        objective.on_inputs = self._begin

    def _begin(self, inputs: dict[str, Any], batch: Batch) -> None:
        self._texts = Texts.of(inputs, batch)

    def order(self, batch: Batch) -> list[str]:
        """The paths of the output projections in the order in which they first run on a batch.

        It is also seen which of them write to a stream; call it before `moments`.
        """
        model = self.objective.model
        found: dict[str, None] = {}
        joining = _Joining(lambda result: self._joined.add(last[0]))
        last: list[str] = []

        def noting(path: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
            def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
                found.setdefault(path)
                last[:], joining.wrote = [path], output

            return note

        with contextlib.ExitStack() as stack, torch.no_grad():
            for path in {site.output for site in self.objective.sites}:
                stack.callback(model.get_submodule(path).register_forward_hook(noting(path)).remove)
            if self.streams:
                stack.enter_context(joining)
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
        path = sites[0].output

        def keep(read: Tensor, wrote: Tensor) -> None:
            found.append(_Call(read, wrote))
            if len(found) == len(sites):
                raise _Reached

        with contextlib.ExitStack() as stack:
            joining = _Joining(lambda result: keep(reads[0], result))
            reads: list[Tensor] = []

            def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
                if path not in self._joined:
                    keep(args[0], output)
                    return
                reads[:], joining.wrote = [args[0]], output

            stack.callback(self.objective.model.get_submodule(path).register_forward_hook(note).remove)
            stack.enter_context(contextlib.suppress(_Reached))
            stack.enter_context(torch.no_grad())
            if path in self._joined:
                stack.enter_context(joining)
            self.objective.forward(batch)
        return found


def _rows(site: Site, raw: Tensor, batch: int) -> Tensor:
    """What a projection wrote, laid out as `Layout` lays out what it reads: `[batch token d_model]`."""
    values = raw.movedim(site.channel_axis, -1)
    if site.batch_axis:
        values = values.movedim(site.batch_axis, 0)
    return values.reshape(batch, -1, values.shape[-1])
