"""Metrics have the values worked by hand, weigh resampled examples as if they were there again, and fit their task."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope import registry
from headscope.bootstrap import interval
from headscope.errors import UsageError
from headscope.examples import IGNORED, Batch
from headscope.metrics import (
    ACCURACY,
    EXACT_MATCH,
    F1,
    LABEL_F1,
    METRICS,
    MSE,
    PEARSON,
    PERPLEXITY,
    R2,
    TOKEN_ACCURACY,
    Metric,
    Predictions,
    choose_metric,
)


def predictions(pairs: list[list[tuple[Any, Any]]], losses: list[float] | None = None) -> Predictions:
    """One list of (prediction, target) an example; `losses` are those of all positions."""
    rows = [(place, *pair) for place, example in enumerate(pairs) for pair in example]
    example, said, right = (numpy.array(column) for column in zip(*rows, strict=True))
    gap = (said - right) ** 2 if losses is None else numpy.array(losses)
    return Predictions(example, said, right, gap.astype(float), len(pairs))


SINGLE = predictions([[(0, 0)], [(1, 0)], [(1, 1)], [(2, 1)], [(0, 2)]])
TAGS = predictions([[(1, 1), (2, 2), (0, 1)], [(3, 3)], [(1, 2), (2, 2)]])
FLAGS = predictions([[(1, 1), (0, 0), (0, 1)], [(1, 0), (0, 0), (1, 1)], [(0, 0), (0, 0), (1, 0)]])
NUMBERS = predictions([[(1.0, 0.0)], [(2.0, 3.0)], [(3.0, 3.0)], [(6.0, 6.0)]])
TOKENS = predictions([[(1, 1)], [(1, 2), (3, 3), (4, 5)]], [math.log(2), math.log(4), math.log(4), math.log(8)])

BY_HAND = [
    (ACCURACY, SINGLE, 2 / 5),
    (TOKEN_ACCURACY, TAGS, 4 / 6),
    (EXACT_MATCH, TAGS, 1 / 3),
    (EXACT_MATCH, SINGLE, 2 / 5),
    # class 0: said 2, right 2, hit 1; class 1: said 2, right 2, hit 1; class 2: said 1, right 1, hit 0
    (F1, SINGLE, (2 / 4 + 2 / 4 + 0) / 3),
    # class 0: said 1, never right; 1: said 2, right 2, hit 1; 2: said 2, right 3, hit 2; 3: said 1, right 1, hit 1
    (F1, TAGS, (0 / 1 + 2 * 1 / (2 + 2) + 2 * 2 / (2 + 3) + 2 * 1 / (1 + 1)) / 4),
    # label 0: said 2, holds 1, hit 1; label 1: never, so it does not count; label 2: said 2, holds 2, hit 1
    (LABEL_F1, FLAGS, (2 * 1 / 3 + 2 * 1 / 4) / 2),
    (PERPLEXITY, TOKENS, 2 ** ((1 + 2 + 2 + 3) / 4)),
    (MSE, NUMBERS, (1 + 1 + 0 + 0) / 4),
    (R2, NUMBERS, 1 - 2 / (9 + 0 + 0 + 9)),
    # deviations of the said 1, 2, 3, 6: -2, -1, 0, 3; of the right 0, 3, 3, 6: -3, 0, 0, 3
    (PEARSON, NUMBERS, (6 + 9) / math.sqrt(14 * 18)),
]


@pytest.mark.parametrize(("metric", "said", "wanted"), BY_HAND, ids=lambda value: getattr(value, "name", ""))
def test_values_worked_by_hand(metric: Metric, said: Predictions, wanted: float) -> None:
    assert metric.value(said) == pytest.approx(wanted, rel=1e-12)


CLASSES = st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4), min_size=2)
VALUES = st.lists(
    st.lists(st.tuples(*[st.integers(-50, 50).map(lambda n: n / 7)] * 2), min_size=1, max_size=1), min_size=3
)
LABELS = st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=3, max_size=3), min_size=2)
DRAWN = {metric.name + metric.meaning: (metric, CLASSES) for metric in (ACCURACY, EXACT_MATCH, F1, PERPLEXITY)}
DRAWN |= {"labels": (LABEL_F1, LABELS)} | {metric.name: (metric, VALUES) for metric in (PEARSON, R2, MSE)}


@pytest.mark.parametrize("name", DRAWN)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_weight_of_two_is_an_example_seen_twice(name: str, data: st.DataObject) -> None:
    metric, strategy = DRAWN[name]
    pairs = data.draw(strategy)
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(pairs), max_size=len(pairs)).filter(any))
    repeated = [pair for pair, count in zip(pairs, counts, strict=True) for _ in range(count)]
    wanted = metric.value(predictions(repeated))
    (found,) = metric.resampled(predictions(pairs), numpy.array([counts], dtype=float))
    assert (wanted is None and not numpy.isfinite(found)) or found == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", DRAWN)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sums_and_scikit_learn_agree(name: str, data: st.DataObject) -> None:
    metric, strategy = DRAWN[name]
    said = predictions(data.draw(strategy))
    (sums,) = metric.resampled(said, numpy.ones((1, said.count)))
    if metric.library is not None and numpy.isfinite(sums):
        assert metric.library(said) == pytest.approx(sums, rel=1e-9, abs=1e-12)


def test_what_is_not_defined_is_none() -> None:
    constant = predictions([[(0.1, 0.1)], [(0.1, 0.7)], [(0.1, 0.4)]])
    assert PEARSON.value(constant) is None
    assert R2.value(predictions([[(0.3, 0.1)], [(0.2, 0.1)], [(0.1, 0.1)]])) is None
    assert LABEL_F1.value(predictions([[(0, 0), (0, 0)], [(0, 0), (0, 0)]])) is None
    assert R2.value(constant) is not None
    spread = predictions([[(place / 7, place / 3)] for place in range(20)])
    alone = 3.0 * numpy.eye(20)  # one example drawn three times: a constant, but for rounding
    assert numpy.isnan(PEARSON.resampled(spread, alone)).all() and numpy.isnan(R2.resampled(spread, alone)).all()


def test_what_keeps_a_share() -> None:
    assert ACCURACY.kept(0.891, 0.9, 0.99) and not ACCURACY.kept(0.890, 0.9, 0.99)
    assert PERPLEXITY.kept(30.3, 30.0, 0.99) and not PERPLEXITY.kept(30.4, 30.0, 0.99)
    assert [name for name, metric in METRICS.items() if not metric.higher] == ["perplexity", "mse"]


def batch(targets: Any, *, labelled: bool = True) -> Batch:
    targets = torch.tensor(targets)
    return Batch({}, targets, tuple(range(len(targets))), (1,) * len(targets), labelled)


def chosen(task: str, targets: Any, name: str | None = None, **options: Any) -> Metric | None:
    return choose_metric(name, registry.load("tasks", task, "TASK"), task, [batch(targets, **options)])


def test_each_task_has_its_own_metric() -> None:
    even, skewed = [[0], [1], [2], [1]], [[0]] * 9 + [[1]] * 2
    assert chosen("text-classification", even) is ACCURACY
    assert chosen("image-classification", [[0]] * 8 + [[1]] * 2) is ACCURACY  # 80 % is not more than 80 %
    assert chosen("text-classification", skewed) is F1
    assert chosen("text-classification", [[0, 1, 1]]) is LABEL_F1
    assert chosen("token-classification", [[0, 1, 2, IGNORED]]) is TOKEN_ACCURACY
    assert chosen("token-classification", [[0, 0, 0, 0, 0, 1], [IGNORED] * 6]) is F1
    assert chosen("causal-lm", [[3, 4]]) is chosen("masked-lm", [[3, IGNORED]]) is PERPLEXITY
    assert chosen("seq2seq-lm", [[3, 4]]) is TOKEN_ACCURACY
    assert chosen("question-answering", [[3, 4]]) is EXACT_MATCH
    assert chosen("regression", [[0.5]]) is PEARSON
    assert chosen("embedding", [[0]], labelled=False) is None
    assert chosen("text-classification", even, labelled=False) is None
    assert chosen("regression", [[0.5]], "mse") is MSE
    assert chosen("seq2seq-lm", [[3, 4]], "exact-match") is EXACT_MATCH


@pytest.mark.parametrize(
    ("task", "name", "labelled", "parts"),
    [
        ("causal-lm", "perplexty", True, ["no metric 'perplexty'", "did you mean 'perplexity'?"]),
        ("causal-lm", "f1", True, ["f1 does not fit causal-lm", "it has: perplexity, token-accuracy"]),
        ("text-classification", "f1", False, ["f1 needs labels"]),
        ("embedding", "f1", False, ["embedding has no metric, only a divergence"]),
    ],
)
def test_metrics_that_cannot_be_meant(task: str, name: str, labelled: bool, parts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        chosen(task, [[1]], name, labelled=labelled)
    for part in parts:
        assert part in f"{error.value} {error.value.hint}"


def test_intervals_cover_the_true_difference() -> None:
    """95 % intervals of simulated pairs, whose common part is large, miss the truth about one time in twenty."""
    random = numpy.random.default_rng(1)
    trials, count, truth = 200, 120, 0.1
    hits, widths = 0, []
    for trial in range(trials):
        common, own = random.normal(0, 5, count), random.normal(0, 1, (2, count))
        apart = (common + own[0] + truth) - (common + own[1])
        found = interval(lambda weights, apart=apart: weights @ apart / count, count, seed=trial)
        assert found.difference == pytest.approx(apart.mean(), rel=1e-12)
        hits += found.low <= truth <= found.high
        widths.append(found.high - found.low)
    assert 0.90 <= hits / trials <= 0.985
    assert numpy.mean(widths) == pytest.approx(2 * 1.96 * math.sqrt(2 / count), rel=0.05)  # the common part cancels


def test_intervals_are_seeded_and_do_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = numpy.random.default_rng(0).normal(size=50)
    found = [interval(lambda weights: weights @ apart / 50, 50, seed=seed) for seed in (3, 3, 4)]
    assert found[0] == found[1] != found[2]
    monkeypatch.setattr("headscope.bootstrap._HELD", 50 * 7)
    assert interval(lambda weights: weights @ apart / 50, 50, seed=3) == found[0]
    assert str(found[0]).startswith(f"{apart.mean():+.4g} (")
