"""Sampling: unbiased means of many quantities from few costly values each, with cheap guesses as control variates.

The mean of a quantity over all examples is the mean of its guess, which is known for every example, plus the mean of
what the guess misses, which a random subset tells. A pilot shows how much the guesses miss; the other runs go where
that varies most (Neyman 1934), so that the summed squared error is least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.random import Philox
from torch import Tensor

LEAST = 12
"""Runs of each quantity in the pilot: intervals from fewer are too short."""
BLOCK = 4
"""Examples that are run at once for all quantities that still want some."""

Run = Callable[[Sequence[int], Sequence[int]], Tensor]
"""From places of examples and of quantities to the exact values, `[example quantity]`."""


@dataclass(frozen=True)
class Estimate:
    """Means over all examples of several quantities, `[quantity]` each.

    `sampling_error` is the standard error from having run a subset only, `error` also counts that the examples
    themselves are a sample; `runs` are the examples that were run.
    """

    mean: Tensor
    sampling_error: Tensor
    error: Tensor
    runs: Tensor

    def margin(self, error: Tensor, level: float = 0.95) -> Tensor:
        """Half the width of the interval around the mean that covers with probability `level`, by Student's t."""
        from scipy.stats import t

        return error * torch.from_numpy(t.ppf((1 + level) / 2, self.runs.numpy() - 1))


def estimate(guess: Tensor, run: Run, budget: int, *, seed: int) -> Estimate:
    """Means over all examples from at most `budget` runs a quantity, on average; `guess` is `[example quantity]`.

    Subsets of all quantities are heads of one random order of the examples, so that runs can share what they share and
    differences between quantities are told better than the quantities. The pilot decides only how long each subset is.
    """
    examples, quantities = guess.shape
    order = numpy.argsort(Philox(key=seed % 2**128).random_raw(examples), kind="stable")
    values = torch.full_like(guess, torch.nan)
    pilot = min(LEAST, examples)

    def fill(start: int, stop: int, wanted: Tensor) -> None:
        rows, columns = order[start:stop].tolist(), wanted.nonzero()[:, 0].tolist()
        if rows and columns:
            values[torch.tensor(rows)[:, None], torch.tensor(columns)] = run(rows, columns).to(values)

    fill(0, pilot, torch.ones(quantities, dtype=torch.bool))
    runs = shares(_spread(values - guess), pilot, budget, examples)
    for start in range(pilot, examples, BLOCK):
        fill(start, start + BLOCK, runs > start)
    missed = values - guess
    runs = values.isfinite().sum(dim=0)
    left = (1 - runs / examples).clamp_min(0)
    sampling = _spread(missed) * (left / runs).sqrt()
    return Estimate(
        mean=guess.mean(dim=0) + missed.nanmean(dim=0),
        sampling_error=sampling,
        error=(sampling.square() + _spread(values).square() / examples).sqrt(),
        runs=runs,
    )


def shares(spread: Tensor, pilot: int, budget: int, examples: int) -> Tensor:
    """How many examples each quantity is run on, `[quantity]`: in proportion to its spread, whole blocks behind the
    pilot, no more than there are, and together at most `budget` times the number of quantities.
    """

    def counts(scale: float) -> Tensor:
        blocks = ((spread * scale - pilot) / BLOCK + 0.5).floor().clamp(0, examples)
        return (pilot + BLOCK * blocks.long()).clamp_max(examples)

    low, high = 0.0, examples / max(float(spread[spread > 0].min()), 1e-300) + 1 if bool((spread > 0).any()) else 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if int(counts(middle).sum()) <= budget * len(spread):
            low = middle
        else:
            high = middle
    return counts(low)


def _spread(values: Tensor) -> Tensor:
    """Standard deviation of each column over its finite rows, `[quantity]`; NaN for a single row."""
    finite = values.isfinite()
    count = finite.sum(dim=0)
    gaps = torch.where(finite, values - values.nanmean(dim=0), 0.0)
    return torch.where(count > 1, (gaps.square().sum(dim=0) / (count - 1).clamp_min(1)).sqrt(), torch.nan)
