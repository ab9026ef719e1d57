"""Ablation: what removing heads does to loss and metric, exactly, or estimated from a budget of exact runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from headscope.capture import watch
from headscope.errors import UsageError
from headscope.examples import Batch, Example
from headscope.heads import HeadId, Site
from headscope.memory import in_halves
from headscope.metrics import Metric, Predictions
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
    """What ablations are run on: a model with its task, the examples and how to cut them, and who is told.

    `progress` is told how many examples of how many are done.
    """

    objective: Objective
    examples: Sequence[Example]
    cut: Cut
    metric: Metric | None = None
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


def exact(bench: Bench, removals: Sequence[Removal]) -> Ablation:
    """Run every removal on every example: only what comes behind the removed heads runs again.

    Raises:
        DataError: a loss is not finite.
    """
    replay = _replay(bench)
    quality = _Quality(bench.metric, len(removals))
    changes: dict[int, Tensor] = {}
    for batch in bench.cut(bench.examples):
        run = _runner(bench, replay, removals, predictions=quality.reads_predictions)
        for part, said in in_halves(run, batch, bench.notes):
            changes |= zip(part.numbers, _changes(said), strict=True)
            quality.add(part, said)
        if bench.progress is not None:
            bench.progress(len(changes), len(bench.examples))
    table = torch.stack([changes[item.number] for item in bench.examples])
    error = table.std(dim=0) / len(table) ** 0.5 if len(table) > 1 else torch.full_like(table[0], torch.nan)
    return Ablation(table.mean(dim=0), error, quality.changes(), changes, notes=tuple(bench.notes))


def sampled(bench: Bench, removals: Sequence[Removal], budget: int, *, seed: int) -> Ablation:
    """Run every removal on `budget` examples on average, and guess the rest from the gradient; unbiased.

    The guess for an example is minus its gate gradients, summed over the removed heads.

    Raises:
        DataError: a loss or a gradient is not finite.
        UsageError: the budget is too small for an interval.
    """
    if budget < LEAST:
        raise UsageError(f"--budget {budget}: an interval needs {LEAST} or more exact runs of each head")
    replay = _replay(bench)
    guess = _guesses(bench, removals)
    done = 0

    def run(places: Sequence[int], columns: Sequence[int]) -> Tensor:
        nonlocal done
        chosen = [bench.examples[place] for place in places]
        found: dict[int, Tensor] = {}
        wanted = [removals[column] for column in columns]
        for batch in bench.cut(chosen):
            for part, said in in_halves(_runner(bench, replay, wanted, predictions=False), batch, bench.notes):
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


def _replay(bench: Bench) -> Replay:
    model, sites = bench.objective.model, bench.objective.sites
    whole = shards_of(model).size == 1  # else no process has all weights of an output projection
    replay = Replay.of(model, sites) if whole else Replay(model, sites, {})
    bench.notes += [note for note in replay.notes if note not in bench.notes]
    return replay


def _runner(
    bench: Bench, replay: Replay, removals: Sequence[Removal], *, predictions: bool
) -> Callable[[Batch], list[Said]]:
    """What runs a batch whole, and then once without the heads of each removal."""
    other = "a batch took another course than made-up inputs, so its ablations took whole passes"

    def run(batch: Batch) -> list[Said]:
        seen = Recording()
        said = [bench.objective.say(batch, replay.recording(seen), predictions=predictions)]
        if not replay.usable(seen) and other not in bench.notes:
            bench.notes.append(other)
        for removed in removals:
            said.append(bench.objective.say(batch, replay.without(removed, seen), predictions=predictions))
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


class _Quality:
    """The task's metric of the whole model and of each removal, in memory that grows with the examples at most.

    Where an example's totals do not depend on the others only their sums are kept, else its predictions.
    """

    def __init__(self, metric: Metric | None, removals: int) -> None:
        self.metric, self.removals = metric, removals
        self.reads_predictions = metric is not None and not metric.of_loss
        self._totals: list[numpy.ndarray] = []
        self._kept: list[list[Predictions]] = [[] for _ in range(removals + 1)]

    def add(self, batch: Batch, said: Sequence[Said]) -> None:
        """Add what the whole model and each removal said on a batch."""
        if self.metric is None:
            return
        rows = [_predictions(batch, one) for one in said]
        if self.metric.apart:
            totals = [numpy.asarray(self.metric.totals(one)).sum(axis=0) for one in rows]
            self._totals = [a + b for a, b in zip(self._totals, totals, strict=True)] if self._totals else totals
        else:
            for kept, one in zip(self._kept, rows, strict=True):
                kept.append(one)

    def changes(self) -> Tensor:
        """The metric without the heads of each removal minus that of the whole model, `[removal]`; NaN without one."""
        if self.metric is None:
            return torch.full((self.removals,), torch.nan, dtype=torch.float64)
        with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if self.metric.apart:
                values = numpy.concatenate([self.metric.of(total[None]) for total in self._totals])
            else:
                ones = [_joined(kept) for kept in self._kept]
                values = numpy.concatenate([self.metric.resampled(one, numpy.ones((1, one.count))) for one in ones])
        found = torch.from_numpy(numpy.asarray(values, dtype=numpy.float64))
        return found[1:] - found[0]


def _predictions(batch: Batch, said: Said) -> Predictions:
    """What was said on one batch, in small types."""
    rows = batch.predicted.nonzero()[:, 0].numpy()
    predicted = numpy.zeros(len(rows)) if said.predicted is None else said.predicted.numpy()
    small = predicted if predicted.dtype.kind == "f" else predicted.astype(numpy.int32)
    target = batch.targets[batch.predicted].numpy()
    return Predictions(rows, small, target, said.lost.numpy(), len(batch))


def _joined(parts: Sequence[Predictions]) -> Predictions:
    """Batches one behind the other, as one set of examples."""
    starts = numpy.cumsum([0, *(part.count for part in parts)])
    return Predictions(
        example=numpy.concatenate([part.example + start for part, start in zip(parts, starts[:-1], strict=True)]),
        prediction=numpy.concatenate([part.prediction for part in parts]),
        target=numpy.concatenate([part.target for part in parts]),
        loss=numpy.concatenate([part.loss for part in parts]),
        count=int(starts[-1]),
    )
