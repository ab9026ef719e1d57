"""Repair: the heads that stay are taught to also say what the removed ones said, by least squares in their W_o.

Site by site in the order in which the model runs, the columns of the output projection that belong to surviving heads,
and its bias where it has one, are fitted anew: so that the stream they write to is what it is in the whole model, given
what the smaller model, repaired so far, puts in. Where there is no such stream, what the projection writes is what is
compared. The ridge holds towards the old weights and is chosen by the error on held-out
examples. A site whose held-out error does not fall keeps its weights, and there is no repair at all unless the
divergence from the whole model falls on held-out examples. Then the same sites can be fitted once more, with the same
ridges, to all examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.capture import gate
from headscope.evaluation import judge
from headscope.examples import Batch, Examples, held_out
from headscope.heads import HeadId, Site, SiteId
from headscope.least_squares import RIDGES, Moments, best
from headscope.memory import in_halves
from headscope.original import Original
from headscope.output_weights import Patch, head_columns, obstacle, output_bias, patches, swapped
from headscope.plan import Plan
from headscope.side_by_side import SideBySide
from headscope.study import Study, batches
from headscope.surgery import gates

SPLIT = 2
"""The number of the split of calibration examples into those that are fitted and those held out."""


@dataclass(frozen=True)
class SiteRepair:
    """What stands in one output projection after a repair, and what it was worth.

    `columns` are `[kept_head d_value d_model]` in the order of `heads`, `bias` is `[d_model]` or None where the
    projection has none; both hold numbers of the stored format, as float64. Errors are those of the stream behind
    the projection against the whole model's on held-out tokens that were not fitted: squared, summed over the width,
    the weighted mean over tokens.
    """

    site: SiteId
    heads: tuple[HeadId, ...]
    columns: Tensor
    bias: Tensor | None
    ridge: float
    error_before: float
    error_after: float


@dataclass(frozen=True)
class Repair:
    """The repaired sites in the order of running, and the divergence on held-out examples without and with them.

    Divergences are those of the fit that has not seen these examples.
    """

    sites: tuple[SiteRepair, ...]
    divergence_before: float
    divergence_after: float
    notes: tuple[str, ...] = ()


def fit(
    study: Study,
    plan: Plan,
    *,
    ridges: Sequence[float] = RIDGES,
    dtype: torch.dtype | None = None,
    standing: Sequence[Patch] = (),
    original: Original | None = None,
) -> Repair | None:
    """The repair of a study's model without the plan's heads, from the study's examples; None where none helps.

    A quarter of the examples, seeded, is held out: to choose among `ridges`, and to accept. `dtype` is the number
    format in which the new weights will be stored (default: the model's). `standing` are other weights of the
    smaller model (merged heads), which the whole model lacks. `original` holds what is known of the whole model.
    The model is as before afterwards.

    Raises:
        DataError: a loss or a divergence is not finite.
    """
    found = Fitting(study, plan, ridges, dtype or study.loaded.model.dtype, original=original, standing=standing)
    return found.accepted(tuple(found.sites()))


def refitted(
    study: Study,
    plan: Plan,
    repair: Repair,
    *,
    dtype: torch.dtype | None = None,
    standing: Sequence[Patch] = (),
    original: Original | None = None,
) -> Repair:
    """A repair that was accepted, its sites fitted with the same ridges to all examples, those held out among them."""
    found = Fitting(study, plan, (), dtype or study.loaded.model.dtype, original=original, standing=standing)
    return replace(repair, sites=tuple(found.again(repair.sites)))


@contextlib.contextmanager
def applied(model: PreTrainedModel, sites: Sequence[Site], repair: Repair) -> Iterator[None]:
    """The repaired weights in a model while the block runs; the very tensors that stood there come back."""
    with swapped(_patches(model, sites, repair.sites)):
        yield


def write(model: PreTrainedModel, sites: Sequence[Site], repair: Repair) -> None:
    """Put a repair into a model for good, in its number format; `sites` are those that it has now.

    Heads are found by their original numbers, so the model may have lost those of the plan, or only hold zeros there.
    """
    for patch in _patches(model, sites, repair.sites):
        patch.write()


def _patches(model: PreTrainedModel, sites: Sequence[Site], repairs: Sequence[SiteRepair]) -> list[Patch]:
    known = {site.id: site for site in sites}
    found: list[Patch] = []
    for one in repairs:
        site = known[one.site]
        places = [site.heads.index(head) for head in one.heads]
        found += patches(model, site, places, one.columns, bias=one.bias)
    return found


class Fitting:
    """The passes over the examples that one repair takes."""

    def __init__(
        self,
        study: Study,
        plan: Plan,
        ridges: Sequence[float],
        dtype: torch.dtype,
        *,
        original: Original | None = None,
        standing: Sequence[Patch] = (),
    ) -> None:
        assert study.examples is not None, "a repair needs examples"
        self.study, self.plan, self.ridges, self.dtype, self.standing = study, plan, ridges, dtype, standing
        self.original = original or Original(study)
        self.model, self.objective = study.loaded.model, self.original.objective
        self.closed = gates(study.sites, plan)
        self.beside = SideBySide(self.original, self.closed)
        fitted, held = held_out(study.examples, study.options.seed, split=SPLIT)
        self.fitted, self.held = self._batches(fitted), self._batches(held)
        self.notes: list[str] = []

    def _batches(self, examples: Examples) -> list[Batch]:
        return batches(self.study.on(examples))

    def sites(self) -> Iterator[SiteRepair]:
        """Each repaired site, fitted while those before it stand repaired."""
        done = list(self.standing)
        for layers in self._modules():
            site = layers[0]
            kept = set(self.plan.kept(site.id))
            places = [place for place, head in enumerate(site.heads) if head.index in kept]
            if not places:
                continue
            if reason := obstacle(self.model, site):
                self.notes.append(f"{site.id} is not repaired: {reason}")
                continue
            places = self._heard(site, places)
            one = self._site(layers, places, done) if places else None
            if one is not None:
                done += patches(self.model, site, places, one.columns, bias=one.bias)
                yield one

    def again(self, repairs: Sequence[SiteRepair]) -> Iterator[SiteRepair]:
        """The same sites with the same ridges, fitted to all examples."""
        done, layers = list(self.standing), {one[0].id: one for one in self._modules()}
        for repair in repairs:
            site = layers[repair.site][0]
            places = [site.heads.index(head) for head in repair.heads]
            moments = self._moments([*self.fitted, *self.held], layers[repair.site], places, done)
            assert moments is not None, "the site was reached before"
            change = moments.change(repair.ridge)
            assert change is not None, "its heads put out something before"
            start = self._start(site, places)
            one = self._made(repair, (start + change.cpu()).to(self.dtype).double())
            done += patches(self.model, site, places, one.columns, bias=one.bias)
            yield one

    def _modules(self) -> list[list[Site]]:
        """The layers of each output projection, in the order of running, from the first that loses a head; all where
        other weights stand in the smaller model.
        """
        order = self.original.streams.order(self.fitted[0])
        layers = [[site for site in self.study.sites if site.output == path] for path in order]
        touched = [bool(self.standing) or any(site.id in self.closed for site in one) for one in layers]
        first = touched.index(True) if any(touched) else len(layers)
        return [sorted(one, key=lambda site: site.call) for one in layers[first:]]

    def _site(self, layers: Sequence[Site], places: Sequence[int], done: Sequence[Patch]) -> SiteRepair | None:
        """The best repair of one projection; None where the held-out error does not fall."""
        site = layers[0]
        fitting, held = (self._moments(part, layers, places, done) for part in (self.fitted, self.held))
        if fitting is None or held is None:
            return None
        start = self._start(site, places)
        found = best(fitting, held, self.ridges, start.to(fitting.products.device), dtype=self.dtype)
        if found is None:
            return None
        heads = tuple(site.heads[place] for place in places)
        blank = SiteRepair(site.id, heads, start, None, found.ridge, found.before, found.after)
        return self._made(blank, found.map.cpu())

    def _heard(self, site: Site, places: Sequence[int]) -> list[int]:
        """Those of these places at which a head writes anything: one that was silenced before is not woken."""
        columns = head_columns(self.model, site, places)
        return [place for place, own in zip(places, columns, strict=True) if own.any()]

    def _start(self, site: Site, places: Sequence[int]) -> Tensor:
        """What the heads at these places write by, and the bias where there is one: `[feature d_model]`."""
        with swapped(self.standing):
            columns, bias = head_columns(self.model, site, places), output_bias(self.model, site)
            rows = [columns.flatten(0, 1)] + ([] if bias is None else [bias.detach().cpu().double()[None]])
            return torch.cat(rows)

    def _made(self, repair: SiteRepair, new: Tensor) -> SiteRepair:
        """A site's repair with new weights `[feature d_model]`."""
        heads = len(repair.heads)
        site = next(site for site in self.study.sites if site.id == repair.site)
        features = heads * site.d_value
        columns, rest = new[:features].view(heads, site.d_value, -1), new[features:]
        return replace(repair, columns=columns, bias=rest[0] if len(rest) else None)

    def _moments(
        self, part: Sequence[Batch], layers: Sequence[Site], places: Sequence[int], done: Sequence[Patch]
    ) -> Moments | None:
        """The moments of one projection over some batches; None where no batch reaches it."""
        total: Moments | None = None
        for batch in part:
            for _, more in in_halves(
                lambda half: self.beside.moments(half, layers, places, repairs=done), batch, self.notes
            ):
                total = more if total is None else total if more is None else total + more
        return total

    def accepted(self, found: tuple[SiteRepair, ...]) -> Repair | None:
        """The repair, if the divergence on held-out examples falls by it."""
        if not found:
            return None
        loaded, sites = self.study.loaded, self.study.sites
        repair = Repair(found, 0.0, 0.0)

        def less(batch: Batch) -> Tensor:
            with without(self.study, self.plan, self.standing):
                return self.objective.forward(batch)

        def repaired(batch: Batch) -> Tensor:
            with without(self.study, self.plan, self.standing), applied(loaded.model, sites, repair):
                return self.objective.forward(batch)

        runs = [self.objective.forward, less, repaired]
        _, before, after = judge(runs, loaded.task, loaded.task_name, self.held)
        if not after.divergence < before.divergence:
            return None
        return Repair(found, before.divergence, after.divergence, tuple(dict.fromkeys(self.notes)))


@contextlib.contextmanager
def without(study: Study, plan: Plan, standing: Sequence[Patch] = ()) -> Iterator[None]:
    """The model without the plan's heads, by gates of 0, and with other `standing` weights, while the block runs."""
    with gate(study.loaded.model, gates(study.sites, plan), study.sites), swapped(standing):
        yield
