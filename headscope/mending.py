"""Mending: plans are repaired by the same examples and settings, one after the other, and judged on those held out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from headscope.evaluation import judge
from headscope.examples import Batch, held_out
from headscope.heads import HeadId
from headscope.least_squares import RIDGES
from headscope.noisy import learned, with_copies
from headscope.objective import Objective
from headscope.original import Original
from headscope.output_weights import Patch
from headscope.plan import Plan
from headscope.repair import SPLIT, Repair, applied, fit, refitted, without
from headscope.study import Study, batches

NOISY = (
    "the model has learned these images by heart (its loss there is less than half of what it expects): "
    "repairs, and auto, go by noisy copies of them too"
)


def divergence(study: Study, plan: Plan) -> float:
    """How far a model without the plan's heads, unrepaired, is from the whole one on the examples that are held out."""
    loaded = study.loaded
    objective = Objective(loaded.model, loaded.task, study.sites)
    assert study.examples is not None
    _, held = held_out(study.examples, study.options.seed, split=SPLIT)

    def less(batch: Batch) -> Tensor:
        with without(study, plan):
            return objective.forward(batch)

    found = judge([objective.forward, less], loaded.task, loaded.task_name, batches(study.on(held)))
    return found[1].divergence


class Mender:
    """Repairs plans by the same examples and settings; the last repair is kept, since it is often asked for twice.

    `standing` are other weights of every smaller model (merged heads). With `noise` it works by the examples and noisy
    copies of each (`noisy`); None: where the model has learned the examples by heart, which is found when first asked.
    """

    def __init__(
        self,
        study: Study,
        *,
        ridges: Sequence[float] = RIDGES,
        dtype: torch.dtype | None = None,
        standing: Sequence[Patch] = (),
        noise: bool | None = False,
    ) -> None:
        self._given, self._noise = study, noise
        self.ridges, self.dtype, self.standing = ridges, dtype, standing
        self._removed: tuple[HeadId, ...] | None = None
        self._tried: Repair | None = None
        self._last: Repair | None = None

    @cached_property
    def noise(self) -> bool:
        """Whether noisy copies are used."""
        return learned(self._given) if self._noise is None else self._noise

    @cached_property
    def study(self) -> Study:
        """The model with the examples, and their copies, that it is repaired by."""
        return with_copies(self._given) if self.noise else self._given

    @cached_property
    def original(self) -> Original:
        """What is known of the whole model on them."""
        return Original(self.study, emphasis=True)

    def on(self, study: Study, *, standing: Sequence[Patch] | None = None) -> Mender:
        """One with the same settings for other examples of the same model, or beside other `standing` weights."""
        beside = self.standing if standing is None else standing
        return Mender(study, ridges=self.ridges, dtype=self.dtype, standing=beside, noise=self.noise)

    def repair(self, plan: Plan) -> Repair | None:
        """The repair of a model without the plan's heads; None where none helps, as where nothing is removed.

        It is accepted by examples that it has not seen, and then fitted to all.
        """
        tried = self._try(plan)
        if tried is None:
            return None
        if self._last is None:
            found = refitted(self.study, plan, tried, dtype=self.dtype, standing=self.standing, original=self.original)
            self._last = replace(found, notes=(NOISY, *found.notes)) if self.noise else found
        return self._last

    def divergence(self, plan: Plan) -> float:
        """How far the repaired model is from the whole one on the examples that the repair holds out."""
        tried = self._try(plan)
        return divergence(self.study, plan) if tried is None else tried.divergence_after

    def _try(self, plan: Plan) -> Repair | None:
        """The repair that has not seen the examples held out; None where it does not help there."""
        if plan.removed != self._removed:
            self._tried = self._last = None
            if plan.removed or self.standing:
                self._tried = fit(
                    self.study,
                    plan,
                    ridges=self.ridges,
                    dtype=self.dtype,
                    standing=self.standing,
                    original=self.original,
                )
            self._removed = plan.removed
        return self._tried

    @contextlib.contextmanager
    def mended(self, plan: Plan) -> Iterator[None]:
        """The model without the plan's heads, by gates of 0, and with its repair, while the block runs."""
        study, repair = self.study, self.repair(plan)
        with contextlib.ExitStack() as stack:
            stack.enter_context(without(study, plan, self.standing))
            if repair is not None:
                stack.enter_context(applied(study.loaded.model, study.sites, repair))
            yield
