"""Ablation: what removing heads does to loss and metric, exactly, or estimated from a budget of exact runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headscope import gated
from headscope.capture import watch
from headscope.errors import UsageError
from headscope.examples import Batch, Example
from headscope.gated_rows import GatedRows
from headscope.heads import HeadId, Site
from headscope.memory import in_halves
from headscope.objective import Objective, Said, Wanted
from headscope.parallel import shards_of
from headscope.replay import Recording, Removal, Replay
from headscope.sampling import LEAST, Estimate, estimate

Cut = Callable[[Sequence[Example]], list[Batch]]
"""Batches of examples, in a fixed order."""


@dataclass(frozen=True)
class Ablation:
    """What each removal does, in the order in which removals were given.

    `change` is the mean over examples of L(x; ξ = 0) − L(x), `error` its standard error, `metric` what happens to the
    task's metric (NaN where there is none, or under a budget), `[removal]` each, in float64. Of exact ones `changes`
    holds each example's, `[removal]` by its number; `estimate` is what a budget gave.
    """

    change: Tensor
    error: Tensor
    metric: Tensor
    changes: dict[int, Tensor] = field(default_factory=dict)
    estimate: Estimate | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Bench:
    """What a budget of ablations is spent on: a model with its task, the examples and how to cut them, and who is told.

    `progress` is told how many examples of how many are done.
    """

    objective: Objective
    examples: Sequence[Example]
    cut: Cut
    progress: Callable[[int, int], None] | None = None
    notes: list[str] = field(default_factory=list)


def removals_of(groups: Sequence[Collection[HeadId]], sites: Sequence[Site]) -> list[Removal]:
    """The places of the heads of each group; a group may span sites.

    Raises:
        UsageError: a group is empty, or one of its heads is not there.
    """
    places = {head: place for site in sites for place, head in enumerate(site.heads)}
    found: list[Removal] = []
    for group in groups:
        heads = sorted(set(group))
        missing = [str(head) for head in heads if head not in places]
        if missing or not heads:
            raise UsageError(f"the model has no head {', '.join(missing)}" if missing else "a group names no head")
        found.append({one.site: tuple(places[head] for head in heads if head.site == one.site) for one in heads})
    return found


class GatedPass:
    """What a pass with gated heads does with each batch, all of whose runs are exact; `unit` takes what is found.

    With `removals`, a batch runs without the heads of each of them, and only what comes behind those heads runs again;
    with `alone`, once for each head, which is the only one left in its site. `notes` takes what is known before.
    """

    def __init__(
        self,
        objective: Objective,
        unit: GatedRows,
        removals: Sequence[Removal] | None,
        *,
        alone: bool,
        notes: list[str],
    ) -> None:
        self.objective, self.unit, self.removals, self.alone = objective, unit, removals, alone
        self._replay = None if removals is None else _replay(objective, notes)

    def add(self, batch: Batch) -> None:
        """Run one batch.

        Raises:
            DataError: a loss is not finite.
        """
        objective, unit = self.objective, self.unit
        if self._replay is not None and self.removals is not None:
            predictions = unit.quality.reads_predictions
            run = _runner(objective, unit.notes, self._replay, self.removals, predictions=predictions)
            for part, said in in_halves(run, batch, unit.notes):
                unit.ablated |= zip(part.numbers, _changes(said), strict=True)
                unit.quality.add(part, said)
        if self.alone:
            for part, losses in in_halves(lambda part: gated.alone(objective, part), batch, unit.notes):
                unit.alone |= zip(part.numbers, losses, strict=True)


def exact(rows: GatedRows, examples: Sequence[Example]) -> Ablation:
    """What the rows of all examples say of each removal."""
    table = torch.stack([rows.ablated[item.number] for item in examples])
    error = table.std(dim=0) / len(table) ** 0.5 if len(table) > 1 else torch.full_like(table[0], torch.nan)
    return Ablation(table.mean(dim=0), error, rows.quality.changes(), rows.ablated, notes=tuple(rows.notes))


def sampled(bench: Bench, removals: Sequence[Removal], budget: int, *, seed: int) -> Ablation:
    """Run every removal on `budget` examples on average, and guess the rest from the gradient; unbiased.

    The guess for an example is minus its gate gradients, summed over the removed heads.

    Raises:
        DataError: a loss or a gradient is not finite.
        UsageError: the budget is too small for an interval.
    """
    if budget < LEAST:
        raise UsageError(f"--budget {budget}: an interval needs {LEAST} or more exact runs of each head")
    replay = _replay(bench.objective, bench.notes)
    guess = _guesses(bench, removals)
    done = 0

    def run(places: Sequence[int], columns: Sequence[int]) -> Tensor:
        nonlocal done
        chosen = [bench.examples[place] for place in places]
        found: dict[int, Tensor] = {}
        wanted = [removals[column] for column in columns]
        for batch in bench.cut(chosen):
            runner = _runner(bench.objective, bench.notes, replay, wanted, predictions=False)
            for part, said in in_halves(runner, batch, bench.notes):
                found |= zip(part.numbers, _changes(said), strict=True)
        done += len(places) * len(columns)
        if bench.progress is not None:
            bench.progress(min(done // len(removals), budget), budget)
        return torch.stack([found[item.number] for item in chosen])

    found = estimate(guess, run, budget, seed=seed)
    none = torch.full_like(found.mean, torch.nan)
    least, most = int(found.runs.min()), int(found.runs.max())
    bench.notes.append(f"ablation is estimated: {least} to {most} exact runs each, of {len(guess)} examples")
    return Ablation(found.mean, found.error, none, estimate=found, notes=tuple(bench.notes))


def _replay(objective: Objective, notes: list[str]) -> Replay:
    model, sites = objective.model, objective.sites
    whole = shards_of(model).size == 1  # else no process has all weights of an output projection
    replay = Replay.of(model, sites) if whole else Replay(model, sites, {})
    notes += [note for note in replay.notes if note not in notes]
    return replay


def _runner(
    objective: Objective, notes: list[str], replay: Replay, removals: Sequence[Removal], *, predictions: bool
) -> Callable[[Batch], list[Said]]:
    """What runs a batch whole, and then once without the heads of each removal."""
    other = "a batch took another course than made-up inputs, so its ablations took whole passes"

    def run(batch: Batch) -> list[Said]:
        seen = Recording()
        said = [objective.say(batch, replay.recording(seen), predictions=predictions)]
        if not replay.usable(seen) and other not in notes:
            notes.append(other)
        for removed in removals:
            said.append(objective.say(batch, replay.without(removed, seen), predictions=predictions))
        return said

    return run


def _changes(said: Sequence[Said]) -> Tensor:
    """L(x; ξ = 0) − L(x), `[example removal]`."""
    return torch.stack([one.loss - said[0].loss for one in said[1:]], dim=1)


def _guesses(bench: Bench, removals: Sequence[Removal]) -> Tensor:
    """The first-order guess of every example's change, `[example removal]`, from one backward pass."""
    objective, found = bench.objective, dict[int, Tensor]()
    with watch(objective.model, objective.sites) as seen:
        for batch in bench.cut(bench.examples):
            parts = in_halves(lambda part: objective.run(part, seen, Wanted(gradient=True)), batch, bench.notes)
            for part, outcome in parts:
                gates = {id: gate.cpu().double().sum(dim=1) for id, gate in outcome.gate.items()}
                columns = [
                    -torch.stack([gates[id][:, list(places)].sum(dim=1) for id, places in one.items()]).sum(dim=0)
                    for one in removals
                ]
                found |= zip(part.numbers, torch.stack(columns, dim=1), strict=True)
    return torch.stack([found[item.number] for item in bench.examples])
