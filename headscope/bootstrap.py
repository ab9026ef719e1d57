"""Paired bootstrap: how far the difference of two models on the same examples could be due to these examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy

from headscope.metrics import Array

RESAMPLES = 4000
_HELD = 2**22
"""Weights held at once, as numbers: 32 MiB."""


@dataclass(frozen=True)
class Interval:
    """A difference and its 95 % interval: the 2.5 and 97.5 % quantiles over resampled examples."""

    difference: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.difference:+.4g} ({self.low:+.4g} to {self.high:+.4g})"


def interval(difference: Callable[[Array], Array], count: int, *, seed: int) -> Interval:
    """The 95 % interval of a difference between two models over `count` examples that both have seen.

    `difference` takes weights `[resample example]`, which say how often each example is drawn, and gives `[resample]`.
    Both models are weighted alike, so what is hard for both cancels.
    """
    generator = numpy.random.Generator(numpy.random.Philox(seed))
    found: list[Array] = []
    step = max(1, min(RESAMPLES, _HELD // count))
    for start in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - start)
        drawn = generator.integers(count, size=(size, count)) + count * numpy.arange(size)[:, None]
        weights = numpy.bincount(drawn.ravel(), minlength=size * count).reshape(size, count)
        found.append(difference(weights.astype(numpy.float64)))
    low, high = numpy.nanquantile(numpy.concatenate(found), [0.025, 0.975])
    return Interval(float(difference(numpy.ones((1, count)))[0]), float(low), float(high))
