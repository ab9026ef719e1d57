"""Discovery runs a model once on made-up inputs and returns its sites: where each head lives in the parameters.

Nothing is read off names. Sites show themselves as attention calls (`taps`); which slice of which parameter belongs to
which head is found from gradients (`ownership`). Each site's context is detached into a leaf, so that every question
is asked of a small local graph and cost grows linearly with the number of sites.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headscope.anatomy import Anatomy, dissect
from headscope.errors import UnsupportedModel
from headscope.families import kinds
from headscope.heads import AttentionKind, Site, SiteId
from headscope.inputs import probe_inputs
from headscope.numbers import renumbered
from headscope.parallel import shards_of
from headscope.portable import Silent
from headscope.projecting import Projection
from headscope.stacks import StackNames
from headscope.taps import AttentionCall, FunctionTap, InterfaceTap, ModuleStack

_ATTENTION = re.compile(r"(Attention|Attn)(?!.*(Mask|Output|Norm|Pooler))|MultiHead")
_SHOWS_NONE, _NOT_REACHED = "it ran, but no softmax attention was seen in it", "made-up inputs do not reach it"
_LINEAR = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)


Unseen = tuple[str, str]
"""The path of an attention module that is no site, and why."""


@dataclass
class Sighting:
    """One module's attention during the probe: its first call, and how often the module ran."""

    time: int
    call: AttentionCall
    leaf: Tensor
    runs: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class OtherMixer:
    """A module that mixes tokens without softmax attention, and what it does instead."""

    path: str
    module_class: str
    instead: str


@dataclass(frozen=True)
class Discovery:
    """What the probe found: the sites in reporting order, and what it saw but could not resolve."""

    sites: tuple[Site, ...]
    problems: tuple[str, ...]
    others: tuple[OtherMixer, ...] = ()
    """What has no heads: linear attention, state spaces and their like."""


class _Probe:
    """The record of one forward pass: attention calls and linear calls in the order they happened."""

    def __init__(self, model: nn.Module) -> None:
        self.clock = 0
        self.sightings: dict[int, Sighting] = {}
        self.starts: dict[int, list[int]] = {}
        self.projections: list[Projection] = []
        self.sources: dict[int, int] = {}
        self._ids: dict[int, tuple[nn.Module, str]] = {
            id(parameter): (module, name)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.clock += 1
        self.starts.setdefault(id(module), []).append(self.clock)
        values = [*args, *kwargs.values()]
        self.sources.setdefault(id(module), len({id(value) for value in values if _is_sequence(value)}))
        if is_linear(module):
            tensor = next((value for value in values if isinstance(value, Tensor)), None)
            if tensor is not None and tensor.is_floating_point():
                self.projections.append(Projection(self.clock, module, "weight", tensor))

    def multiply(self, parameter: nn.Parameter, tensor: Tensor, product: Tensor) -> None:
        if id(parameter) in self._ids:
            self.clock += 1
            self.projections.append(Projection(self.clock, *self._ids[id(parameter)], tensor, product))

    def attend(self, call: AttentionCall) -> Tensor:
        self.clock += 1
        if not torch.is_grad_enabled():  # a round that the model itself takes without gradients
            return call.context
        leaf = call.context.detach().requires_grad_(True)
        if id(call.module) not in self.sightings:
            self.sightings[id(call.module)] = Sighting(self.clock, call, leaf)
        return leaf


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3


def is_linear(module: nn.Module) -> bool:
    """Whether a module maps its input linearly by a matrix called `weight` (quantised layers included)."""
    if isinstance(module, _LINEAR):
        return True
    weight = getattr(module, "weight", None)
    named = type(module).__name__.lower()
    return isinstance(weight, Tensor) and weight.dim() == 2 and "norm" not in named and "embed" not in named


def find_sites(model: PreTrainedModel, inputs: dict[str, Any] | None = None) -> Discovery:
    """Find every attention site that `inputs` (default: made-up ones) reach, with the parameters of each head.

    Raises:
        UnsupportedModel: no attention module was reached.
    """
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model), differentiable(model):
        probe = _run(model, probe_inputs(model) if inputs is None else inputs)
        found, problems = _dissect(model, probe)
    others = other_mixers(model)
    known = [path for _, _, path in found] + [other.path for other in others] + [path for path, _ in problems]
    unseen = [*problems, *_unseen(model, probe, known)]
    if not found:
        raise UnsupportedModel(f"no attention head found in {type(model).__name__}: {_why(unseen, others)}")
    sites = shards_of(model).joined(renumbered(model, _number(found, StackNames(model))), model)
    return Discovery(sites, tuple(_told(model, path, why) for path, why in unseen), others)


def other_mixers(model: nn.Module) -> tuple[OtherMixer, ...]:
    """The modules of a model that are of a kind in `families`; outermost ones only."""
    found: list[OtherMixer] = []
    known = kinds()
    for path, module in model.named_modules():
        name = type(module).__name__
        kind = next((kind for kind in known if kind.covers(path, name)), None)
        if kind is not None and not any(_inside(path, other.path) for other in found):
            found.append(OtherMixer(path, name, kind.instead))
    return tuple(found)


def _unseen(model: nn.Module, probe: _Probe, known: list[str]) -> list[Unseen]:
    """Modules that are called attention and showed none, with the reason; innermost ones only."""
    named = [
        (path, module)
        for path, module in model.named_modules()
        if _ATTENTION.search(type(module).__name__)
        and sum(one.dim() > 1 for one in module.parameters()) > 1
        and not any(isinstance(part, Silent) for part in module.modules())  # its heads were removed
    ]
    found: list[Unseen] = []
    for path, module in named:
        related = any(_inside(path, other) or _inside(other, path) for other in known)
        if related or any(other != path and _inside(other, path) for other, _ in named):
            continue
        ran = id(module) in probe.starts
        found.append(
            (path, "it ran, but no softmax attention was seen in it" if ran else "made-up inputs do not reach it")
        )
    return found


def _inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _told(model: nn.Module, path: str, why: str) -> str:
    return f"{path} ({type(model.get_submodule(path)).__name__}): {why}"


def _why(unseen: list[Unseen], others: tuple[OtherMixer, ...]) -> str:
    """Why a model has no head to show."""
    if unseen:
        return "; ".join(f"{path}: {why}" for path, why in unseen[:3])
    mixers = dict.fromkeys(f"{other.module_class} has none, {other.instead}" for other in others)
    return "; ".join(mixers) or "no softmax attention was reached"


def _dissect(model: PreTrainedModel, probe: _Probe) -> tuple[list[tuple[Sighting, Anatomy, str]], list[Unseen]]:
    """The anatomy of each attention module in the order of running, and what could not be told, with its path."""
    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    found: list[tuple[Sighting, Anatomy, str]] = []
    problems: list[Unseen] = []
    known: dict[Any, Anatomy] = {}
    for sighting in sorted(probe.sightings.values(), key=lambda seen: seen.time):
        path = paths.get(id(sighting.call.module), "")
        sighting.runs = probe.starts.get(id(sighting.call.module), [sighting.time])
        later = [one for one in probe.projections if one.time > sighting.time]
        alone = probe.sources.get(id(sighting.call.module), 0) < 2
        anatomy = dissect(model, path, sighting.call, sighting.leaf, later, alone=alone, known=known)
        if isinstance(anatomy, str):
            if _ATTENTION.search(type(sighting.call.module).__name__):  # else a softmax over something else
                problems.append((path, anatomy))
        else:
            found.append((sighting, anatomy, path))
    return found, problems


def _run(model: PreTrainedModel, inputs: dict[str, Any], *, again: bool = True) -> _Probe:
    probe, modules = _Probe(model), list(model.modules())
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(ModuleStack(model, probe.enter))
        interface = stack.enter_context(InterfaceTap(probe.attend))
        stack.enter_context(FunctionTap(running, interface, probe.attend, probe.multiply))
        model(**inputs)
    swapped = [id(module) for module in modules] != [id(module) for module in model.modules()]
    return _run(model, inputs, again=False) if swapped and again else probe  # attention changed for short inputs


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout), each module's own mode restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Gradients for all floating parameters, restored afterwards."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for parameter in before:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        yield
    finally:
        for parameter, wanted in before.items():
            parameter.requires_grad_(wanted)


def _number(found: list[tuple[Sighting, Anatomy, str]], names: StackNames) -> tuple[Site, ...]:
    """Give every site its label; a module that ran n times stands for n layers that share it."""
    runs = sorted((start, index) for index, (sighting, _, _) in enumerate(found) for start in sighting.runs)
    groups: dict[tuple[str, AttentionKind], list[tuple[int, int]]] = {}
    calls: dict[int, int] = {}
    for _, index in runs:
        _, anatomy, path = found[index]
        call = calls.get(index, 0)
        calls[index] = call + 1
        groups.setdefault((names.stack(path, anatomy.kind), anatomy.kind), []).append((index, call))
    stacks = list(dict.fromkeys(stack for stack, _ in groups))
    kinds = list(AttentionKind)
    sites: list[Site] = []
    for stack, kind in sorted(groups, key=lambda group: (stacks.index(group[0]), kinds.index(group[1]))):
        members = groups[stack, kind]
        layers = names.layers([found[index][2] for index, _ in members])
        labels = [SiteId(stack, kind, layer) for layer in layers]
        for (index, call), label in zip(members, labels, strict=True):
            twins = tuple(other for (twin, _), other in zip(members, labels, strict=True) if twin == index)
            shared = tuple(other for other in twins if other != label)
            sites.append(found[index][1].site(label, found[index][2], shared_with=shared, call=call))
    return tuple(sites)
