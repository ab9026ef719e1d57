"""Anatomy of one attention call: its heads, kind, output projection, and the parameter slices of every head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscope.geometry import Geometry, attention_kind, context_numbers, geometry, head_numbers
from headscope.heads import AttentionKind, ParameterSlice, Role, Site, SiteId
from headscope.inputs import BATCH
from headscope.ownership import Touch, depends, fed_by, group_owner, owned_axis, touched_by_each, touches
from headscope.taps import AttentionCall

_INPUTS = (Role.QUERY, Role.KEY, Role.VALUE)
_CLIMB = 2  # levels above the attention module in which its projections may live


@dataclass(frozen=True)
class Anatomy:
    """What is known of a site before it has a label; parameter paths are those of the module it was read from."""

    template: Site

    @property
    def kind(self) -> AttentionKind:
        return self.template.id.kind

    def site(self, label: SiteId, path: str, *, shared_with: tuple[SiteId, ...], call: int) -> Site:
        """The site with its label."""
        return replace(self.template, id=label, module=path, shared_with=shared_with, call=call)


def dissect(
    model: nn.Module,
    path: str,
    call: AttentionCall,
    leaf: Tensor,
    later: list[tuple[nn.Module, Tensor]],
    *,
    known: dict[Any, Anatomy],
) -> Anatomy | str:
    """The anatomy of a call whose context was replaced by `leaf`, or in words why it cannot be told.

    `later` are the linear calls that followed. Modules of one class, with equal settings and shapes, share a probe
    (`known`).
    """
    output = next(((module, tensor) for module, tensor in later if depends(tensor, leaf)), None)
    if output is None:
        return "no output projection follows it"
    shape = geometry(call, output[1])
    if isinstance(shape, str):
        return shape
    paths = {id(module): name for name, module in reversed(list(model.named_modules()))}
    kind = attention_kind(call, shape, path)
    reader = _Reader(model, path, call, shape, paths)
    signature = (*reader.signature(), shape, kind, _relative(paths[id(output[0])], path))
    if signature not in known:
        known[signature] = Anatomy(reader.read(leaf, *output, kind=kind))
    return _moved(known[signature], path, paths[id(output[0])])


class _Reader:
    """Reads the parameter slices of one attention module."""

    def __init__(
        self, model: nn.Module, path: str, call: AttentionCall, shape: Geometry, paths: dict[int, str]
    ) -> None:
        self.model, self.path, self.call, self.shape, self.paths = model, path, call, shape, paths
        self.n_kv_heads = shape.n_kv_heads
        self.slices: list[ParameterSlice] = []
        self.mixed: dict[Role, list[str]] = {}
        self.root = path
        self.parameters = self._scope()

    def signature(self) -> tuple[Any, ...]:
        """What two modules must share to be read once: class, plain settings, parameter names and shapes."""
        settings = sorted(
            (name, value)
            for name, value in vars(self.call.module).items()
            if isinstance(value, (bool, int, float, str)) and name not in ("layer_idx", "layer_id", "training")
        )
        shapes = [(_relative(module, self.path), name, tuple(p.shape)) for module, name, p in self.parameters]
        return (type(self.call.module), tuple(settings), tuple(shapes), self.call.on_interface)

    def read(self, leaf: Tensor, output: nn.Module, projected: Tensor, *, kind: AttentionKind) -> Site:
        """The site, without a label."""
        shape = self.shape
        numbers = context_numbers(self.call, shape.n_heads)
        axis = 1 if isinstance(output, (nn.Conv1d, nn.Conv2d)) else projected.dim() - 1
        fed = fed_by(projected, leaf, numbers, shape.n_heads, axis=axis)
        channels = fed.owners()
        self._inputs()
        self._late(self.call.context, numbers.expand(self.call.context.shape), Role.EXTRA)
        by_channel = torch.tensor(channels, device=projected.device).clamp_min(0)
        by_channel = by_channel.view([-1 if dim == axis else 1 for dim in range(projected.dim())])
        self._late(projected, by_channel, Role.GATE)
        self._biases()
        weight_axis = 0 if isinstance(output, Conv1D) else 1
        module = self.paths[id(output)]
        owners = self._stored(output, weight_axis, channels)
        self.slices.append(ParameterSlice(module, "weight", weight_axis, Role.OUTPUT, owners))
        weight = output.weight
        assert isinstance(weight, Tensor)
        coupled, shared = self._coupled()
        return Site(
            id=SiteId("", kind, 0),
            module=self.path,
            module_class=type(self.call.module).__name__,
            output=module,
            channels=channels,
            channel_axis=axis if axis == 1 and projected.dim() > 3 else -1,
            batch_axis=_batch_axis(projected),
            n_heads=shape.n_heads,
            n_kv_heads=self.n_kv_heads,
            d_head=shape.d_head,
            d_value=shape.d_value,
            d_model=weight.shape[1 - weight_axis],
            slices=tuple(self.slices),
            coupled=coupled,
            shared=shared,
            mixes_heads=bool(fed.mixed.any()),
            window=_window(self.call, kind),
            source="interface" if self.call.on_interface else "function",
        )

    def _scope(self) -> list[tuple[str, str, Tensor]]:
        """Parameters of the attention module, or of the nearest parent that holds the query's projection."""
        found: list[tuple[str, str, Tensor]] = []
        for _ in range(_CLIMB + 1):
            found = _parameters(self.model.get_submodule(self.root), self.root)
            source = self.call.query if self.call.query is not None else self.call.context
            tensors = [tensor for _, _, tensor in found]
            zeros = torch.zeros((), dtype=torch.long, device=source.device)
            if any(touch is not None for touch in touches(source, zeros, 1, tensors)) or "." not in self.root:
                break
            self.root = self.root.rpartition(".")[0]
        return found

    def _inputs(self) -> None:
        for role, tensor in zip(_INPUTS, (self.call.query, self.call.key, self.call.value), strict=True):
            n_heads = self.shape.n_heads if role is Role.QUERY else self.shape.n_kv_heads
            numbers = None if tensor is None else head_numbers(tensor, n_heads)
            if tensor is None or numbers is None:
                continue
            found = touches(tensor, numbers, n_heads, [parameter for _, _, parameter in self.parameters])
            mixed: list[tuple[str, str, Tensor]] = []
            for (module, name, parameter), touch in zip(self.parameters, found, strict=True):
                if touch is None:
                    continue
                axis = owned_axis(touch, n_heads, self.model.get_submodule(module))
                if axis is None:
                    mixed.append((module, name, parameter))
                else:
                    self.slices.append(ParameterSlice(module, name, axis, role, touch[axis].owners()))
            if not self._owns_matrix(role) and role is not Role.QUERY:
                mixed = self._groups(role, tensor, numbers, mixed)
            self.mixed[role] = [f"{module}.{name}" for module, name, _ in mixed]

    def _groups(
        self, role: Role, tensor: Tensor, numbers: Tensor, mixed: list[tuple[str, str, Tensor]]
    ) -> list[tuple[str, str, Tensor]]:
        """Turn parameters whose slices serve equal groups of neighbouring heads into key/value head slices."""
        rest: list[tuple[str, str, Tensor]] = []
        for module, name, parameter in mixed:
            each = touched_by_each(tensor, numbers, self.shape.n_heads, parameter)
            groups = next(((axis, owner) for axis, table in enumerate(each) if (owner := group_owner(table))), None)
            if groups is None:
                rest.append((module, name, parameter))
                continue
            axis, owner = groups
            self.n_kv_heads = max(owner) + 1
            self.slices.append(ParameterSlice(module, name, axis, role, owner))
        return rest

    def _late(self, tensor: Tensor, numbers: Tensor, role: Role) -> None:
        """Parameters that reach a head only after its query, key and value: sinks, bias tables, gates."""
        taken = {(piece.module, piece.name): piece for piece in self.slices}
        seen = {path for paths in self.mixed.values() for path in paths}
        parameters = [(m, n, p) for m, n, p in self.parameters if role is Role.GATE or (m, n) not in taken]
        found = touches(tensor, numbers, self.shape.n_heads, [parameter for _, _, parameter in parameters])
        for (module, name, _), touch in zip(parameters, found, strict=True):
            if touch is None or f"{module}.{name}" in seen:
                continue
            axis = owned_axis(touch, self.shape.n_heads, self.model.get_submodule(module))
            if axis is None:
                self.mixed.setdefault(role, []).append(f"{module}.{name}")
            else:
                self._add_late(module, name, axis, role, touch)

    def _add_late(self, module: str, name: str, axis: int, role: Role, touch: Touch) -> None:
        owner = list(touch[axis].owners())
        for piece in self.slices:
            if (piece.module, piece.name, piece.axis) == (module, name, axis):
                owner = [-1 if earlier >= 0 else head for head, earlier in zip(owner, piece.owner, strict=True)]
        if any(head >= 0 for head in owner):
            self.slices.append(ParameterSlice(module, name, axis, role, tuple(owner)))

    def _stored(self, output: nn.Module, axis: int, channels: tuple[int, ...]) -> tuple[int, ...]:
        """The owners of the output weight's indices as stored: without those that are zeros while the model runs."""
        module = self.paths[id(output)]
        for path, holder in self.model.named_modules():
            for gap in holder.__dict__.get("headscope_filled", ()):
                if (f"{path}.{gap['module']}".strip("."), gap["name"], gap["axis"]) == (module, "weight", axis):
                    return tuple(channels[place] for run in gap["kept"] for place in range(*run))
        return channels

    def _biases(self) -> None:
        """A bias follows its weight: a key's bias cancels in the softmax and so has no gradient behind it."""
        have = {(piece.module, piece.name) for piece in self.slices}
        for piece in list(self.slices):
            module = self.model.get_submodule(piece.module)
            bias = getattr(module, "bias", None)
            out_axis = 1 if isinstance(module, Conv1D) else 0
            if piece.name != "weight" or piece.axis != out_axis or not isinstance(bias, nn.Parameter):
                continue
            if (piece.module, "bias") not in have and len(bias) == len(piece.owner):
                self.slices.append(replace(piece, name="bias", axis=0))

    def _owns_matrix(self, role: Role) -> bool:
        return any(
            piece.role is role and getattr(self.model.get_submodule(piece.module), piece.name).dim() >= 2
            for piece in self.slices
        )

    def _coupled(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Mixed parameters are coupled where no matrix of the same role is owned below them, else merely shared."""
        coupled: list[str] = []
        shared: list[str] = []
        for role, paths in self.mixed.items():
            harmless = role in (Role.EXTRA, Role.GATE) or self._owns_matrix(role)
            (shared if harmless else coupled).extend(paths)
        return tuple(dict.fromkeys(coupled)), tuple(path for path in dict.fromkeys(shared) if path not in coupled)


def _window(call: AttentionCall, kind: AttentionKind) -> int | None:
    """The most keys that a query sees where the call or its module limits it; a window reaches to both sides of self
    attention and holds the query once.
    """
    window = call.keywords.get("sliding_window") or getattr(call.module, "sliding_window", None)
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        return None
    return 2 * window - 1 if kind is AttentionKind.SELF else window


def _batch_axis(projected: Tensor) -> int:
    """The axis of examples: the first, unless the model puts time there (then the probe's size shows it)."""
    if projected.shape[0] % BATCH and projected.dim() == 3 and projected.shape[1] % BATCH == 0:
        return 1
    return 0


def _parameters(module: nn.Module, root: str) -> list[tuple[str, str, Tensor]]:
    found: list[tuple[str, str, Tensor]] = []
    for path, child in module.named_modules(prefix=root):
        found += [(path, name, p) for name, p in child.named_parameters(recurse=False) if p.is_floating_point()]
    return found


def _relative(target: str, origin: str) -> tuple[int, str]:
    """How to reach one module path from another: levels up, then a path down."""
    there, here = target.split("."), origin.split(".")
    common = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    return len(here) - common, ".".join(there[common:])


def _moved(anatomy: Anatomy, path: str, output: str) -> Anatomy:
    """The same anatomy for another module of the same kind: every path starts from that module instead."""
    origin = anatomy.template.module
    if origin == path:
        return anatomy

    def move(target: str) -> str:
        up, down = _relative(target, origin)
        parts = path.split(".")
        kept = parts[: len(parts) - up]
        return ".".join([*kept, down] if down else kept)

    site = anatomy.template
    slices = tuple(replace(piece, module=move(piece.module)) for piece in site.slices)
    coupled, shared = (tuple(move(name) for name in names) for names in (site.coupled, site.shared))
    return Anatomy(replace(site, module=path, output=output, slices=slices, coupled=coupled, shared=shared))
