"""The maps of a merge: families of maps that leave the model's outputs alone are found by trial, the best maps of them
from moments of keys and values over the data, or without data from the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope import verify
from headscope.alignment import Family, align
from headscope.examples import Batch
from headscope.heads import ParameterSlice, Role, Site
from headscope.inputs import probe_inputs
from headscope.least_squares import exact
from headscope.memory import in_halves
from headscope.merging import Merge, SiteMerge, aligned, head_rows, unaligned
from headscope.objective import Objective
from headscope.output_weights import swapped
from headscope.reasons import RAISED
from headscope.study import Study, batches
from headscope.texts import Texts
from headscope.widening import widened

Blocks = dict[tuple[str, Role], Tensor]
"""By output projection and role, moments within each group: `[group head d head d]` in float64, sums over tokens."""


def find_merge(study: Study, kv_heads: int, *, align_by: Family | None = None) -> Merge:
    """The merge of a study's model into `kv_heads` key/value heads in every site, aligned by what its examples show.

    `align_by`: the one family to be tried for keys and values (`NONE`: plain means); default the widest that is exact.

    Raises:
        HeadscopeError: as `unaligned`.
    """
    model = study.loaded.model
    plain = unaligned(model, study.sites, kv_heads)
    wide = widened(model).model or model
    families = tuple(Family) if align_by is None else (align_by, Family.NONE)
    whole = _said(wide)
    values = next(one for one in families if _is_exact(wide, study.sites, _random(plain, values=one), whole))
    keys = next(one for one in families if _is_exact(wide, study.sites, _random(plain, keys=one), whole))
    if keys is values is Family.NONE:
        return plain
    known = {site.id: site for site in study.sites}
    sums = _by_weights(model, study.sites, plain)
    if study.examples is not None:
        sums |= _Pass(study, plain).run()
    merged = [_turned(one, known[one.site].output, sums, keys, values) for one in plain.sites]
    return replace(plain, sites=tuple(merged), keys=keys, values=values)


def _turned(one: SiteMerge, path: str, sums: Blocks, keys: Family, values: Family) -> SiteMerge:
    """A site's merge with the best maps."""
    turned = {Role.KEY: one.keys.clone(), Role.VALUE: one.values.clone()}
    for role, family in ((Role.KEY, keys), (Role.VALUE, values)):
        for group, moments in zip(one.groups, sums[path, role], strict=True):
            turned[role][list(group)] = align(moments, family)
    return replace(one, keys=turned[Role.KEY], values=turned[Role.VALUE])


def _random(merge: Merge, *, keys: Family = Family.NONE, values: Family = Family.NONE) -> Merge:
    """The merge with other maps of these families, drawn at random."""
    generator = torch.Generator().manual_seed(0)

    def drawn(maps: Tensor, family: Family) -> Tensor:
        noise = torch.randn(maps.shape, generator=generator, dtype=maps.dtype)
        return torch.stack([family.nearest(one) for one in noise])

    sites = [replace(one, keys=drawn(one.keys, keys), values=drawn(one.values, values)) for one in merge.sites]
    return replace(merge, sites=tuple(sites), keys=keys, values=values)


def _said(model: PreTrainedModel) -> list[verify.Said]:
    return verify.run(model, [probe_inputs(model)])


def _is_exact(model: PreTrainedModel, sites: Sequence[Site], merge: Merge, whole: Sequence[verify.Said]) -> bool:
    """Whether a model with the maps of a merge says what it says `whole`."""
    try:
        with swapped(aligned(model, sites, merge)):
            return verify.same_arithmetic(whole, _said(model), model).passed
    except RAISED:
        return False


def _by_weights(model: nn.Module, sites: Sequence[Site], merge: Merge) -> Blocks:
    """The moments for inputs that are independent with variance 1, and a bias."""
    known = {site.id: site for site in sites}
    found: Blocks = {}
    for one in merge.sites:
        for role in (Role.KEY, Role.VALUE):
            rows: list[Tensor] = []
            for piece in _pieces(model, known[one.site], role):
                weight = exact(getattr(model.get_submodule(piece.module), piece.name).detach()).cpu()
                rows.append(weight.movedim(piece.axis, 0).reshape(weight.shape[piece.axis], -1).T)
            piece = _pieces(model, known[one.site], role)[0]
            found[known[one.site].output, role] = _products(torch.cat(rows), piece, one)
    return found


def _pieces(model: nn.Module, site: Site, role: Role) -> list[ParameterSlice]:
    """The weight of a role's projection, and its bias."""
    weight = head_rows(model, site, role)
    assert weight is not None, "unaligned refuses other sites"
    return [weight] + [
        piece for piece in site.slices_of(role) if piece.module == weight.module and piece.name == "bias"
    ]


def _products(vectors: Tensor, piece: ParameterSlice, one: SiteMerge) -> Tensor:
    """Summed products of features within each group; `vectors` are `[token channel]`, channels as in a projection."""
    index = torch.tensor([[piece.indices(head) for head in group] for group in one.groups], device=vectors.device)
    chosen = vectors[:, index]  # [token group head d]
    return torch.einsum("tgia,tgjb->giajb", chosen, chosen).cpu()


class _Pass:
    """One pass over a study's examples that sums up products of what key and value projections put out."""

    def __init__(self, study: Study, merge: Merge) -> None:
        self.study, self.model = study, study.loaded.model
        self.merged = {one.site: one for one in merge.sites}
        self.sites = [site for site in study.sites if site.id in self.merged]
        self.texts = Texts({}, None, None)
        self.objective = Objective(self.model, study.loaded.task, study.sites)
        self.objective.on_inputs = self._begin

    def run(self) -> Blocks:
        """The moments of all groups that the examples reach."""
        total: Blocks = {}
        notes: list[str] = []
        done, examples = 0, len(self.study.examples or ())
        for batch in batches(self.study):
            for part, more in in_halves(self._moments, batch, notes):
                for place, block in more.items():
                    total[place] = total[place] + block if place in total else block
                done += len(part)
            if self.study.progress is not None:
                self.study.progress(done, examples)
        return total

    def _moments(self, batch: Batch) -> Blocks:
        found: Blocks = {}
        with contextlib.ExitStack() as stack, torch.no_grad():
            for site in self.sites:
                for role in (Role.KEY, Role.VALUE):
                    piece = _pieces(self.model, site, role)[0]
                    hook = self._adding(found, site, role, piece=piece, examples=len(batch))
                    stack.callback(self.model.get_submodule(piece.module).register_forward_hook(hook).remove)
            self.objective.forward(batch)
        return found

    def _begin(self, inputs: dict[str, Any], batch: Batch) -> None:
        self.texts = Texts.of(inputs, batch)

    def _adding(
        self, found: Blocks, site: Site, role: Role, *, piece: ParameterSlice, examples: int
    ) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            values = output.reshape(examples, -1, output.shape[-1])  # [batch token channel]
            vectors = exact(values[self.texts.real(site, values)])
            found[site.output, role] = _products(vectors, piece, self.merged[site.id])

        return add
