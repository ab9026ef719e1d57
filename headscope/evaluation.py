"""Evaluation: what models predict on the same examples, as each one's loss, metric and divergence from the first.

Every model sees a batch before the next batch comes, so that distributions are compared where they arise. What stays
are numbers: per example its loss and divergence, per predicted position the loss and the class or number that was said.
They are gathered in units of batches, which several processes can share and a folder keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headscope.errors import DataError, UsageError
from headscope.examples import Batch
from headscope.fingerprints import Fingerprint
from headscope.losses import Distribution, choices, losses
from headscope.memory import in_halves
from headscope.metrics import ACCURACY, F1, Metric, Predictions, choose_metric
from headscope.objective import CHUNK_VALUES
from headscope.shares import Progress, Share
from headscope.states import State, noted, packed, under, within
from headscope.tasks import Task

Run = Callable[[Batch], Tensor]
"""A model's outputs at the predicted positions of a batch, `[row class]` in row order, as `Objective.forward` gives."""


@dataclass(frozen=True)
class Judgement:
    """How one model does on a set of examples.

    `losses` and `divergences` are `[example]` in float64, in the order of the examples' numbers; `losses` is empty
    without labels. `metric` is None, and `metric_name` empty, where there is none. `measure` and `predictions` are
    what the metric rests on, for resampling.
    """

    losses: Tensor
    divergences: Tensor
    metric: float | None
    metric_name: str
    examples: int
    measure: Metric | None = None
    predictions: Predictions | None = None
    notes: tuple[str, ...] = ()

    @property
    def loss(self) -> float | None:
        """Mean loss over examples; None without labels."""
        return float(self.losses.mean()) if len(self.losses) else None

    @property
    def divergence(self) -> float:
        """Mean divergence from the first model over examples; 0 for the first."""
        return float(self.divergences.mean())

    def remarks(self, asked: str | None) -> list[str]:
        """Why F1 stands where accuracy might be expected, and what a lone class does to both; `asked` is the metric
        that was asked for.
        """
        notes: list[str] = []
        if asked is None and self.measure is F1:
            notes.append("f1 is the metric, since one class has more than 80 % of the labels")
        if self.measure in (ACCURACY, F1) and self.predictions is not None and len(set(self.predictions.target)) == 1:
            notes.append(f"all labels are of one class: {self.metric_name} says nothing about telling classes apart")
        return notes


@dataclass(frozen=True)
class _Part:
    """What one model said on some examples: `loss` and `divergence` are `[example]`, `lost` and `said` are `[row]`.

    All but `divergence` are empty without labels.
    """

    loss: Tensor
    divergence: Tensor
    lost: Tensor
    said: Tensor

    @classmethod
    def joined(cls, parts: Sequence[_Part]) -> _Part:
        """Parts one behind the other."""
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__})


class _Heard:
    """What every model said on the examples of a pass, or of one unit of it, in the order of the batches."""

    def __init__(self, models: int) -> None:
        self._models = models
        self.clear()

    def clear(self) -> None:
        self.parts: list[list[_Part]] = [[] for _ in range(self._models)]
        self.notes: list[str] = []

    def add(self, parts: Sequence[_Part]) -> None:
        """What each model said on the examples that follow."""
        for before, part in zip(self.parts, parts, strict=True):
            before.append(part)

    def state(self) -> State:
        found: State = {"notes": packed(self.notes)}
        for model, parts in enumerate(self.parts):
            found |= under(f"model/{model}", vars(_Part.joined(parts)))
        return found

    def absorb(self, state: State) -> None:
        self.add([_Part(**within(state, f"model/{model}")) for model in range(self._models)])
        noted(self.notes, state["notes"])

    @property
    def size(self) -> int:
        return 0


def judge(
    runs: Sequence[Run],
    task: Task,
    task_name: str,
    batches: Sequence[Batch],
    *,
    metric: str | None = None,
    progress: Progress | None = None,
    share: Share | None = None,
    fingerprint: Callable[[], Fingerprint] = dict,
) -> list[Judgement]:
    """Judge every run on the same batches; divergences are from the first.

    `share` is what this process does of it, all of it unless told; `fingerprint` then names all that runs and batches
    depend on. Every process has all judgements.

    Raises:
        UsageError: the metric is unknown or does not fit, or a run gives other outputs than the first.
        DataError: a loss or a divergence is not finite.
        RankError: another process has ended, stands still or sees something else.
        WorkError: the folder holds work of another run.
    """
    chosen = choose_metric(metric, task, task_name, batches)
    kind = task.distribution
    labelled = kind is not Distribution.DIRECTION and all(batch.labelled for batch in batches)
    unit, total = _Heard(len(runs)), _Heard(len(runs))

    def add(batch: Batch) -> None:
        for _, parts in in_halves(lambda half: _compare(runs, kind, half, labelled=labelled), batch, unit.notes):
            unit.add(parts)

    with torch.no_grad():
        (share or Share()).pool(batches, add, unit, total=total, fingerprint=fingerprint, progress=progress)
    return [_judgement(_Part.joined(parts), batches, chosen, tuple(total.notes)) for parts in total.parts]


def _compare(runs: Sequence[Run], kind: Distribution, batch: Batch, *, labelled: bool) -> list[_Part]:
    """What every run says on a batch; the first one's outputs stay until all others are compared with them."""
    first = _near(runs[0](batch))
    parts = [_part(first, first, kind, batch, labelled=labelled)]
    for run in runs[1:]:
        rows = _near(run(batch))
        if rows.shape[1] != first.shape[1]:
            raise UsageError(f"one model predicts {rows.shape[1]} numbers at a position, the first {first.shape[1]}")
        parts.append(_part(rows, first, kind, batch, labelled=labelled))
    return parts


def _near(rows: Tensor) -> Tensor:
    """Outputs where float64 exists."""
    return rows.cpu() if rows.device.type == "mps" else rows


def _part(rows: Tensor, first: Tensor, kind: Distribution, batch: Batch, *, labelled: bool) -> _Part:
    """One model's outputs beside the first's, a piece at a time."""
    targets = batch.targets[batch.predicted].to(rows.device)
    empty = torch.zeros(0, dtype=torch.float64)
    apart, lost, said = [empty], [empty], [empty] if not labelled else []
    size = max(16, CHUNK_VALUES // rows.shape[1])
    for start in range(0, len(rows), size):
        piece = slice(start, start + size)
        same = rows is first
        apart.append(empty.new_zeros(len(rows[piece])) if same else divergences(first[piece], rows[piece], kind).cpu())
        if labelled:
            lost.append(losses(rows[piece], targets[piece], kind).double().cpu())
            said.append(choices(rows[piece], kind).cpu())
    return _Part(
        loss=_means(batch, torch.cat(lost), "loss") if labelled else empty,
        divergence=_means(batch, torch.cat(apart), "divergence"),
        lost=torch.cat(lost),
        said=torch.cat(said),
    )


def divergences(first: Tensor, other: Tensor, kind: Distribution) -> Tensor:
    """How far predictions `[row class]` are from the first model's, `[row]` in float64 and exactly 0 for equal rows.

    `KL(first ‖ other)` in nats of the distributions that the rows stand for; `1 − cos` of directions.
    """
    a, b = first.double(), other.to(first.device).double()
    if kind is Distribution.CATEGORICAL:
        log_a, log_b = a.log_softmax(dim=1), b.log_softmax(dim=1)
        chance = log_a.exp()
        return torch.where(chance == 0, 0.0, chance * (log_a - log_b)).sum(dim=1)
    if kind is Distribution.GAUSSIAN:
        return (a[:, 0] - b[:, 0]) ** 2  # (a − b)² / 2σ² with variance one half
    return (F.normalize(a, dim=1) - F.normalize(b, dim=1)).square().sum(dim=1) / 2


def _means(batch: Batch, rows: Tensor, what: str) -> Tensor:
    """Means over the positions of each example, `[example]`.

    Raises:
        DataError: one is not finite.
    """
    sums = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, batch.predicted.nonzero()[:, 0], rows)
    means = sums / batch.positions
    broken = (~means.isfinite()).nonzero()
    if len(broken):
        number = batch.numbers[int(broken[0])]
        raise DataError(f"the {what} of example {number} is not finite", hint="use --dtype float32 or bfloat16")
    return means


def _judgement(part: _Part, batches: Sequence[Batch], metric: Metric | None, notes: tuple[str, ...]) -> Judgement:
    """Everything in the order of the examples' numbers, whatever the batches were."""
    order = torch.tensor([number for batch in batches for number in batch.numbers]).argsort()
    predictions = None if metric is None else _predictions(part, batches, order)
    return Judgement(
        losses=part.loss[order] if len(part.loss) else part.loss,
        divergences=part.divergence[order],
        metric=None if metric is None or predictions is None else metric.value(predictions),
        metric_name="" if metric is None else metric.name,
        examples=len(order),
        measure=metric,
        predictions=predictions,
        notes=notes,
    )


def _predictions(part: _Part, batches: Sequence[Batch], order: Tensor) -> Predictions:
    example = order.argsort().repeat_interleave(torch.cat([batch.positions for batch in batches]))
    rows = example.argsort(stable=True)
    target = torch.cat([batch.targets[batch.predicted] for batch in batches])
    return Predictions(
        example=example[rows].numpy(),
        prediction=part.said[rows].numpy(),
        target=target[rows].numpy(),
        loss=part.lost[rows].numpy(),
        count=len(order),
    )
