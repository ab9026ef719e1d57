"""Noisy copies of images, for models that have learned the examples by heart.

Of such an example the outputs say little: hardly a change of the heads shows there, and least squares fit what new
examples do not need. Noise on the inputs holds a fit back as a ridge does (Bishop 1995, Training with noise is
equivalent to Tikhonov regularization), but along the ways in which the whole model passes it on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from headscope.examples import Example
from headscope.losses import Distribution, losses
from headscope.objective import Objective
from headscope.study import Study, batches

MARGIN = 0.5
"""Examples count as learned where their mean loss is less than this share of the predictions' mean entropy: of new ones
both are about the same (a model that knows how sure it may be is right as often as it says)."""
COPIES = 7
"""Noisy copies of each example, beside itself, at most."""
ROOM = 1024
"""Examples and copies, about; each example has one copy at least."""
STRENGTH = 0.5
"""Standard deviation of the noise, in those of the example's own values."""


def learned(study: Study) -> bool:
    """Whether a model that reads images and predicts classes is far better at a study's examples than it believes."""
    loaded, kind = study.loaded, study.loaded.task.distribution
    assert study.examples is not None
    if loaded.task.reads != "images" or kind is not Distribution.CATEGORICAL or not study.examples.labelled:
        return False
    objective = Objective(loaded.model, loaded.task, study.sites)
    lost = uncertain = 0.0
    with torch.no_grad():
        for batch in batches(study):
            rows = objective.forward(batch).cpu().double()
            logs = rows.log_softmax(dim=-1)
            lost += float(losses(rows, batch.targets[batch.predicted], kind).sum())
            uncertain -= float((logs.exp() * logs).sum())
    return lost < MARGIN * uncertain


def with_copies(study: Study) -> Study:
    """The study on its examples and noisy copies of each, drawn by seed and number; labels, and inputs that are whole
    numbers, are as they were. Copies go where their example goes when some are held out.
    """
    assert study.examples is not None
    items = study.examples.items
    copies = copies_of(len(items))
    step = 1 + max((one.number for one in items), default=0)
    drawn = [_copy(one, one.number + step * copy, study.options.seed) for copy in range(1, copies + 1) for one in items]
    return study.on(replace(study.examples, items=(*items, *drawn)))


def copies_of(examples: int) -> int:
    """How many noisy copies each of so many examples has."""
    return max(1, min(COPIES, ROOM // max(1, examples) - 1))


def _copy(example: Example, number: int, seed: int) -> Example:
    generator = numpy.random.Generator(numpy.random.Philox([seed, number]))
    inputs = {name: _noisy(value, generator) for name, value in example.inputs.items()}
    return replace(example, number=number, inputs=inputs, drawn_from=example.number)


def _noisy(value: Any, generator: numpy.random.Generator) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    noise = torch.from_numpy(generator.standard_normal(tuple(value.shape))).to(value.dtype)
    return value + noise * (STRENGTH * value.double().std(correction=0).to(value.dtype))
