"""Reconstruction as criterion: heads go first whose outputs the heads that stay, repaired, can still put together.

An error costs what the loss changes by, to second order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headscope.criteria import Block, Criterion, one_by_one
from headscope.heads import HeadId
from headscope.output_moments import weighting_of
from headscope.reconstruct import by
from headscope.study import Study


def greedy(study: Study, seed: int, blocks: Sequence[Block]) -> Mapping[HeadId, float]:
    """By the task's loss where there are labels, else by labels drawn from the prediction."""
    return by(study, blocks, weighting=weighting_of(study))


CRITERION = Criterion(
    title="reconstruction",
    meaning="heads go first whose outputs the others can make up for when the output projections are fitted anew",
    needs_labels=False,
    needs_data=True,
    scores=one_by_one(greedy),
    greedy=greedy,
    cheap=True,
)
