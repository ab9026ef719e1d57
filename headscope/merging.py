"""Merging of key/value heads: several become one that all their query heads read, so that the KV cache shrinks.

Each head of a group is turned by a map that leaves the model's outputs alone (`aligned`), and then every head takes the
mean of the group's turned keys and values (`tied`). The tied model has all its shapes and loses by the means alone; the
merged one holds each group's head once and computes the same. No query head goes, and heads keep their order.
Mean pooling of heads: Ainslie et al. 2023 (GQA), section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.alignment import Family
from headscope.errors import InvalidPlan, UsageError
from headscope.heads import ParameterSlice, Role, Site, SiteId
from headscope.least_squares import exact
from headscope.native import reads_kv_count
from headscope.output_weights import Patch
from headscope.surgery import keep_kv_heads, require_separable

_TURNED = (Role.QUERY, Role.KEY, Role.VALUE, Role.OUTPUT)


@dataclass(frozen=True)
class SiteMerge:
    """What becomes one in a site: `groups` of places of its key/value heads, and the maps that turn each of them.

    `keys` are `[kv_head d_head d_head]`, `values` `[kv_head d_value d_value]`, orthogonal and in float64.
    """

    site: SiteId
    groups: tuple[tuple[int, ...], ...]
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Merge:
    """The sites that get `kv_heads` key/value heads, and the families that their maps are from."""

    kv_heads: int
    sites: tuple[SiteMerge, ...]
    keys: Family = Family.NONE
    values: Family = Family.NONE
    notes: tuple[str, ...] = ()

    def left(self, site: SiteId, present: int) -> int:
        """How many key/value heads a site has after the merge that has so many `present`."""
        return self.kv_heads if any(one.site == site for one in self.sites) else present

    @property
    def how(self) -> str:
        """What was done, in words."""
        told = {
            Family.NONE: "as they are",
            Family.ORTHOGONAL: "aligned by orthogonal maps",
            Family.HALVES: "aligned by rotations that commute with the rotary embedding",
            Family.INTERLEAVED: "aligned by rotations that commute with the rotary embedding",
        }
        return f"means of neighbouring heads, keys {told[self.keys]}, values {told[self.values]}"


def unaligned(model: PreTrainedModel, sites: Sequence[Site], kv_heads: int) -> Merge:
    """The merge of neighbouring heads as they are, until `kv_heads` are left in every site that can have so many.

    Sites whose module has no key/value head count (an image tower's) keep theirs, which the notes say.

    Raises:
        UsageError: a site's heads cannot become so many, or are so many already; the hint names the possible numbers.
        InvalidPlan: no site can have fewer key/value heads than query heads, or they are coupled or not its own.
    """
    able = [site for site in sites if reads_kv_count(model, site)]
    if not able:
        raise InvalidPlan(
            f"{type(model).__name__}: its configuration has no key/value head count of its own, "
            "so its query heads cannot share any",
            hint="--ratio removes heads whole",
        )
    require_separable(able)
    for site in able:
        _require_own(model, site)
    possible = [n for n in range(1, max(s.n_kv_heads for s in able)) if all(s.n_kv_heads % n == 0 for s in able)]
    if kv_heads not in possible:
        present = " or ".join(map(str, sorted({site.n_kv_heads for site in able})))
        hint = f"possible: {', '.join(map(str, possible))}" if possible else "there is nothing to merge"
        raise UsageError(f"--merge-kv {kv_heads}: the sites have {present} key/value heads", hint=hint)
    left = len(sites) - len(able)
    notes = (f"{left} sites keep their key/value heads: their modules have no count of them",) if left else ()
    return Merge(kv_heads, tuple(_still(site, kv_heads) for site in able if site.n_kv_heads > kv_heads), notes=notes)


def aligned(model: nn.Module, sites: Sequence[Site], merge: Merge) -> list[Patch]:
    """The weights after the maps and before the means, for `swapped`: the model's outputs are what they were."""
    return _changes(model, sites, merge, mean=False, dtype=None)


def tied(model: nn.Module, sites: Sequence[Site], merge: Merge, *, dtype: torch.dtype | None = None) -> list[Patch]:
    """The weights with which the whole model computes what the merged one does: in each group all heads are equal.

    Values are rounded to `dtype` (default: the model's), in which they will be stored.
    """
    return _changes(model, sites, merge, mean=True, dtype=dtype)


def merge_heads(model: PreTrainedModel, sites: Sequence[Site], merge: Merge) -> None:
    """Leave one key/value head of each group, in place; every query head stays and reads that of its group.

    It keeps the number of the first head of its group.
    """
    for patch in tied(model, sites, merge):
        patch.write()
    keep_kv_heads(model, sites, {one.site: [group[0] for group in one.groups] for one in merge.sites})


def head_rows(model: nn.Module, site: Site, role: Role) -> ParameterSlice | None:
    """The weight of a projection that holds the same number of rows for each head of a role; None where none does."""
    width = site.d_value if role is Role.VALUE else site.d_head
    for piece in site.slices_of(role):
        weight = _parameter(model, piece)
        if weight.dim() == 2 and all(len(piece.indices(head)) == width for head in range(site.n_kv_heads)):
            return piece
    return None


def _require_own(model: nn.Module, site: Site) -> None:
    """Refuse sites whose keys and values are borrowed, made of parts, or stored in a way that cannot be averaged.

    Raises:
        InvalidPlan: naming the site.
    """
    for role in (Role.KEY, Role.VALUE):
        if head_rows(model, site, role) is None:
            raise InvalidPlan(f"{site.id}: no {role} projection of its own for each head, so none can be merged")
    for piece in site.slices_of(*_TURNED):
        weight = _parameter(model, piece)
        if not weight.is_floating_point() or weight.device.type == "meta":
            raise InvalidPlan(f"{site.id}: {piece.path} is quantised or not in memory, so heads cannot be merged")


def _still(site: Site, kv_heads: int) -> SiteMerge:
    """Neighbours, not turned."""
    size = site.n_kv_heads // kv_heads
    groups = tuple(tuple(range(start, start + size)) for start in range(0, site.n_kv_heads, size))
    keys, values = (
        torch.eye(width, dtype=torch.float64).repeat(site.n_kv_heads, 1, 1) for width in (site.d_head, site.d_value)
    )
    return SiteMerge(site.id, groups, keys, values)


def _changes(
    model: nn.Module, sites: Sequence[Site], merge: Merge, *, mean: bool, dtype: torch.dtype | None
) -> list[Patch]:
    known = {site.id: site for site in sites}
    found: list[Patch] = []
    for one in merge.sites:
        changed: dict[str, Tensor] = {}
        site = known[one.site]
        for piece in site.slices_of(*_TURNED):
            parameter = _parameter(model, piece)
            values = changed.setdefault(piece.path, exact(parameter.detach()).clone())
            rows = values.movedim(piece.axis, 0)  # a view: writing to it fills `values`
            _turn(rows, piece, site, one)
            if mean and piece.role in (Role.KEY, Role.VALUE):
                _average(rows, piece, one.groups)
        for path, values in changed.items():
            parameter = model.get_parameter(path)
            found.append(Patch(parameter, values.to(dtype or parameter.dtype).to(parameter)))
    return found


def _turn(rows: Tensor, piece: ParameterSlice, site: Site, one: SiteMerge) -> None:
    """Turn each head's rows, in place: features that `x` gives become `x R`, and what reads them undoes that."""
    shared = piece.role in (Role.KEY, Role.VALUE)
    maps = one.keys if piece.role in (Role.QUERY, Role.KEY) else one.values
    for head in range(site.n_kv_heads if shared else site.n_heads):
        index = torch.tensor(piece.indices(head), device=rows.device, dtype=torch.long)
        if len(index) == maps.shape[-1]:  # else a gain of the whole head
            turn = maps[head if shared else site.kv_head(head)].to(rows.device)
            rows[index] = torch.tensordot(turn.T, rows[index], dims=1)


def _average(rows: Tensor, piece: ParameterSlice, groups: Sequence[Sequence[int]]) -> None:
    """Give all heads of a group the mean of their rows, in place."""
    for group in groups:
        places = torch.tensor([piece.indices(head) for head in group], device=rows.device, dtype=torch.long)
        rows[places] = rows[places].mean(dim=0, keepdim=True).expand_as(rows[places])


def _parameter(model: nn.Module, piece: ParameterSlice) -> nn.Parameter:
    return getattr(model.get_submodule(piece.module), piece.name)
