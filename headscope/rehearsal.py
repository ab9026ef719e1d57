"""Rehearsal: each attention module alone, before surgery, shows in which way it runs without the heads that are to go.

A copy of the module in float64 answers the call that it gets on made-up inputs, once with those heads gated to 0 and
once without them. What does not come out equal either way is refused by name, before anything is changed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.boundary import Boundary
from headscope.capture import gate
from headscope.cuts import Cut, Way, around, is_filled
from headscope.discovery import evaluating
from headscope.errors import InvalidPlan
from headscope.inputs import probe_inputs
from headscope.reasons import RAISED, first_line, quiet
from headscope.silence import is_map

SAME = 2e-6
"""The largest relative difference of equal computations of one module, some of which are in float32 inside."""


@dataclass(frozen=True)
class _Call:
    """What one module was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def rehearse(
    model: PreTrainedModel,
    cuts: Sequence[Cut],
    edges: Mapping[str, Boundary],
    *,
    read: Mapping[str, set[str]],
) -> dict[str, Way]:
    """In which way each cut's module runs without its heads, by module path.

    Modules whose parameters are not in memory are taken to count their heads.

    Raises:
        InvalidPlan: naming the first site whose module runs in neither way.
    """
    if not cuts:
        return {}
    roots = {cut.site.module: around(cut.site, edges[cut.site.module]) for cut in cuts}
    calls = _calls(model, {path for root in roots.values() for path in _outwards(root)})
    swapped = _swapped(model, list(roots))
    ways: dict[str, Way] = {}
    for cut in cuts:
        module = cut.site.module
        cut.root = roots[module]
        for path in (path for path in _outwards(roots[module]) if path in calls):
            cut.root = path
            expected = _expected(model, cut, calls[path])
            if expected is not None:
                counts = module not in swapped and not is_filled(model.get_submodule(module))
                ways[module] = _way(
                    model, cut, edges[module], calls[path], read=read[module], expected=expected, counts=counts
                )
                break
    return ways


def _swapped(model: PreTrainedModel, paths: Sequence[str]) -> set[str]:
    """Modules that the model put there while it ran, with counts from its configuration, as it will after loading."""
    original = next((kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.")), None)
    try:
        with quiet(), torch.device("meta"):
            fresh = original._from_config(copy.deepcopy(model.config))  # type: ignore[union-attr]
            return {path for path in paths if type(fresh.get_submodule(path)) is not type(model.get_submodule(path))}
    except RAISED:
        return set()


def _outwards(path: str) -> list[str]:
    """A path and those of the modules around it: some modules are never called, only their methods."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _expected(model: PreTrainedModel, cut: Cut, call: _Call) -> list[Tensor] | None:
    """What the module around a cut says with the heads gated to 0; None where it does not run on its own."""
    gates = torch.zeros(cut.site.n_heads).index_fill(0, torch.tensor(cut.kept, dtype=torch.long), 1.0)
    try:
        stage = _stage(model, cut.root)
        with gate(stage, {cut.site.id: gates}, [cut.site]):
            return _answer(stage, cut.root, call)
    except RAISED:
        return None


def _way(
    model: PreTrainedModel,
    cut: Cut,
    edge: Boundary,
    call: _Call,
    *,
    read: set[str],
    expected: list[Tensor],
    counts: bool,
) -> Way:
    path, site, problem = cut.root, cut.site, ""
    for way in Way if counts else list(Way)[1:]:
        try:
            stage = _stage(model, path)
            cut.make(stage, edge, read, way=way)
            difference = _difference(expected, _answer(stage, path, call))
        except RAISED as error:
            problem = problem or first_line(error)
            continue
        if difference <= SAME:
            return way
        problem = problem or f"what it writes changes by {difference:.1g} of its size"
    raise InvalidPlan(
        f"{site.id}: {site.module_class} does not compute the same without these heads: {problem}",
        hint="--layout masked is exact",
    )


def _calls(model: PreTrainedModel, paths: set[str]) -> dict[str, _Call]:
    """The first call of each module, of those in memory, when the model runs on made-up inputs."""
    seen: dict[str, _Call] = {}

    def hook(path: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.setdefault(path, _Call(_detached(args), _detached(kwargs)))

        return enter

    with contextlib.ExitStack() as stack, torch.no_grad(), evaluating(model):
        for path in sorted(paths):
            module = model.get_submodule(path)
            if all(parameter.device.type != "meta" for parameter in module.parameters()):
                stack.callback(module.register_forward_pre_hook(hook(path), with_kwargs=True).remove)
        model(**probe_inputs(model))
    return seen


def _stage(model: nn.Module, path: str) -> nn.Module:
    """A model that holds a copy of one module in float64, at the same path, and nothing else."""
    copied = copy.deepcopy(model.get_submodule(path)).double().eval()
    for name in reversed(path.split(".") if path else []):
        outer = nn.Module()
        outer.add_module(name, copied)
        copied = outer
    return copied


def _answer(stage: nn.Module, path: str, call: _Call) -> list[Tensor]:
    """The floating tensors that a module returns to a call; attention maps, which may have fewer heads, left out."""
    with torch.no_grad():
        returned = stage.get_submodule(path)(*_wide(call.args), **_wide(call.kwargs))
    values = [value for value in _flat(returned) if value.is_floating_point()]
    return values[:1] + [value for value in values[1:] if not is_map(value)]


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest relative difference."""
    if [one.shape for one in expected] != [one.shape for one in found]:
        return float("inf")
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        if one.numel():
            gap = float((one - other).abs().max() / one.abs().max().clamp_min(torch.finfo(one.dtype).tiny))
            worst = max(worst, gap) if gap == gap else float("inf")
    return worst


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for one in values for tensor in _flat(one)]


def _detached(value: Any) -> Any:
    """What a module was called with, kept from what the model does to it later."""
    return _mapped(value, lambda tensor: tensor.detach().clone())


def _wide(value: Any) -> Any:
    """The same in float64, for one run."""
    return _mapped(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor.clone())


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(one, change) for one in value)
    if type(value) is dict:
        return {name: _mapped(one, change) for name, one in value.items()}
    return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value  # a cache is written to
