"""Capture: `watch` reads what every head puts out and its gate gradient while a model runs, `gate` scales heads.

Both act on the input of the output projection, so they serve every architecture and every attention backend alike. In
the few sites whose projection input already mixes heads, they act on the context where the attention function returns
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headscope.checkpointed import again
from headscope.heads import Site, SiteId
from headscope.parallel import shards_of
from headscope.shapes import Float
from headscope.taps import AttentionCall, FunctionTap, InterfaceTap, ModuleStack

Edit = Callable[[Site, Tensor], Tensor | None]
"""Sees the head outputs `[batch token head d_value]` of a site; may return others to be used instead."""


@dataclass
class Record:
    """What one batch showed at one site; hooks fill it in place."""

    site: Site
    output: Float[Tensor, "batch token head d_value"] | None = None
    """Head outputs z, `[batch token head d_value]`, detached."""
    gate_gradient: Float[Tensor, "batch token head"] | None = None
    """⟨z, ∂L/∂z⟩ of the last backward pass, `[batch token head]`, float32 or wider; L is a sum over examples."""
    pull: Float[Tensor, "batch token head d_value"] | None = None
    """∂L/∂z itself, `[batch token head d_value]`, where it was asked for."""


@dataclass
class Watch:
    """The records of the running batch, by site; `batch` must hold the number of examples before the model runs."""

    batch: int = 1
    records: dict[SiteId, Record] = field(default_factory=dict)


@contextlib.contextmanager
def watch(model: nn.Module, sites: Sequence[Site], *, gradients: bool = True, pulls: bool = False) -> Iterator[Watch]:
    """Fill records while the block runs: outputs in the forward pass, gate gradients (and pulls) in each backward pass.

    Parameters need no gradient: the first site starts the graph, nothing below it is recorded.
    """
    seen, shards = Watch(records={site.id: Record(site) for site in sites}), shards_of(model)
    layouts = {site.id: Layout(shards.part(site)) for site in sites}

    def look(site: Site, raw: Tensor) -> None:
        record = seen.records[site.id]
        values = layouts[site.id].heads(raw.detach(), seen.batch)
        if not again():
            record.output, record.gate_gradient, record.pull = shards.gathered(values, 2), None, None
        if not gradients or not torch.is_grad_enabled():
            return
        if not raw.requires_grad:
            raw.requires_grad_(True)
        if again():
            return

        def back(gradient: Tensor) -> None:
            wide = torch.promote_types(values.dtype, torch.float32)
            pulled = layouts[site.id].heads(gradient, seen.batch)
            record.gate_gradient = shards.gathered((values.to(wide) * pulled.to(wide)).sum(dim=-1), 2)
            record.pull = shards.gathered(pulled, 2) if pulls else None

        raw.register_hook(back)

    with _tapped(model, sites, look):
        yield seen


@contextlib.contextmanager
def gate(model: nn.Module, gates: Mapping[SiteId, Tensor], sites: Sequence[Site]) -> Iterator[None]:
    """Multiply the outputs of heads by gates while the block runs: 0 removes a head, 1 leaves it.

    A gate is `[head]`, or `[batch 1 head 1]` for gates of each example.
    """
    gated, shards = [site for site in sites if site.id in gates], shards_of(model)
    layouts = {site.id: Layout(shards.part(site)) for site in gated}

    def scale(site: Site, raw: Tensor) -> Tensor:
        values = gates[site.id].to(device=raw.device, dtype=raw.dtype)
        per_head = shards.own(values if values.dim() == 1 else values[:, 0, :, 0])
        return raw * layouts[site.id].spread(per_head, raw)

    with _tapped(model, gated, scale):
        yield


@contextlib.contextmanager
def _tapped(model: nn.Module, sites: Sequence[Site], act: Callable[[Site, Tensor], Tensor | None]) -> Iterator[None]:
    """Call `act` with the tensor that carries the heads of a site, whenever one of the sites runs."""
    outside = [site for site in sites if not site.on_context]
    inside = [site for site in sites if site.on_context]
    projections = SiteCalls((model.get_submodule(site.output), site) for site in outside)
    contexts = SiteCalls((model.get_submodule(site.module), site) for site in inside)
    handles: list[RemovableHandle] = [projections.counted(model), contexts.counted(model)]

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        site = projections.site(module)
        changed = None if site is None else act(site, args[0])
        return None if changed is None else (changed, *args[1:])

    def attend(call: AttentionCall) -> Tensor | None:
        site = contexts.site(call.module)
        return None if site is None else act(site, call.context)

    with contextlib.ExitStack() as stack:
        for path in {site.output for site in outside}:
            handles.append(model.get_submodule(path).register_forward_pre_hook(before))
        for handle in handles:
            stack.callback(handle.remove)
        if inside:
            tap = stack.enter_context(InterfaceTap(attend))
            if any(site.source == "function" for site in inside):
                modules = stack.enter_context(ModuleStack(model, lambda *_: None))
                stack.enter_context(FunctionTap(modules, tap, attend))
        yield


class SiteCalls:
    """Tells which site a running module stands for: one shared between layers runs once for each of them, in order."""

    def __init__(self, places: Iterable[tuple[nn.Module, Site]]) -> None:
        self._sites: dict[int, list[Site]] = {}
        for module, site in places:
            self._sites.setdefault(id(module), []).append(site)
        self._counts: dict[int, int] = {}

    def counted(self, model: nn.Module) -> RemovableHandle:
        """Start counting anew whenever `model` runs, until the handle is removed."""
        return model.register_forward_pre_hook(lambda *_: self._counts.clear())

    def site(self, module: nn.Module) -> Site | None:
        """The site of this call of a module; None for modules without one."""
        known = self._sites.get(id(module))
        if known is None:
            return None
        call = self._counts.get(id(module), 0)
        self._counts[id(module)] = call + 1
        total = 1 + len(known[0].shared_with)
        return next((site for site in known if site.call == call % total), None)


class Layout:
    """Where the heads lie in the tensor that carries them, worked out once for each site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        order = sorted((c for c, head in enumerate(site.channels) if head >= 0), key=lambda c: site.channels[c])
        self._order = None if order == list(range(len(site.channels))) else torch.tensor(order, dtype=torch.long)
        self._owner = torch.tensor([head if head >= 0 else site.n_heads for head in site.channels], dtype=torch.long)

    def heads(self, raw: Float[Tensor, "..."], batch: int) -> Float[Tensor, "batch token head d_value"]:
        """The head outputs in a projection's input, or in a context.

        Channels that no head owns are left out. Windows and other sub-sequences of one example are laid end to end.
        """
        site = self.site
        if site.on_context:
            values = raw if site.context_axis else raw.unflatten(0, (-1, site.n_heads))
            values = values.movedim((site.batch_axis, site.context_axis or 1), (0, -2))
            return values.reshape(batch, -1, site.n_heads, site.d_value)
        values = raw.movedim(site.channel_axis, -1)
        if site.batch_axis:
            values = values.movedim(site.batch_axis, 0)
        values = values.reshape(batch, -1, values.shape[-1])
        if self._order is not None:
            self._order = self._order.to(raw.device)  # once: a GPU would be waited for
            values = values[..., self._order]
        return values.reshape(*values.shape[:2], site.n_heads, -1)

    def spread(self, per_head: Tensor, raw: Tensor) -> Tensor:
        """Gates `[head]` or `[batch head]` laid out so that they multiply the tensor that carries the heads."""
        site = self.site
        if site.on_context and not site.context_axis:
            rows = raw.shape[0] // site.n_heads
            values = per_head.expand(rows, -1) if per_head.dim() == 1 else _repeated(per_head, rows)
            return values.reshape(-1, *[1] * (raw.dim() - 1))
        if site.on_context:
            axis, values = site.context_axis, per_head
        else:
            axis = site.channel_axis % raw.dim()
            ungated = torch.ones_like(per_head[..., :1])
            self._owner = self._owner.to(raw.device)
            values = torch.cat([per_head, ungated], dim=-1)[..., self._owner]
        shape = [1] * raw.dim()
        shape[axis] = values.shape[-1]
        if values.dim() == 1:
            return values.view(shape)
        shape[site.batch_axis] = raw.shape[site.batch_axis]
        values = _repeated(values, raw.shape[site.batch_axis])
        return (values.T if axis < site.batch_axis else values).reshape(shape)


def _repeated(values: Tensor, rows: int) -> Tensor:
    """Values of each example for `rows` sequences: windows of one example lie side by side."""
    return values.repeat_interleave(rows // len(values), dim=0)
