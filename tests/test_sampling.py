"""Estimates from few exact runs are unbiased, their intervals cover, and runs go where guesses miss most."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from conftest import SAMPLES, TEST_FILES
from torch import Tensor
from torch.testing import assert_close

from headscope import ablated
from headscope.data import DataOptions
from headscope.models import LoadOptions
from headscope.objective import Objective
from headscope.sampling import LEAST, Estimate, estimate, shares
from headscope.study import Study, StudyOptions, batches

EXAMPLES, SEEDS = 80, 100


def table(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Guesses and exact values `[example quantity]`; what is missed is skewed and has spreads from 0 to 10."""
    generator = torch.Generator().manual_seed(seed)
    guess = torch.randn(EXAMPLES, 8, generator=generator, dtype=torch.float64) * 3
    missed = torch.rand(EXAMPLES, 8, generator=generator, dtype=torch.float64).log().neg()
    return guess, guess + missed * torch.tensor([0, 0.1, 0.1, 0.2, 0.5, 1, 3, 10], dtype=torch.float64)


class Lookup:
    """Exact values from a table, with a count of what was asked for."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.asked = values, torch.zeros_like(values)

    def __call__(self, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        places = torch.tensor(rows)[:, None], torch.tensor(columns)
        self.asked[places] += 1
        return self.values[places]


def many(guess: Tensor, values: Tensor, budget: int, seeds: int = SEEDS) -> list[Estimate]:
    return [estimate(guess, Lookup(values), budget, seed=seed) for seed in range(seeds)]


def covered(found: Sequence[Estimate], truth: Tensor) -> Tensor:
    """Share of the 95 % intervals that hold the truth, `[quantity]`."""
    inside = [(one.mean - truth).abs() <= one.margin(one.sampling_error) + 1e-9 for one in found]
    return torch.stack(inside).double().mean(dim=0)


def test_means_are_unbiased_and_intervals_cover() -> None:
    guess, values = table()
    truth, found = values.mean(dim=0), many(guess, values, 24)
    errors = torch.stack([one.mean for one in found]) - truth
    spread = errors.std(dim=0)
    assert bool((errors.mean(dim=0).abs() <= 0.2 * spread + 1e-9).all())
    assert bool((covered(found, truth) >= 0.85).all()) and float(covered(found, truth).mean()) >= 0.92
    claimed = torch.stack([one.sampling_error for one in found]).square().mean(dim=0).sqrt()
    assert_close(claimed[3:], spread[3:], rtol=0.25, atol=0)
    assert float(spread[0]) < 1e-12  # a perfect guess


def test_runs_go_where_guesses_miss_most_and_none_twice() -> None:
    guess, values = table()
    lookup = Lookup(values)
    found = estimate(guess, lookup, 30, seed=3)
    assert_close(lookup.asked.sum(dim=0).long(), found.runs)
    assert float(lookup.asked.max()) == 1
    assert int(found.runs.sum()) <= 30 * 8 < int(found.runs.sum()) + 8 * 5
    assert found.runs[:5].max() < found.runs[6] < found.runs[7]
    assert int(found.runs[0]) == LEAST and int(found.runs[-1]) == EXAMPLES
    assert_close(found.mean[-1], values[:, -1].mean())  # all examples: exact
    assert float(found.sampling_error[-1]) == 0
    assert_close(found.error[-1], values[:, -1].std() / EXAMPLES**0.5)


def test_fewer_runs_than_plain_means_at_equal_error() -> None:
    guess, values = table()
    truth = values.mean(dim=0)
    plain = torch.zeros_like(values)
    squares = [
        sum(float((one.mean - truth).square().sum()) for one in many(first, values, 24, 30)) for first in (guess, plain)
    ]
    assert squares[0] < squares[1] / 4


@pytest.mark.parametrize("spread", [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1e-9, 5.0], [1e300, 1.0, 0.0]])
def test_shares_keep_the_budget(spread: list[float]) -> None:
    counts = shares(torch.tensor(spread, dtype=torch.float64), LEAST, 20, 50)
    assert int(counts.sum()) <= 60
    assert int(counts.min()) >= LEAST and int(counts.max()) <= 50
    if spread == [1.0, 1.0, 1.0]:
        assert counts.tolist() == [20, 20, 20]


def test_a_seed_decides_the_subset() -> None:
    guess, values = table()
    first, again, other = (estimate(guess, Lookup(values), 20, seed=seed).mean for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first[1:7], other[1:7])


@pytest.mark.parametrize(
    ("name", "length", "worth"),
    [("vit-digits", None, 2.0), pytest.param("sentiment-minilm", 8, 3.0, marks=pytest.mark.slow)],
)
def test_on_a_real_classifier(name: str, length: int | None, worth: float) -> None:
    """Intervals cover, no bias, fewer runs than plain means, and the command's numbers are those of the tables."""
    folder = SAMPLES / name
    data = DataOptions(limit=40, max_length=length)
    study = Study.open(str(folder), str(folder / TEST_FILES[name]), StudyOptions(LoadOptions(dtype="float32"), data))
    assert study.examples is not None
    groups = [[head] for site in study.sites[:2] for head in site.heads]
    removals = ablated.removals_of(groups, study.sites)
    changes = study.ablate(groups).changes
    values = torch.stack([changes[item.number] for item in study.examples.items])
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    bench = ablated.Bench(objective, study.examples.items, lambda some: batches(study, some))
    guess = ablated._guesses(bench, removals)
    sampled = ablated.sampled(bench, removals, 16, seed=5)
    wanted = estimate(guess, Lookup(values), 16, seed=5)
    assert_close(sampled.change, wanted.mean, rtol=0, atol=2e-5)
    assert_close(sampled.error, wanted.error, rtol=1e-2, atol=1e-6)
    found, plain = (many(first, values, 16, 30) for first in (guess, torch.zeros_like(guess)))
    truth = values.mean(dim=0)
    assert float(covered(found, truth).mean()) >= 0.9
    errors, others = (torch.stack([one.mean for one in some]) - truth for some in (found, plain))
    squares = errors.square().mean(dim=0).sum()
    assert errors.mean(dim=0).square().sum() < 0.08 * squares  # noise alone is 1 / 30
    assert others.square().mean(dim=0).sum() > worth * squares
