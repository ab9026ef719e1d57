"""Replay: a model is run again without some heads, and all that ran before those heads answers from a first run.

Nothing is read off names. One traced pass on made-up inputs shows which modules have ended before a site's heads are
known: their outputs cannot depend on these heads, so that a later run may take them from the recording of a plain run.
What remains (masks, layers behind the site, norms, head) is the model's own code. In an encoder-decoder the whole
encoder answers at once where a decoder's head is removed. The site itself answers too: what its output projection
wrote is linear in its heads, so z_h W_o,h is subtracted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headscope.capture import Layout, gate
from headscope.discovery import evaluating
from headscope.heads import Site, SiteId
from headscope.inputs import probe_inputs
from headscope.vocabulary import answering

Removal = Mapping[SiteId, Sequence[int]]
"""Places of the heads that go, by site."""


@dataclass(frozen=True)
class Route:
    """How a site is reached again.

    `before` are the modules that have ended before the site's heads are known, outermost ones only. `carrier` is the
    module that hands on what the projection wrote, as it is: the projection itself or one around it; None where heads
    are mixed in front of the projection, so that they can only be gated.
    """

    site: Site
    start: int
    before: tuple[str, ...]
    carrier: str | None


@dataclass
class Recording:
    """What modules returned in one run; hooks fill it in place."""

    outputs: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """What entered the projections."""
    order: list[str] = field(default_factory=list)
    _versions: dict[str, list[int]] = field(default_factory=dict)

    def keep(self, path: str, inputs: tuple[Any, ...], output: Any) -> None:
        """Remember one call."""
        self.order.append(path)
        self.outputs[path] = output
        self._versions[path] = _versions(output)
        if inputs and isinstance(inputs[0], Tensor):
            self.inputs[path] = inputs[0]
            self._versions[f"{path} inputs"] = _versions(inputs[0])

    def settle(self) -> None:
        """Forget what the run has changed in place since: those modules must run again."""
        for kept, suffix in ((self.outputs, ""), (self.inputs, " inputs")):
            for path in [path for path, value in kept.items() if _versions(value) != self._versions[path + suffix]]:
                del kept[path]


class Replay:
    """A model that can be run again from any of its sites on; `routes` are the ways that were proved."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[Site], routes: Mapping[SiteId, Route]) -> None:
        self.model, self.sites, self.routes = model, {site.id: site for site in sites}, routes
        watched = {path for route in routes.values() for path in (*route.before, route.carrier, route.site.output)}
        self._watched = tuple(sorted(path for path in watched if path is not None))
        self._modules = {path: model.get_submodule(path) for path in self._watched}
        self._expected: list[str] | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, sites: Sequence[Site]) -> Replay:
        """Trace a model and prove its routes on made-up inputs; a site whose proof fails has no route.

        The proof: a replayed run without a head ends as a whole run in which that head is gated to 0.
        """
        inputs = probe_inputs(model)
        with evaluating(model), torch.no_grad():
            calls = _trace(model, inputs)
            found = cls(model, sites, _routes(model, sites, calls))
            recording = Recording()
            with found.recording(recording):
                whole = tensors(model(**inputs))
            found._expected = recording.order
            kept = {id: one for id, one in found.routes.items() if found._proved(one.site, inputs, recording, whole)}
            proved = cls(model, sites, kept)
            proved._expected = [path for path in recording.order if path in proved._modules]
        return proved

    @property
    def notes(self) -> tuple[str, ...]:
        """Which sites take whole passes, in words for a report."""
        missing = [str(id) for id in self.sites if id not in self.routes]
        if not missing:
            return ()
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return (f"{named}: no part of a run can be used again, so every ablation takes a whole pass",)

    @contextlib.contextmanager
    def recording(self, seen: Recording) -> Iterator[None]:
        """Record one run of the model, made in the block."""
        with contextlib.ExitStack() as stack:
            for path, module in self._modules.items():

                def hook(module: nn.Module, args: tuple[Any, ...], output: Any, path: str = path) -> None:
                    seen.keep(path, args, output)

                stack.callback(module.register_forward_hook(hook).remove)
            yield
        seen.settle()

    @contextlib.contextmanager
    def without(self, removed: Removal, seen: Recording | None = None) -> Iterator[None]:
        """Run the model without these heads while the block runs, from a recording on the same inputs if given.

        A recording in which modules ran in another order than on the made-up inputs is of no use, and neither is one
        where a site has no route: then the run is whole.
        """
        gates = {id: self._gates(id, places) for id, places in removed.items()}
        with contextlib.ExitStack() as stack:
            if seen is not None and self.usable(seen) and all(id in self.routes for id in removed):
                route = min((self.routes[id] for id in removed), key=lambda route: route.start)
                for path in route.before:
                    if path in seen.outputs:
                        stack.enter_context(answering(self._modules[path], seen.outputs[path]))
                answer = self._answer(route, removed[route.site.id], seen)
                if answer is not None and route.carrier is not None:
                    stack.enter_context(answering(self._modules[route.carrier], answer))
                    del gates[route.site.id]
            if gates:
                stack.enter_context(gate(self.model, gates, list(self.sites.values())))
            yield

    def usable(self, seen: Recording) -> bool:
        """Whether a recorded run took the known course."""
        return seen.order == self._expected

    def _gates(self, id: SiteId, places: Sequence[int]) -> Tensor:
        gates = torch.ones(self.sites[id].n_heads)
        gates[list(places)] = 0
        return gates

    def _answer(self, route: Route, places: Sequence[int], seen: Recording) -> Any:
        """What the carrier returns without these heads; None where the recording cannot tell."""
        path, carrier = route.site.output, route.carrier
        if carrier is None or carrier not in seen.outputs or path not in seen.outputs or path not in seen.inputs:
            return None
        wrote, returned = seen.outputs[path], seen.outputs[carrier]
        if sum(item is wrote for item in _items(returned)) != 1:
            return None  # on these inputs the carrier did more than on the made-up ones
        left = without_heads(self._modules[path], route.site, seen.inputs[path], wrote, places)
        return left if returned is wrote else tuple(left if item is wrote else item for item in returned)

    def _proved(self, site: Site, inputs: Mapping[str, Any], seen: Recording, whole: Sequence[Tensor]) -> bool:
        """Whether replay and gate agree, to far less than what the removed head does to what the `whole` model says."""
        removed = {site.id: (site.id.layer % site.n_heads,)}
        with self.without(removed):
            gated = tensors(self.model(**inputs))
        with self.without(removed, seen):
            replayed = tensors(self.model(**inputs))
        return all(_near(a, b, was) for a, b, was in zip(replayed, gated, whole, strict=True))


def without_heads(projection: nn.Module, site: Site, z: Tensor, wrote: Tensor, places: Sequence[int]) -> Tensor:
    """What an output projection writes without the heads at these places of its input `z`; `wrote` is with them.

    Their share is subtracted where that costs no precision, else the projection runs on the gated input.
    """
    weight: Any = projection.weight
    precise = wrote.dtype in (torch.float32, torch.float64) and isinstance(weight, Tensor)
    if type(projection) in (nn.Linear, Conv1D) and precise and weight.device == z.device:
        channels = torch.tensor([channel for channel, head in enumerate(site.channels) if head in places])
        channels = channels.to(z.device)
        rows = weight[:, channels] if isinstance(projection, nn.Linear) else weight[channels].T
        return wrote - F.linear(z[..., channels], rows)
    gates = torch.ones(site.n_heads, dtype=z.dtype, device=z.device)
    gates[list(places)] = 0
    return projection(z * Layout(site).spread(gates, z))


@dataclass
class _Call:
    """One call of a module in a traced run; `end` is 0 while it runs."""

    path: str
    parent: _Call | None
    start: int
    end: int = 0
    output: Any = None
    versions: list[int] = field(default_factory=list)

    def around(self) -> Iterator[_Call]:
        """The calls that hold this one, innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


def _trace(model: nn.Module, inputs: Mapping[str, Any]) -> list[_Call]:
    """All calls of modules in one run, in the order of their starts."""
    calls: list[_Call] = []
    running: list[_Call] = []
    clock = iter(range(1, 2**62))
    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():

            def enter(module: nn.Module, args: tuple[Any, ...], path: str = path) -> None:
                calls.append(_Call(path, running[-1] if running else None, next(clock)))
                running.append(calls[-1])

            def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                call = running.pop()
                call.end, call.output, call.versions = next(clock), output, _versions(output)

            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        model(**inputs)
    return calls


def _routes(model: nn.Module, sites: Sequence[Site], calls: Sequence[_Call]) -> dict[SiteId, Route]:
    """The way to each site whose module runs once."""
    by_path: dict[str, list[_Call]] = {}
    for call in calls:
        by_path.setdefault(call.path, []).append(call)
    once = [same[0] for same in by_path.values() if len(same) == 1]
    found: dict[SiteId, Route] = {}
    for site in sites:
        taps = by_path.get(site.module if site.on_context else site.output, [])
        if len(taps) != 1:
            continue
        carrier = None if site.on_context else _carrier(taps[0], by_path)
        top = carrier or taps[0]
        open_calls = {id(call) for call in top.around()}
        before = [
            call.path
            for call in once
            if call.end < top.start and id(call.parent) in open_calls and _worth(model.get_submodule(call.path), call)
        ]
        found[site.id] = Route(site, top.start, tuple(before), carrier.path if carrier else None)
    return found


def _carrier(projection: _Call, by_path: Mapping[str, Sequence[_Call]]) -> _Call:
    """The outermost call that hands on the projection's output untouched."""
    carrier = projection
    for call in projection.around():
        same = [item for item in _items(call.output) if item is projection.output]
        if len(same) != 1 or len(by_path[call.path]) != 1 or _versions(same[0]) != projection.versions:
            break
        carrier = call
    return carrier


def _worth(module: nn.Module, call: _Call) -> bool:
    """Whether a module's answer saves a matrix product or more, for the memory of its output."""
    return bool(tensors(call.output)) and any(parameter.dim() > 1 for parameter in module.parameters())


def _items(output: Any) -> tuple[Any, ...]:
    """What a module returned, one by one where it is a plain tuple."""
    return output if type(output) is tuple else (output,)


def tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in an output, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def _versions(output: Any) -> list[int]:
    """How often each tensor in an output was changed in place."""
    return [tensor._version for tensor in tensors(output)]


def _near(replayed: Tensor, gated: Tensor, whole: Tensor) -> bool:
    """Equal but for rounding, and but for a thousandth of what the gate did."""
    if replayed.shape != gated.shape:
        return False
    finite = [torch.nan_to_num(tensor.double()) for tensor in (replayed, gated, whole)]
    rounding = 64 * torch.finfo(gated.dtype).eps * float(finite[1].abs().max())
    effect = float((finite[1] - finite[2]).abs().max())
    return float((finite[0] - finite[1]).abs().max()) <= rounding + 1e-3 * effect
