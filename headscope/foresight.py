"""What a dry run of `prune` foresees of the run that would follow: how long the rest of it takes, and its peak memory.

The plan is made as in the run, with all scores and trials that it needs. Counted here is what comes after: the repair,
the judgement, the proof, and the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headscope.estimate import Extent, classes, flops_per_second, judged_bytes, scoring_bytes
from headscope.footprint import METRICS, RANKINGS, most, peak
from headscope.heads import Site
from headscope.inputs import probe_inputs
from headscope.least_squares import RIDGES
from headscope.matrices import total_parameters
from headscope.memory import in_halves
from headscope.mending import Mender
from headscope.objective import Objective
from headscope.offload import home
from headscope.original import ROOM
from headscope.output_moments import drawn
from headscope.prepared import PROOF_EXAMPLES, PROOF_TOKENS
from headscope.pruned import Foresight
from headscope.scores import Need
from headscope.study import Study, batches
from headscope.verify import NEW_TOKENS

WHOLE, PULLED, FITTED, ACCEPTED, JUDGED = 1.0, 2.5, 1.5, 0.75, 1.5
"""Forward passes over a study's examples, as measured on the samples: what the whole model writes; a drawn label pulled
back; a fit, whose runs go on from site to site; the judgement of a quarter by three models; one model's outputs held
against another's.
"""
PROOFS, TEXTS, FINDING = 12, 3, 45
"""Runs in a proof: of its few examples, most in float64; texts that are generated from made-up inputs; and what finding
heads anew takes, in runs on made-up inputs.
"""
BYTES_PER_SECOND = 1e9
"""Bytes that are copied, widened, hashed or written in a second."""
COPIES, SAID = 2, 6
"""Of the weights, while they are written and compared; of outputs, while two models' are compared."""
_LONG = 1.0
"""Seconds after which a run is not repeated to be timed without what only a first run takes."""


def foresee(
    study: Study, judging: Study, mender: Mender | None, *, stored: torch.dtype, merged: bool = False
) -> Foresight:
    """What a pruning takes after its plan is made; the model is whole, and a batch of the data is run to time it.

    `stored` is the number format of the model's files. With `merged`, a pass over the data also seeks maps.
    """
    left = _Left(study, judging, mender, stored)
    return Foresight(left.seconds(merged=merged), left.peak(), left.reloading())


@dataclass(frozen=True)
class _Left:
    """What is left to do: arguments as of `foresee`."""

    study: Study
    judging: Study
    mender: Mender | None
    stored: torch.dtype

    @property
    def model(self) -> PreTrainedModel:
        return self.study.loaded.model

    @property
    def size(self) -> int:
        return total_parameters(self.model)

    def seconds(self, *, merged: bool) -> float:
        """Of everything, but for the start of the process that loads the files anew."""
        model, inputs = self.model, probe_inputs(self.model)
        with torch.no_grad():
            once = _timed(lambda: model(**inputs))
        generated = NEW_TOKENS * TEXTS if model.can_generate() else 0
        seconds = once * (generated + FINDING + PROOFS)
        seconds += self.size * (16 + 6 * self.stored.itemsize) / BYTES_PER_SECOND
        if self.study.examples is None:
            return seconds
        return seconds + self._batch() * self._passes(merged=merged) + self._fitting()

    def _batch(self) -> float:
        """Seconds of one batch of the data."""
        study, cut = self.study, batches(self.study)
        objective, batch = Objective(self.model, study.loaded.task, study.sites), cut[len(cut) // 2]
        with torch.no_grad():
            return _timed(lambda: [float(said.sum()) for _, said in in_halves(objective.forward, batch, [])])

    def _passes(self, *, merged: bool) -> float:
        """Forward passes of a batch."""
        cut, judged = batches(self.study), batches(self.judging)
        middle = Extent.of([cut[len(cut) // 2]])
        passes = PROOFS * min(1.0, PROOF_EXAMPLES * PROOF_TOKENS / middle.padded) + merged * WHOLE * len(cut)
        passes += JUDGED * (2 + (self.mender is not None)) * len(judged)
        if self.mender is not None:
            mending = self.mender.study
            passes += (WHOLE + PULLED * len(drawn(mending)) + 2 * FITTED + ACCEPTED) * len(batches(mending))
        return passes

    def _fitting(self) -> float:
        """Seconds of least squares: products over tokens in two fits, and for each ridge a solution and its error."""
        if self.mender is None:
            return 0.0
        tokens, work = Extent.of(batches(self.mender.study)).padded, 0.0
        for site in _modules(self.study):
            features = site.n_heads * site.d_value + 1
            work += 2 * tokens * 2 * features * (features + site.d_model)
            work += len(RIDGES) * (2 / 3 * features**3 + 4 * features**2 * site.d_model)
        return work / (flops_per_second(home(self.model)) / 2)  # which are of float32, and these are of float64

    def peak(self) -> int:
        """Bytes at the peak: what was taken so far, or what the largest of the stages to come takes.

        What a repair keeps of the whole model stays until the end.
        """
        extra, kept = self.size * self.stored.itemsize * (self.stored != self.model.dtype), 0
        libraries = (RANKINGS, METRICS) if self.judging.examples is not None else ()
        stages = [extra + self._proof(), extra + COPIES * self.size * self.stored.itemsize]
        if self.judging.examples is not None:
            stages.append(judged_bytes(self.judging, Extent.of(batches(self.judging))))
        if self.mender is not None:
            kept = kept_bytes(self.mender.study)
            stages.append(fitting_bytes(self.mender.study))
        return max(most(), peak([self.model], kept + max(stages), *libraries))

    def _proof(self) -> int:
        """Bytes of a copy in float64, and of what it and another say."""
        rows = PROOF_EXAMPLES * PROOF_TOKENS if self.study.loaded.task.vocabulary else 0
        return 8 * self.size + SAID * 8 * rows * classes(self.study)

    def reloading(self) -> int:
        """Bytes of the weights in the process that loads the files anew: as they lie there, and in its own memory."""
        return 2 * self.size * self.stored.itemsize


def kept_bytes(study: Study, times: int = 1) -> int:
    """Bytes of what a repair keeps of the whole model on a study's examples, or on so many times as many."""
    return min(ROOM, times * Extent.of(batches(study)).padded * _streams(study, _modules(study)))


def fitting_bytes(study: Study, times: int = 1) -> int:
    """Bytes that a repair takes beside that while it is fitted: runs to go on from, and pulls through one batch."""
    extent = Extent.of(batches(study))
    going_on = times * extent.padded * _streams(study, [*_modules(study), study.sites[0]])
    return min(ROOM, going_on) + scoring_bytes(study, extent, {Need.SAMPLED})


def _streams(study: Study, sites: Sequence[Site]) -> int:
    """Bytes of what these write for a token; of several stacks each sees a part of the tokens."""
    stacks = len({site.id.stack for site in sites})
    return sum(site.d_model for site in sites) * study.loaded.model.dtype.itemsize // stacks


def _modules(study: Study) -> list[Site]:
    """One site of each output projection."""
    return [site for site in study.sites if not site.call]


def _timed(run: Callable[[], object]) -> float:
    """Seconds of a run that is not the first, unless that was long."""
    took = 0.0
    for _ in range(2):
        start = time.perf_counter()
        run()
        took = time.perf_counter() - start
        if took > _LONG:
            break
    return took
