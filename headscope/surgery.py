"""Surgery takes heads out of a model in memory: every parameter loses the slices of these heads, every count follows.

What belongs to a head is what discovery found. Parameters that couple heads (a norm over all of them) cannot lose a
part of themselves without changing what is left, so their sites are refused by name; `silence_heads` serves every site.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.boundary import Boundary, boundaries
from headscope.cuts import Cut, Way, is_filled
from headscope.errors import InvalidPlan, UnsupportedModel
from headscope.heads import ParameterSlice, Role, Site, SiteId
from headscope.matrices import total_parameters
from headscope.offload import VARIABLE, alter, give_back, is_kept_away
from headscope.plan import Plan, SiteHeads, require_removable
from headscope.portable import carried, silence
from headscope.recipe import numbering, recipe, snapshot
from headscope.rehearsal import rehearse
from headscope.settings_read import settings_read
from headscope.silence import output_forms
from headscope.stand_in import in_memory


def prune(model: PreTrainedModel, sites: Sequence[Site], plan: Plan) -> None:
    """Take the plan's heads out of `model`, in place; its configuration then carries the recipe of what was done.

    Raises:
        InvalidPlan: the heads cannot be removed together (unequal groups, coupled heads).
    """
    require_removable(plan, min_heads=0, structural=True)
    _perform(model, sites, _cuts(sites, plan), plan)


def keep_kv_heads(model: PreTrainedModel, sites: Sequence[Site], kept: Mapping[SiteId, Sequence[int]]) -> None:
    """Keep some key/value heads of some sites, by their places, and all query heads, in place.

    The query heads of a site, in order, share those that are left evenly.

    Raises:
        InvalidPlan: heads are coupled.
    """
    cuts = [
        Cut(site, list(range(site.n_heads)), list(kept[site.id])) for site in sites if site.id in kept and not site.call
    ]
    _perform(model, sites, cuts, Plan(tuple(SiteHeads.of(site) for site in sites), ()), kv_kept=kept)


def _perform(
    model: PreTrainedModel,
    sites: Sequence[Site],
    cuts: Sequence[Cut],
    plan: Plan,
    *,
    kv_kept: Mapping[SiteId, Sequence[int]] | None = None,
) -> None:
    """Make the cuts that a plan means, and let the configuration carry the recipe of them."""
    require_separable(cut.site for cut in cuts)
    shown = in_memory(model)
    edges = boundaries(shown, sites)
    left = {cut.site.module: (cut.kept, cut.kv_kept) for cut in cuts}
    slices = [(site, piece) for site in sites for piece in site.slices if piece.path not in edges[site.module].whole]
    _require_own(shown, slices, left)
    before = snapshot(model)
    read = settings_read(shown, [cut.site.module for cut in cuts])
    forms = output_forms(shown, [cut.site for cut in cuts if not cut.kept])
    ways = {} if kv_kept is not None else rehearse(shown, [cut for cut in cuts if cut.kept], edges, read=read)
    if shown is not model:
        _require_loaded_alone(model, cuts, ways, forms)
        del shown
        give_back()
    for cut in cuts:
        edge = edges[cut.site.module]
        if not cut.kept:
            cut.require_counted(model)
            cut.parameters(model, edge)
            silence(model, model.get_submodule(cut.site.module), forms[cut.site.module])
        else:
            cut.make(model, edge, read[cut.site.module], way=ways.get(cut.site.module, Way.COUNTED))
    numbers = numbering(model, sites, plan, physical=True, kv_kept=kv_kept)
    model.config.headscope = numbers | recipe(model, before)


def silence_heads(model: PreTrainedModel, sites: Sequence[Site], plan: Plan) -> None:
    """Zero what the plan's heads write, in place: their columns of the output projection. No shape changes.

    Raises:
        InvalidPlan: two sites that share a projection lose other heads.
        UnsupportedModel: the projection of a site reads heads that are already mixed, so none has columns of its own.
    """
    left = {site.module: _places(site, plan) for site in sites}
    changed = {module: kept for site in sites if len(kept := left[module := site.module]) < site.n_heads}
    _require_own(in_memory(model), [(site, piece) for site in sites for piece in site.slices_of(Role.OUTPUT)], changed)
    for site in sites:
        gone = set(range(site.n_heads)) - set(_places(site, plan))
        if not gone:
            continue
        if site.mixes_heads:
            raise UnsupportedModel(
                f"{site.id}: its output projection reads all heads mixed, so none can be taken out of the weights",
                hint="leave this site's heads out of the plan",
            )
        for piece in site.slices_of(Role.OUTPUT):
            columns = torch.tensor([index for index, owner in enumerate(piece.owner) if owner in gone])
            _zero(model.get_submodule(piece.module), piece.name, piece.axis, columns)
    model.config.headscope = carried(model.config) | numbering(model, sites, plan, physical=False)


def _zero(module: nn.Module, name: str, axis: int, places: Tensor) -> None:
    """Zero some indices of a parameter along an axis, in place."""
    if is_kept_away(module, name):
        alter(module, name, lambda values: values.index_fill(axis, places.to(values.device), 0))
        return
    weight = getattr(module, name)
    with torch.no_grad():
        weight.index_fill_(axis, places.to(weight.device), 0)


def gates(sites: Sequence[Site], plan: Plan) -> dict[SiteId, Tensor]:
    """Gates of 0 for the heads of a plan and of 1 for the others, for every site that loses one."""
    found: dict[SiteId, Tensor] = {}
    for site in sites:
        if len(kept := _places(site, plan)) < site.n_heads:
            found[site.id] = torch.zeros(site.n_heads).index_fill(0, torch.tensor(kept, dtype=torch.long), 1.0)
    return found


def parameters_left(
    model: PreTrainedModel, sites: Sequence[Site], plan: Plan, edges: Mapping[str, Boundary] | None = None
) -> int:
    """Parameters that `model` would have without the plan's heads; `edges` are its `boundaries`, where known."""
    total = total_parameters(model)
    cuts = _cuts(sites, plan)
    edges = boundaries(in_memory(model), sites) if edges is None else edges
    dropped: dict[tuple[str, str, int], Tensor] = {}
    for cut in cuts:
        dropped |= cut.dropped(edges[cut.site.module])
    for (path, name, axis), gone in dropped.items():
        parameter = getattr(model.get_submodule(path), name)
        total -= int(gone.sum()) * (parameter.numel() // parameter.shape[axis])
    return total


def is_separable(site: Site) -> bool:
    """Whether the heads of a site can be taken apart exactly."""
    return not site.coupled and not site.mixes_heads


def require_separable(sites: Iterable[Site]) -> None:
    """Refuse sites whose heads cannot be taken apart exactly.

    Raises:
        InvalidPlan: naming the first such site and what couples its heads.
    """
    for site in sites:
        if not is_separable(site):
            what = ", ".join(site.coupled) or f"the input of {site.output}"
            hint = "leave this site's heads out of the plan" if site.mixes_heads else "--layout masked is exact"
            raise InvalidPlan(f"{site.id}: {what} ties its heads together, so none can be removed exactly", hint=hint)


def _require_loaded_alone(
    model: nn.Module, cuts: Iterable[Cut], ways: Mapping[str, Way], forms: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse, in an offloaded model, modules that would use weights when nobody has loaded them: accelerate loads those
    of a module right before that module runs, not before one around it does.

    Raises:
        UnsupportedModel: naming the first site.
    """
    for cut in cuts:
        module = model.get_submodule(cut.site.module)
        projection = forms[cut.site.module]["projection"] if not cut.kept else None
        bias = None if projection is None else getattr(module.get_submodule(projection), "bias", None)
        own = not cut.kept and (bias is not None or any(module.parameters(recurse=False)))
        if own or ways.get(cut.site.module, Way.COUNTED) is not Way.COUNTED or is_filled(module):
            raise UnsupportedModel(
                f"{cut.site.id}: {cut.site.module_class} cannot lose these heads while its weights are offloaded",
                hint=f"--layout masked works; or allow it more memory by {VARIABLE}",
            )


def _places(site: Site, plan: Plan) -> list[int]:
    """Places of the heads that a plan leaves in a site."""
    kept = set(plan.kept(site.id))
    return [place for place, head in enumerate(site.heads) if head.index in kept]


def _cuts(sites: Sequence[Site], plan: Plan) -> list[Cut]:
    """One cut for each module that loses heads; layers that share a module lose the same."""
    cuts: list[Cut] = []
    for site in sites:
        kept = _places(site, plan)
        if len(kept) < site.n_heads and not site.call:
            kv_kept = sorted({site.kv_head(place) for place in kept})
            cuts.append(Cut(site, kept, kv_kept))
    return cuts


def _require_own(model: nn.Module, slices: Iterable[tuple[Site, ParameterSlice]], left: Mapping[str, object]) -> None:
    """Refuse parameters that hold slices of two modules' heads of which other ones are `left` (by module; absent: all),
    also where two names stand for one parameter: no choice of rows is right for both.

    Raises:
        InvalidPlan: naming the parameter.
    """
    owners: dict[int, Site] = {}
    for site, piece in slices:
        other = owners.setdefault(id(getattr(model.get_submodule(piece.module), piece.name)), site)
        if left.get(other.module) != left.get(site.module):
            raise InvalidPlan(
                f"{piece.path} belongs to heads of {other.id} and of {site.id}", hint="remove the same heads of both"
            )
