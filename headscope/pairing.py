"""Pairing: the heads of one model, or of two side by side, and one pass over the data for the sums of all pairs.

Two models read every batch one after the other, so that their heads are compared where their outputs arise. In the
space of all heads the second model's layers are numbered on behind those of the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headscope.capture import Watch, watch
from headscope.examples import Batch
from headscope.fingerprints import Fingerprint, of_measures, of_model
from headscope.heads import HeadId, Site
from headscope.matrices import HeadWeights, head_weights
from headscope.memory import in_halves
from headscope.objective import Objective
from headscope.pair_sums import PairSums
from headscope.pairs import HeadSpace
from headscope.parallel import of_all, shards_of
from headscope.reading import RowReader
from headscope.shapes import Bool
from headscope.study import Progress, Study, batches
from headscope.sums import ScoreSums
from headscope.tallies import Tally
from headscope.texts import Texts


@dataclass(frozen=True)
class Party:
    """The heads of one or two studies; those of the second come behind those of the first."""

    studies: tuple[Study, ...]

    @cached_property
    def parts(self) -> tuple[tuple[Site, ...], ...]:
        """The sites of each study, with ids that differ between them."""
        offset, found = 0, []
        for study in self.studies:
            moved = [replace(site, id=replace(site.id, layer=site.id.layer + offset)) for site in study.sites]
            twins = [tuple(replace(twin, layer=twin.layer + offset) for twin in site.shared_with) for site in moved]
            found.append(tuple(replace(site, shared_with=one) for site, one in zip(moved, twins, strict=True)))
            offset += 1 + max(site.id.layer for site in study.sites)
        return tuple(found)

    @cached_property
    def space(self) -> HeadSpace:
        """All heads in one row."""
        models = {
            site.id: study.loaded.model for study, part in zip(self.studies, self.parts, strict=True) for site in part
        }

        def weights(site: Site) -> HeadWeights:
            return head_weights(models[site.id], site)

        return HeadSpace(tuple(site for part in self.parts for site in part), weights)

    @cached_property
    def heads(self) -> tuple[HeadId, ...]:
        """The heads by place, as each model calls them."""
        return tuple(head for study in self.studies for site in study.sites for head in site.heads)

    @cached_property
    def first(self) -> int:
        """How many heads the first model has."""
        return sum(site.n_heads for site in self.parts[0])

    def same_layer(self) -> Bool[Tensor, "head head"]:
        """Pairs in layers of one number and stack."""
        known: dict[tuple[str, int], int] = {}
        number = torch.tensor([known.setdefault((head.site.stack, head.site.layer), len(known)) for head in self.heads])
        return number[:, None] == number

    def candidates(self) -> Bool[Tensor, "head head"]:
        """Every pair once: of two heads, the earlier one is the row; with two models, of one head of each."""
        count = len(self.heads)
        if len(self.studies) == 1:
            return torch.ones(count, count, dtype=torch.bool).triu(diagonal=1)
        second = torch.arange(count) >= self.first
        return ~second[:, None] & second


def run(party: Party, sums: PairSums, progress: Progress | None = None) -> tuple[str, ...]:
    """Fill the sums in one forward pass of every model over the first one's examples; returns what happened then.

    Raises:
        DeviceError: memory runs out on a single example.
    """
    first = party.studies[0]
    assert first.examples is not None
    total = Tally(ScoreSums({}), sums)
    cut, unit = batches(first), total.fresh()
    own = unit.pairs
    assert own is not None
    split = any(shards_of(study.loaded.model).size > 1 for study in party.studies)  # no process knows of others' halves
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        seen = Watch()
        runs = [_ready(party, number, own, seen, stack) for number in range(len(party.studies))]

        def show(batch: Batch) -> None:
            for one in runs:
                one(batch)

        def add(batch: Batch) -> None:
            for part, _ in in_halves(show, batch, unit.notes, together=split):
                while own.end(seen):
                    show(part)

        def fingerprint() -> Fingerprint:
            found = first.fingerprint(cut) | of_measures(total.measures)
            for study in party.studies[1:]:
                other = of_model(study.loaded, study.provenance())
                found |= {f"{name} of the second model": value for name, value in other.items()}
            return found

        first.share.pool(cut, add, unit, total=total, fingerprint=fingerprint, progress=progress)
    return tuple(total.notes)


def _ready(
    party: Party, number: int, sums: PairSums, seen: Watch, stack: contextlib.ExitStack
) -> Callable[[Batch], None]:
    """A function that runs one of the models on a batch; what is seen of its sites goes to `seen`."""
    study, sites = party.studies[number], party.parts[number]
    model = study.loaded.model
    objective = Objective(model, study.loaded.task, study.sites)
    own = stack.enter_context(watch(model, sites, gradients=False))
    seen.records |= own.records
    stack.enter_context(sums.watching(model, sites))
    readers = [of_all(one, sites, shards_of(model)) for one in sums.readers]
    reader = RowReader(model, sites, readers, replace=True) if readers else None
    if reader is not None:
        stack.enter_context(reader.reading())

    def begin(inputs: dict[str, Any], batch: Batch) -> None:
        texts = Texts.of(inputs, batch)
        own.batch = len(batch)
        if reader is not None:
            reader.start(texts, len(batch))
        if number == 0:  # the models read the same texts
            sums.start(texts, batch.numbers)

    objective.on_inputs = begin
    return objective.body
