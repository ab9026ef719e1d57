"""Trials: what the model loses without some of its heads, judged on held-out examples with gates of 0."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from headscope.capture import gate
from headscope.card import Quality
from headscope.errors import UsageError
from headscope.evaluation import Judgement, judge
from headscope.examples import Batch, Examples
from headscope.objective import Objective
from headscope.plan import Plan
from headscope.study import Study, batches
from headscope.surgery import gates

if TYPE_CHECKING:
    from headscope.selection import Request

HELD_OUT = 4
"""One example in so many is held out where no data of its own is given for judging."""


def held_out(examples: Examples, seed: int) -> tuple[Examples, Examples]:
    """Examples to choose by, and a seeded quarter to judge on; the same for both where there are fewer than four."""
    if len(examples) < HELD_OUT:
        return examples, examples
    order = numpy.random.Generator(numpy.random.Philox([seed, 1])).permutation(len(examples))
    judged = set(order[: len(examples) // HELD_OUT].tolist())
    choosing = tuple(one for place, one in enumerate(examples.items) if place not in judged)
    judging = tuple(one for place, one in enumerate(examples.items) if place in judged)
    return replace(examples, items=choosing), replace(examples, items=judging)


class Trials:
    """Judges a model with some of its heads gated to 0 against the whole model."""

    def __init__(self, study: Study, metric: str | None) -> None:
        self.study, self.metric = study, metric
        loaded = study.loaded
        self.objective = Objective(loaded.model, loaded.task, study.sites)
        self.batches = batches(study)

    @cached_property
    def whole(self) -> Judgement:
        """How the whole model does."""
        return self._judge(None, beside=False)[0]

    def judged(self, plan: Plan) -> tuple[Quality, Quality]:
        """What the whole model and the one without the plan's heads score; divergence is between them."""
        whole, less = self._judge(plan, beside=True)
        return _quality(whole), _quality(less)

    def bears(self, plan: Plan, request: Request) -> bool:
        """Whether what is lost stays within the request's limit."""
        found = self._judge(plan, beside=False)[0]
        if request.max_loss_increase is not None:
            base, loss = self._need_loss(self.whole), self._need_loss(found)
            return loss - base <= request.max_loss_increase
        assert request.keep_metric is not None
        if self.whole.measure is None or self.whole.metric is None:
            raise UsageError("--keep-metric needs a metric, and this task has none on this data")
        return found.metric is not None and self.whole.measure.kept(
            found.metric, self.whole.metric, request.keep_metric
        )

    def why_not(self, request: Request) -> str:
        """What the limit was, in words."""
        if request.max_loss_increase is not None:
            return f"the first to go already raises the held-out loss by more than {request.max_loss_increase:g} nats"
        share = f"{request.keep_metric:g} of the held-out {self.whole.metric_name}"
        return f"the first to go already leaves less than {share} ({self.whole.metric:g})"

    @staticmethod
    def _need_loss(found: Judgement) -> float:
        if found.loss is None:
            raise UsageError("--max-loss-increase needs labels, and the data has none for this model")
        return found.loss

    def _judge(self, plan: Plan | None, *, beside: bool) -> list[Judgement]:
        loaded, sites = self.study.loaded, self.study.sites
        closed = {} if plan is None else gates(sites, plan)

        def less(batch: Batch) -> Tensor:
            with gate(loaded.model, closed, sites):
                return self.objective.forward(batch)

        runs = [self.objective.forward, less] if beside else [less]
        with torch.no_grad():
            return judge(runs, loaded.task, loaded.task_name, self.batches, metric=self.metric)


def _quality(found: Judgement) -> Quality:
    return Quality(found.loss, found.metric_name, found.metric, found.divergence)
