"""One attention module's cut: the slices that go with its heads, and the two ways in which what is left still runs.

A module that counts its heads runs on fewer once its counts follow. One that derives them from something else (the
width of its input, a fixed split) runs as before, on parameters in which zeros stand where the slices were.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from headscope.boundary import Boundary
from headscope.errors import InvalidPlan
from headscope.heads import ParameterSlice, Role, Site
from headscope.offload import alter, is_kept_away
from headscope.portable import fill_in, resize, see_config, slice_arguments

QUERY_COUNT = re.compile(r"(num|n)_?(attention_|attn_)?heads?|heads|(en|de)coder_(attention_)?heads")
KV_COUNT = re.compile(r"(num|n)_?(key_value|kv)_?heads?|kv_heads|multi_query_group_num|num_key_value_heads")
_GROUP_SIZE = re.compile(r"num_(key_value|kv)_groups|num_queries_per_kv|n_rep|q_heads_per_kv")
_WIDTH = re.compile(
    r"all_head_size|(inner|attn|attention|embed|value|key|query|q|kv)_(dim|size)|attention_hidden_size|split_size"
    r"|hidden_size|d_model"
)


class Way(Enum):
    """How a module runs without some of its heads."""

    COUNTED = auto()
    """It counts fewer heads."""
    FILLED = auto()
    """It computes all heads, from parameters with zeros for those that are gone: only memory is saved."""
    VALUES = auto()
    """The same, but queries and keys stay, since they serve more than the attention of their heads."""
    OUTPUTS = auto()
    """The same, but only what the heads write by goes: their values serve others too."""


class Cut:
    """What one attention module loses; `kept` and `kv_kept` are places among its present heads."""

    def __init__(self, site: Site, kept: list[int], kv_kept: list[int]) -> None:
        self.site, self.kept, self.kv_kept = site, kept, kv_kept
        self.way = Way.COUNTED
        self.root = ""
        """The path of the module that runs on filled parameters where this one cannot count fewer heads."""

    def make(self, model: nn.Module, edge: Boundary, read: Iterable[str], *, way: Way) -> None:
        """Take the heads out and let the module run without them."""
        self.way = way
        if way is not Way.COUNTED:
            self.fill(model, edge)
            self.parameters(model, edge)
            return
        self.parameters(model, edge)
        self.counts(model, fixed=any(one.where == "attention" for one in edge.arguments))
        self.settings(model, read)
        self.arguments(model, edge)

    def require_counted(self, model: nn.Module) -> None:
        """Refuse to leave no head to a module that runs on filled parameters.

        Raises:
            InvalidPlan: it does.
        """
        if is_filled(model.get_submodule(self.site.module)):
            raise InvalidPlan(f"{self.site.id}: its module needs one of its heads", hint="--min-heads 1")

    def parameters(self, model: nn.Module, edge: Boundary) -> None:
        """Slice every parameter that belongs to the removed heads."""
        for (path, name, axis), gone in self.dropped(edge).items():
            if bool(gone.any()):
                _slice(model.get_submodule(path), name, axis, (~gone).nonzero().flatten())

    def dropped(self, edge: Boundary) -> dict[tuple[str, str, int], Tensor]:
        """Which indices go, for each module, parameter and axis."""
        dropped: dict[tuple[str, str, int], Tensor] = {}
        roles = {Way.VALUES: (Role.VALUE, Role.OUTPUT), Way.OUTPUTS: (Role.OUTPUT,)}.get(self.way, tuple(Role))
        for piece in self.site.slices_of(*roles):
            if piece.path not in edge.whole:
                key, kept = (piece.module, piece.name, piece.axis), self._of(piece)
                gone = torch.tensor([owner >= 0 and owner not in kept for owner in piece.owner])
                dropped[key] = dropped[key] | gone if key in dropped else gone
        return dropped

    def _of(self, piece: ParameterSlice) -> set[int]:
        return set(self.kv_kept if piece.role in (Role.KEY, Role.VALUE) else self.kept)

    def counts(self, model: nn.Module, *, fixed: bool) -> None:
        """Let the counts that the module keeps for itself follow.

        With `fixed` the number of heads stays: the module makes tensors for all heads, which are cut afterwards.
        """
        module, site = model.get_submodule(self.site.module), self.site
        for name, value in list(vars(module).items()):
            count = self._count(name, value) if type(value) is int else None
            if count is not None and not (fixed and QUERY_COUNT.fullmatch(name)):
                setattr(module, name, count)
        widths = {site.n_heads * site.d_value: len(self.kept) * site.d_value}
        widths |= {site.n_heads * site.d_head: len(self.kept) * site.d_head}
        for name, value in list(vars(module).items()):
            if type(value) is int and value in widths and _WIDTH.fullmatch(name):
                setattr(module, name, widths[value])

    def _count(self, name: str, value: int) -> int | None:
        """What a count of this name and value becomes; None for one that does not count heads."""
        site = self.site
        if KV_COUNT.fullmatch(name) and value == site.n_kv_heads:
            return len(self.kv_kept)
        if QUERY_COUNT.fullmatch(name) and value == site.n_heads:
            return len(self.kept)
        if _GROUP_SIZE.fullmatch(name) and value == site.group_size and self.kv_kept:
            return len(self.kept) // len(self.kv_kept)
        return None

    def settings(self, model: nn.Module, read: Iterable[str]) -> None:
        """Let the counts that the module reads from its configuration while it runs follow."""
        module = model.get_submodule(self.site.module)
        config: Any = getattr(module, "config", None)
        counts = {name: self._count(name, value) for name in read if type(value := getattr(config, name, 0)) is int}
        changed = {name: count for name, count in counts.items() if count is not None}
        if changed:
            see_config(module, changed)

    def arguments(self, model: nn.Module, edge: Boundary) -> None:
        """Cut what reaches the module with something for every head; on top of earlier cuts, if there were."""
        module = model.get_submodule(self.site.module)
        earlier = {(piece["where"], piece["name"]): piece for piece in module.__dict__.get("headscope_arguments", ())}
        for one in edge.arguments:
            before = earlier.get((one.where, one.name))
            heads = before["heads"] if before else self.site.n_heads
            kept = [before["kept"][place] for place in self.kept] if before else self.kept
            earlier[one.where, one.name] = {
                "where": one.where,
                "name": one.name,
                "axis": one.axis,
                "heads": heads,
                "kept": kept,
            }
        if earlier:
            slice_arguments(module, list(earlier.values()))

    def fill(self, model: nn.Module, edge: Boundary) -> None:
        """Let the module run on parameters with zeros for the slices that `parameters` is about to take."""
        root, module = self.root, model.get_submodule(self.site.module)
        filling = model.get_submodule(root).__dict__.get("headscope_filled", {"gaps": [], "left": {}})
        earlier = {(gap["module"], gap["name"], gap["axis"]): gap for gap in filling["gaps"]}
        for (path, name, axis), gone in self.dropped(edge).items():
            inside = _inside(path, root)
            before = earlier.get((inside, name, axis))
            places = _places(before["kept"]) if before else list(range(len(gone)))
            kept = [place for place, lost in zip(places, gone.tolist(), strict=True) if not lost]
            size = before["size"] if before else len(gone)
            if len(kept) < size:
                gap = {"module": inside, "name": name, "axis": axis, "size": size, "kept": _runs(kept)}
                earlier[inside, name, axis] = gap
        left = filling["left"] | {_inside(self.site.module, root): self._left(module)}
        fill_in(model.get_submodule(root), {"gaps": list(earlier.values()), "left": left})

    def _left(self, module: nn.Module) -> dict[str, Any]:
        """Which heads are left of those that the module computes."""
        site, before = self.site, module.__dict__.get("headscope_left")
        if before is None:
            counts = {"heads": site.n_heads, "kv_heads": site.n_kv_heads}
            return {"axis": site.context_axis, **counts, "kept": self.kept, "kv_kept": self.kv_kept}
        kept = [before["kept"][place] for place in self.kept]
        return before | {"kept": kept, "kv_kept": [before["kv_kept"][place] for place in self.kv_kept]}


def is_filled(module: nn.Module) -> bool:
    """Whether an attention module runs on parameters with zeros for heads that are gone."""
    return "headscope_left" in module.__dict__


def around(site: Site, edge: Boundary) -> str:
    """The path of the innermost module that holds the attention module and all that is cut for it."""
    paths = [site.module, *(piece.module for piece in site.slices if piece.path not in edge.whole)]
    parts = [path.split(".") for path in paths]
    shared = 0
    while all(len(part) > shared for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    return ".".join(parts[0][:shared])


def _inside(path: str, root: str) -> str:
    return path[len(root) :].lstrip(".")


def _runs(indices: list[int]) -> list[list[int]]:
    """Rising indices as ranges [start, stop)."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1][1] += 1
        else:
            runs.append([index, index + 1])
    return runs


def _places(runs: list[list[int]]) -> list[int]:
    return [index for start, stop in runs for index in range(start, stop)]


def _slice(module: nn.Module, name: str, axis: int, kept: Tensor) -> None:
    """Keep some indices of a parameter along an axis."""
    old: Tensor = getattr(module, name)
    resize(module, name, old.detach().index_select(axis, kept.to(old.device)).clone())
    if is_kept_away(module, name):
        alter(module, name, lambda values: values.index_select(axis, kept.to(values.device)))
