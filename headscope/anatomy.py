"""Anatomy of one attention call: its heads, kind, output projection, and the parameter slices of every head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscope.geometry import Geometry, attention_kind, geometries, head_axes, head_numbers
from headscope.heads import AttentionKind, ParameterSlice, Role, Site, SiteId
from headscope.inputs import BATCH
from headscope.moving import moved, relative
from headscope.ownership import Touch, group_owner, owned_axis, touched_by_each, touches
from headscope.parallel import local
from headscope.projecting import Feeding, Projection, feed
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
    later: list[Projection],
    *,
    alone: bool,
    known: dict[Any, Anatomy],
) -> Anatomy | str:
    """The anatomy of a call whose context was replaced by `leaf`, or in words why it cannot be told.

    `later` are the products that followed; the output projection is the first that depends on the context. `alone`:
    the module was given one sequence. Modules of one class, with equal settings and shapes, share a probe (`known`).
    """
    output = next((one for one in later if one.reads(leaf)), None)
    if output is None:
        return "no output projection follows it"
    shapes = geometries(call, output.input.shape[output.channel_axis])
    if isinstance(shapes, str):
        return shapes
    paths = {id(module): name for name, module in reversed(list(model.named_modules()))}
    shape, feeding = _fitting(shapes, leaf, output)
    kind = attention_kind(call, shape, path, alone=alone)
    reader = _Reader(model, path, call, shape, paths)
    signature = (*reader.signature(), shape, kind, relative(paths[id(output.module)], path), output.name)
    if signature not in known:
        known[signature] = Anatomy(reader.read(output, feeding, kind=kind))
    return Anatomy(moved(known[signature].template, path, paths[id(output.module)]))


def _fitting(shapes: list[Geometry], leaf: Tensor, output: Projection) -> tuple[Geometry, Feeding]:
    """The geometry in which each channel of the output projection comes from one head; else the likeliest."""
    for shape in shapes:
        feeding = feed(output, leaf, shape)
        if not feeding.mixed:
            return shape, feeding
    return shapes[0], feed(output, leaf, shapes[0])


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
        shapes = [(relative(module, self.path), name, tuple(p.shape)) for module, name, p in self.parameters]
        return (type(self.call.module), tuple(settings), tuple(shapes), self.call.on_interface)

    def read(self, output: Projection, feeding: Feeding, *, kind: AttentionKind) -> Site:
        """The site, without a label."""
        shape, context, projected = self.shape, self.call.context, output.input
        numbers = head_numbers(context, shape.n_heads, shape.head_axis)
        self._inputs()
        self._late(context, numbers.expand(context.shape), Role.EXTRA)
        on_context = feeding.mixed or output.product is not None
        if output.product is None:
            by_channel = torch.tensor(feeding.owners, device=projected.device).clamp_min(0)
            axis = output.channel_axis % projected.dim()
            self._late(
                projected, by_channel.view([-1 if dim == axis else 1 for dim in range(projected.dim())]), Role.GATE
            )
        self._biases()
        module = self.paths[id(output.module)]
        owners = self._stored(output, feeding)
        if output.product is None or not feeding.mixed:
            self.slices.append(ParameterSlice(module, output.name, feeding.axis, Role.OUTPUT, owners))
        coupled, shared = self._coupled()
        return Site(
            id=SiteId("", kind, 0),
            module=self.path,
            module_class=type(self.call.module).__name__,
            output=module,
            channels=feeding.owners,
            channel_axis=output.channel_axis,
            batch_axis=_batch_axis(context, shape.head_axis) if on_context else _batch_axis(projected, None),
            n_heads=shape.n_heads,
            n_kv_heads=self.n_kv_heads,
            d_head=shape.d_head,
            d_value=shape.d_value,
            d_model=output.parameter.shape[1 - feeding.axis] if output.product is None else output.product.shape[-1],
            slices=tuple(self.slices),
            coupled=coupled,
            shared=shared,
            mixes_heads=feeding.mixed,
            on_context=on_context,
            context_axis=shape.head_axis,
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
            if tensor is None:
                continue
            n_heads = self.shape.n_heads if role is Role.QUERY else self.shape.n_kv_heads
            axes = head_axes(tensor, n_heads, self.call.on_interface)
            tried = [self._tried(role, tensor, n_heads, axis) for axis in axes]
            if not tried:
                continue
            best = next((place for place, (owned, _) in enumerate(tried) if owned), 0)
            (owned, mixed), numbers = tried[best], head_numbers(tensor, n_heads, axes[best])
            self.slices += owned
            if not self._owns_matrix(role) and role is not Role.QUERY:
                mixed = self._groups(role, tensor, numbers, mixed)
            self.mixed[role] = [f"{module}.{name}" for module, name, _ in mixed]

    def _tried(
        self, role: Role, tensor: Tensor, n_heads: int, axis: int
    ) -> tuple[list[ParameterSlice], list[tuple[str, str, Tensor]]]:
        """The slices of a query, key or value whose heads lie along `axis`, and the parameters that several touch."""
        numbers = head_numbers(tensor, n_heads, axis)
        owned: list[ParameterSlice] = []
        mixed: list[tuple[str, str, Tensor]] = []
        found = touches(tensor, numbers, n_heads, [parameter for _, _, parameter in self.parameters])
        for (module, name, parameter), touch in zip(self.parameters, found, strict=True):
            own = None if touch is None else owned_axis(touch, n_heads, self.model.get_submodule(module))
            if touch is not None and own is not None:
                owned.append(ParameterSlice(module, name, own, role, touch[own].owners()))
            elif touch is not None:
                mixed.append((module, name, parameter))
        return owned, mixed

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

    def _stored(self, output: Projection, feeding: Feeding) -> tuple[int, ...]:
        """The owners of the output weight's indices as stored: without those that are zeros while the model runs."""
        if output.product is not None:
            return feeding.owners
        place = (self.paths[id(output.module)], output.name, feeding.axis)
        for path, holder in self.model.named_modules():
            for gap in holder.__dict__.get("headscope_filled", {"gaps": ()})["gaps"]:
                if (f"{path}.{gap['module']}".strip("."), gap["name"], gap["axis"]) == place:
                    return tuple(feeding.owners[index] for run in gap["kept"] for index in range(*run))
        return feeding.owners

    def _biases(self) -> None:
        """A bias follows its weight: a key's bias cancels in the softmax and so has no gradient behind it."""
        have = {(piece.module, piece.name) for piece in self.slices}
        for piece in list(self.slices):
            module = self.model.get_submodule(piece.module)
            bias = getattr(module, "bias", None)
            out_axis = 1 if isinstance(module, Conv1D) else 0
            if piece.name != "weight" or piece.axis != out_axis or not isinstance(bias, nn.Parameter):
                continue
            if (piece.module, "bias") not in have and len(local(bias)) == len(piece.owner):
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


def _batch_axis(tensor: Tensor, head_axis: int | None) -> int:
    """The axis of examples: the first, unless the model puts time there (then the probe's size shows it)."""
    timed = head_axis != 1 and tensor.dim() == (3 if head_axis is None else 4)
    return int(timed and bool(tensor.shape[0] % BATCH) and tensor.shape[1] % BATCH == 0)


def _parameters(module: nn.Module, root: str) -> list[tuple[str, str, Tensor]]:
    found: list[tuple[str, str, Tensor]] = []
    for path, child in module.named_modules(prefix=root):
        found += [(path, name, p) for name, p in child.named_parameters(recurse=False) if p.is_floating_point()]
    return found
