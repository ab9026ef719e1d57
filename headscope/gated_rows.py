"""What passes with gated heads find: numbers of each example, and what the task's metric is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from headscope.examples import Batch
from headscope.metrics import Array, Metric, Predictions
from headscope.objective import Said
from headscope.states import State, noted, packed, under, within


class GatedRows:
    """Rows of a pass, or of one unit of it, by the number of the example, in float64.

    `ablated` is `[removal]`, what the loss gains without the heads of each removal; `alone` is `[head]`, the loss with
    one head left in its site. Either is empty where it is not measured.
    """

    def __init__(self, metric: Metric | None = None, removals: int = 0) -> None:
        self._metric, self._removals = metric, removals
        self.clear()

    def fresh(self) -> GatedRows:
        """Empty ones of the same kind, for the units of the pass."""
        return GatedRows(self._metric, self._removals)

    def clear(self) -> None:
        """Begin the next unit."""
        self.ablated: dict[int, Tensor] = {}
        self.alone: dict[int, Tensor] = {}
        self.quality = Quality(self._metric, self._removals)
        self.notes: list[str] = []

    def state(self) -> State:
        """The rows of each kind with their examples' numbers, what the metric is made of, and the notes."""
        found = under("quality", self.quality.state()) | {"notes": packed(self.notes)}
        for name, rows in (("ablated", self.ablated), ("alone", self.alone)):
            if rows:
                found[f"{name}/numbers"] = torch.tensor(list(rows))
                found[f"{name}/rows"] = torch.stack(list(rows.values()))
        return found

    def absorb(self, state: State) -> None:
        """Add the rows of other examples."""
        for name, rows in (("ablated", self.ablated), ("alone", self.alone)):
            part = within(state, name)
            if part:
                rows |= zip(part["numbers"].tolist(), part["rows"], strict=True)
        self.quality.absorb(within(state, "quality"))
        noted(self.notes, state["notes"])

    @property
    def size(self) -> int:
        """No sums over pairs of heads."""
        return 0


@dataclass(frozen=True)
class _Kept:
    """What the whole model and then each removal said on some examples.

    `example` (counted from 0 to `count` - 1) and `target` are `[row]`, `prediction` and `loss` `[1 + removal, row]`.
    """

    example: Array
    target: Array
    prediction: Array
    loss: Array
    count: int

    @classmethod
    def joined(cls, parts: Sequence[_Kept]) -> _Kept:
        """Parts one behind the other."""
        starts = numpy.cumsum([0, *(part.count for part in parts)])
        return cls(
            example=numpy.concatenate([part.example + start for part, start in zip(parts, starts[:-1], strict=True)]),
            target=numpy.concatenate([part.target for part in parts]),
            prediction=numpy.concatenate([part.prediction for part in parts], axis=1),
            loss=numpy.concatenate([part.loss for part in parts], axis=1),
            count=int(starts[-1]),
        )

    def predictions(self, model: int) -> Predictions:
        """Those of the whole model (0), or without the heads of one removal."""
        return Predictions(self.example, self.prediction[model], self.target, self.loss[model], self.count)


class Quality:
    """The task's metric of the whole model and of each removal, in memory that grows with the examples at most.

    Where an example's totals do not depend on the others only their sums are kept, else its predictions.
    """

    def __init__(self, metric: Metric | None, removals: int) -> None:
        self.metric, self.removals = metric, removals
        self.reads_predictions = metric is not None and not metric.of_loss
        self._totals: Array | None = None
        """Sums over examples, `[1 + removal, total]`, the whole model first."""
        self._kept: list[_Kept] = []

    def add(self, batch: Batch, said: Sequence[Said]) -> None:
        """Add what the whole model and each removal said on a batch."""
        if self.metric is None:
            return
        every = [_predictions(batch, one) for one in said]
        if self.metric.apart:
            self._sum(numpy.stack([numpy.asarray(self.metric.totals(one)).sum(axis=0) for one in every]))
        else:
            predicted, lost = (numpy.stack([getattr(one, name) for one in every]) for name in ("prediction", "loss"))
            self._kept.append(_Kept(every[0].example, every[0].target, predicted, lost, len(batch)))

    def _sum(self, totals: Array) -> None:
        self._totals = totals if self._totals is None else self._totals + totals

    def state(self) -> State:
        """The sums, or the predictions."""
        if self._totals is not None:
            return {"totals": torch.from_numpy(self._totals)}
        if not self._kept:
            return {}
        every = _Kept.joined(self._kept)
        return {name: torch.from_numpy(numpy.asarray(value)) for name, value in vars(every).items()}

    def absorb(self, state: State) -> None:
        """Add what the models said on the examples that follow."""
        if "totals" in state:
            self._sum(state["totals"].numpy())
        elif state:
            count = int(state.pop("count"))
            self._kept.append(_Kept(**{name: value.numpy() for name, value in state.items()}, count=count))

    def changes(self) -> Tensor:
        """The metric without the heads of each removal minus that of the whole model, `[removal]`; NaN without one."""
        if self.metric is None:
            return torch.full((self.removals,), torch.nan, dtype=torch.float64)
        with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if self._totals is not None:
                values = [self.metric.of(total[None]) for total in self._totals]
            else:
                every = _Kept.joined(self._kept)
                ones = [every.predictions(model) for model in range(self.removals + 1)]
                values = [self.metric.resampled(one, numpy.ones((1, one.count))) for one in ones]
        found = torch.from_numpy(numpy.concatenate(values).astype(numpy.float64))
        return found[1:] - found[0]


def _predictions(batch: Batch, said: Said) -> Predictions:
    """What was said on one batch, in small types."""
    rows = batch.predicted.nonzero()[:, 0].numpy()
    predicted = numpy.zeros(len(rows)) if said.predicted is None else said.predicted.numpy()
    small = predicted if predicted.dtype.kind == "f" else predicted.astype(numpy.int32)
    target = batch.targets[batch.predicted].numpy()
    return Predictions(rows, small, target, said.lost.numpy(), len(batch))
