"""Reconstruction by the Fisher information: as `reconstruction`, but an error costs the divergence that it causes.

The gradients are those of random scores for the model's own prediction, so that neither labels nor a loss that is
learned by heart say what matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headscope.criteria import Block, Criterion, one_by_one
from headscope.heads import HeadId
from headscope.output_moments import Weighting
from headscope.reconstruct import by
from headscope.study import Study


def greedy(study: Study, seed: int, blocks: Sequence[Block]) -> Mapping[HeadId, float]:
    """By scores drawn for the prediction."""
    return by(study, blocks, weighting=Weighting.SENSITIVITY)


CRITERION = Criterion(
    title="reconstruction-fisher",
    meaning="as reconstruction, errors being weighed by the divergence that they cause instead of the loss",
    needs_labels=False,
    needs_data=True,
    scores=one_by_one(greedy),
    greedy=greedy,
    cheap=True,
)
