"""What reaches an attention module with something for every head in it: position biases and slopes computed elsewhere.

Such a tensor serves all layers, whatever heads each has left, so it stays whole and is cut where a module takes it
(`portable.cut`). It is found like everything else: along one of its axes each index touches one head alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.discovery import differentiable, evaluating
from headscope.geometry import head_numbers
from headscope.heads import Site
from headscope.inputs import probe_inputs
from headscope.ownership import Touch, touches
from headscope.portable import arguments_by_name
from headscope.taps import AttentionCall, FunctionTap, InterfaceTap, ModuleStack


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a module's forward, or of the attention function it calls, with heads along `axis`."""

    where: str
    name: str
    axis: int


@dataclass(frozen=True)
class Boundary:
    """The per-head arguments of one site's module, and parameters that are seen only through them."""

    arguments: tuple[Argument, ...] = ()
    whole: frozenset[str] = frozenset()
    """Paths of parameters that make such an argument: they serve other layers too and stay whole."""


def boundaries(model: PreTrainedModel, sites: Sequence[Site]) -> dict[str, Boundary]:
    """The boundary of each site's module, by module path, from one forward pass on made-up inputs.

    `sites` must be all sites of the model: what several of them take belongs to none.
    """
    watch, inputs = _Watch(model, sites), probe_inputs(model)
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model), differentiable(model), watch.hooked():
        model(**inputs)
    return {site.module: watch.boundary(site) for site in sites}


class _Watch:
    """Shows each site's arguments while the model runs; contexts are detached, so that no layer sees another."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[Site]) -> None:
        self.model = model
        self.sites = {id(model.get_submodule(site.module)): site for site in sites}
        self.found: dict[str, list[tuple[Argument, set[str]]]] = {site.module: [] for site in sites}
        self.entered: dict[int, dict[str, Tensor]] = {}
        self.opened: list[Tensor] = []

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            modules = stack.enter_context(ModuleStack(self.model, self._enter))
            interface = stack.enter_context(InterfaceTap(self._attend, before=self._before))
            stack.enter_context(FunctionTap(modules, interface, self._attend))
            try:
                yield
            finally:
                for tensor in self.opened:
                    tensor.requires_grad_(False)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(module) in self.sites:
            self.entered[id(module)] = self._open(arguments_by_name(module, args, kwargs))

    def _before(self, call: AttentionCall) -> None:
        self._open(call.keywords)

    def _open(self, values: dict[str, Any]) -> dict[str, Tensor]:
        """The floating tensors among the arguments, able to carry a gradient."""
        tensors = {
            name: value for name, value in values.items() if isinstance(value, Tensor) and value.is_floating_point()
        }
        for tensor in tensors.values():
            if not tensor.requires_grad:
                tensor.requires_grad_(True)
                self.opened.append(tensor)
        return tensors

    def _attend(self, call: AttentionCall) -> Tensor:
        site = self.sites.get(id(call.module))
        if site is not None and site.n_heads > 1:
            attention = {name: value for name, value in call.keywords.items() if isinstance(value, Tensor)}
            self._judge(site, call, "attention", attention)
            taken = [id(value) for value in attention.values()]
            entered = self.entered.get(id(call.module), {})
            self._judge(site, call, "forward", {n: t for n, t in entered.items() if id(t) not in taken})
        return call.context.detach()

    def _judge(self, site: Site, call: AttentionCall, where: str, values: dict[str, Tensor]) -> None:
        values = {name: value for name, value in values.items() if value.requires_grad}
        context, numbers = call.context, head_numbers(call.context, site.n_heads, site.context_axis)
        found = self.found[site.module]
        known = {(one.where, one.name) for one, _ in found}
        for (name, value), touch in zip(
            values.items(), touches(context, numbers, site.n_heads, list(values.values())), strict=True
        ):
            axis = None if touch is None else _head_axis(touch, site.n_heads)
            if axis is not None and (where, name) not in known:
                found.append((Argument(where, name, axis), self._makers(value)))

    def boundary(self, site: Site) -> Boundary:
        """What stays whole and is cut; an argument that only the site's own slices make is cut with these instead."""
        others = {
            maker for path, found in self.found.items() if path != site.module for one in found for maker in one[1]
        }
        paths = {piece.path for piece in site.slices}
        own = paths - others
        kept = [(one, makers) for one, makers in self.found[site.module] if not makers or not makers <= own]
        whole = frozenset[str]().union(*(makers for _, makers in kept), paths & others)
        return Boundary(tuple(one for one, _ in kept), whole)

    def _makers(self, value: Tensor) -> set[str]:
        """Parameters that the argument is, or is computed from."""
        named = dict(self.model.named_parameters())
        if value.grad_fn is None:
            return {path for path, parameter in named.items() if parameter is value}
        usable = {path: parameter for path, parameter in named.items() if parameter.requires_grad}
        ones = torch.ones_like(value)
        gradients = torch.autograd.grad(value, list(usable.values()), ones, retain_graph=True, allow_unused=True)
        return {path for path, gradient in zip(usable, gradients, strict=True) if gradient is not None}


def _head_axis(touch: Touch, n_heads: int) -> int | None:
    """The axis along which the heads lie in order, once or (along the first) once for each sequence."""
    for axis, seen in enumerate(touch):
        owners = seen.owners()
        repeats = len(owners) // n_heads if axis == 0 else 1
        if owners == tuple(range(n_heads)) * repeats and repeats:
            return axis
    return None
