"""Trials: what the model loses without some of its heads, repaired or not, judged on held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from headscope.bootstrap import Interval, interval
from headscope.card import Quality
from headscope.errors import UsageError
from headscope.evaluation import Judgement, Run, judge
from headscope.examples import Batch
from headscope.losses import Distribution
from headscope.mending import Mender
from headscope.objective import Objective
from headscope.output_weights import Patch
from headscope.plan import Plan
from headscope.repair import Repair, without
from headscope.study import Study, batches

if TYPE_CHECKING:
    from headscope.request import Request


@dataclass(frozen=True)
class Verdict:
    """How the whole model does, the one without a plan's heads, and that one with its `repair`, where there is one.

    Divergences are from the whole model, in `unit`. `increase` is that of the loss from the whole to the final model,
    with its interval over examples; None without labels.
    """

    whole: Quality
    pruned: Quality
    repaired: Quality | None = None
    repair: Repair | None = None
    increase: Interval | None = None
    unit: str = "nats"
    notes: tuple[str, ...] = ()

    @property
    def final(self) -> Quality:
        """The model as it will be written."""
        return self.repaired or self.pruned


class Trials:
    """Judges a model with some of its heads gated to 0 against the whole model; with a mender, as it repairs it.

    `standing` are other weights of every smaller model (merged heads).
    """

    def __init__(
        self, study: Study, metric: str | None, mender: Mender | None = None, *, standing: Sequence[Patch] = ()
    ) -> None:
        self.study, self.metric, self.mender, self.standing = study, metric, mender, standing
        loaded = study.loaded
        self.objective = Objective(loaded.model, loaded.task, study.sites)
        self.batches = batches(study)

    @property
    def unit(self) -> str:
        """The unit of divergences."""
        return "1 - cos" if self.study.loaded.task.distribution is Distribution.DIRECTION else "nats"

    @cached_property
    def whole(self) -> Judgement:
        """How the whole model does."""
        return self._judge([self._whole])[0]

    def judged(self, plan: Plan) -> Verdict:
        """What the whole model and the one without the plan's heads score, side by side."""
        repair = None if self.mender is None else self.mender.repair(plan)
        runs = [self._whole, self._less(plan)] + ([] if repair is None else [self._mended(plan)])
        whole, less, *mended = self._judge(runs)
        final = mended[0] if mended else less
        return Verdict(
            whole=_quality(whole),
            pruned=_quality(less),
            repaired=_quality(final) if mended else None,
            repair=repair,
            increase=_increase(whole, final, seed=self.study.options.seed),
            unit=self.unit,
            notes=tuple(whole.remarks(self.metric)),
        )

    def compared(self, plans: Sequence[Plan]) -> list[Quality]:
        """What the whole model scores, and the one without each plan's heads, unrepaired: one pass over the examples.

        The whole model comes first.
        """
        return [_quality(found) for found in self._judge([self._whole, *map(self._less, plans)])]

    def bears(self, plan: Plan, request: Request) -> bool:
        """Whether what is lost, after the repair, stays within the request's limit."""
        self.require(request)
        found = self._judge([self._less(plan) if self.mender is None else self._mended(plan)])[0]
        if request.max_loss_increase is not None:
            assert self.whole.loss is not None and found.loss is not None, "labels are required"
            return found.loss - self.whole.loss <= request.max_loss_increase
        assert request.keep_metric is not None and self.whole.measure is not None and self.whole.metric is not None
        return found.metric is not None and self.whole.measure.kept(
            found.metric, self.whole.metric, request.keep_metric
        )

    def require(self, request: Request) -> None:
        """Refuse a limit, if there is one, on what these examples cannot tell.

        Raises:
            UsageError: they have no labels, or there is no metric of which a share could be kept.
        """
        if request.max_loss_increase is not None and self.whole.loss is None:
            raise UsageError("--max-loss-increase needs labels, and the data has none for this model")
        if request.keep_metric is None:
            return
        measure, value = self.whole.measure, self.whole.metric
        if measure is None or value is None:
            raise UsageError("--keep-metric needs a metric, and this task has none on this data")
        if measure.higher and value <= 0:
            raise UsageError(
                f"the held-out {measure.name} of the whole model is {value:g}, of which --keep-metric keeps no share",
                hint="--metric names another",
            )

    def why_not(self, request: Request) -> str:
        """What the limit was, in words."""
        if request.max_loss_increase is not None:
            return f"the first to go already raises the held-out loss by more than {request.max_loss_increase:g} nats"
        whole, share = self.whole, request.keep_metric
        assert share is not None and whole.measure is not None and whole.metric is not None
        if not whole.measure.higher:
            most = f"{whole.metric / share:g} ({whole.metric:g} / {share:g})"
            return f"the first to go already raises the held-out {whole.metric_name} above {most}"
        return (
            f"the first to go already leaves less than {share:g} of the held-out {whole.metric_name} ({whole.metric:g})"
        )

    def _whole(self, batch: Batch) -> Tensor:
        return self.objective.forward(batch)

    def _less(self, plan: Plan) -> Run:
        """The model without the plan's heads."""
        return self._within(lambda: without(self.study, plan, self.standing))

    def _mended(self, plan: Plan) -> Run:
        """The same with its repair, which is fitted first: not while a batch of other examples runs."""
        mender = self.mender
        assert mender is not None
        mender.repair(plan)
        return self._within(lambda: mender.mended(plan))

    def _within(self, change: Callable[[], AbstractContextManager[None]]) -> Run:
        def run(batch: Batch) -> Tensor:
            with change():
                return self.objective.forward(batch)

        return run

    def _judge(self, runs: Sequence[Run]) -> list[Judgement]:
        loaded = self.study.loaded
        return judge(runs, loaded.task, loaded.task_name, self.batches, metric=self.metric)


def _quality(found: Judgement) -> Quality:
    return Quality(found.loss, found.metric_name, found.metric, found.divergence)


def _increase(whole: Judgement, final: Judgement, *, seed: int) -> Interval | None:
    """By how much the loss rises, with its interval by paired bootstrap."""
    count = len(whole.losses)
    if count < 2:
        return None
    apart = (final.losses - whole.losses).numpy()
    return interval(lambda weights: weights @ apart / count, count, seed=seed)
