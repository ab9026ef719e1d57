"""Sampling: unbiased means of many quantities from few costly values each, with cheap guesses as control variates.

The mean of a quantity over all examples is the mean of its guess, which is known for every example, plus the mean of
what the guess misses, which a random subset tells. A pilot shows how much the guesses miss; the other runs go where
that varies most (Neyman 1934), so that the summed squared error is small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.random import Philox
from torch import Tensor

LEAST = 12
"""Runs of each quantity in the two pilots: intervals from fewer are too short."""
BLOCK = 2
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

    One random order serves all quantities, so that runs share what they can and differences between quantities are
    told better than the quantities. It is dealt into two streams, each with a pilot: how far a quantity follows one
    stream is decided by the pilot of the other, so that no mean depends on its own length and none is biased.
    """
    examples, quantities = guess.shape
    order = numpy.argsort(Philox(key=seed % 2**128).random_raw(examples), kind="stable")
    streams = [torch.from_numpy(order[first::2].copy()) for first in (0, 1)]
    values = torch.full_like(guess, torch.nan)
    half = LEAST // 2

    def fill(rows: Tensor, wanted: Tensor) -> None:
        columns = wanted.nonzero()[:, 0]
        if len(rows) and len(columns):
            values[rows[:, None], columns] = run(rows.tolist(), columns.tolist()).to(values)

    fill(torch.cat([stream[:half] for stream in streams]), torch.ones(quantities, dtype=torch.bool))
    pilots = [_spread((values - guess)[stream[:half]], guess[stream[:half]], guess) for stream in streams]
    mean, squared = guess.mean(dim=0), torch.zeros(quantities, dtype=guess.dtype)
    for stream, other in zip(streams, reversed(pilots), strict=True):
        counts = shares(other, half, budget // 2, len(stream))
        for start in range(half, int(counts.max()), BLOCK):
            fill(stream[start : start + BLOCK], counts > start)
        share = len(stream) / examples
        mean = mean + share * (values - guess)[stream].nanmean(dim=0)
        squared = squared + share**2 * (1 - counts / len(stream)) / counts
    seen = torch.where(values.isfinite(), guess, torch.nan)
    sampling = _spread(values - guess, seen, guess) * squared.clamp_min(0).sqrt()
    error = (sampling.square() + _deviation(values).square() / examples).sqrt()
    return Estimate(mean, sampling, error, values.isfinite().sum(dim=0))


def shares(spread: Tensor, pilot: int, budget: int, examples: int) -> Tensor:
    """How many examples each quantity is run on, `[quantity]`: in proportion to its spread, whole blocks behind the
    pilot, no more than there are, and together at most `budget` times the number of quantities.
    """

    wide = spread.numpy()

    def counts(scale: float) -> numpy.ndarray:
        blocks = numpy.floor((wide * scale - pilot) / BLOCK + 0.5).clip(0, examples)
        return (pilot + BLOCK * blocks.astype(numpy.int64)).clip(max=examples)

    low, high = 0.0, examples / max(float(wide[wide > 0].min()), 1e-300) + 1 if bool((wide > 0).any()) else 1.0
    for _ in range(64):
        middle = (low + high) / 2
        if int(counts(middle).sum()) <= budget * len(wide):
            low = middle
        else:
            high = middle
    return torch.from_numpy(counts(low))


def _spread(missed: Tensor, seen: Tensor, guess: Tensor) -> Tensor:
    """Standard deviation of what guesses miss, `[quantity]`, not too small where the subset was a tame one.

    Large guesses miss most. Where the guesses `seen` in the subset are smaller than all are, in mean square, the
    deviation is scaled up by their ratio (a ratio estimate of the variance); never down.
    """
    ratio = guess.square().mean(dim=0) / seen.square().nanmean(dim=0)
    return _deviation(missed) * ratio.nan_to_num(1.0, posinf=1.0).clamp_min(1).sqrt()


def _deviation(values: Tensor) -> Tensor:
    """Standard deviation of each column over its finite rows, two or more, `[quantity]`."""
    finite = values.isfinite()
    gaps = torch.where(finite, values - values.nanmean(dim=0), 0.0)
    return (gaps.square().sum(dim=0) / (finite.sum(dim=0) - 1)).sqrt()
