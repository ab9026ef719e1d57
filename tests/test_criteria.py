"""A criterion gives every head one score, the right column of the right measure; `auto` depends on labels alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import SAMPLES, TEST_FILES
from torch import Tensor

from headscope import registry
from headscope.criteria import Criterion, choose_criterion, load_criterion
from headscope.data import DataOptions
from headscope.errors import UsageError
from headscope.heads import AttentionKind, HeadId, Site, SiteId
from headscope.models import LoadOptions
from headscope.scores import LABELS
from headscope.study import Scores, Study, StudyOptions, load_scores

NAMES = registry.names("criteria")
CRITERIA = {name: load_criterion(name) for name in NAMES}


def site(layer: int, numbers: tuple[int, ...]) -> Site:
    return Site(
        SiteId("encoder", AttentionKind.SELF, layer), "layer", "Attention", "o", (), 2, 0,
        n_heads=len(numbers), n_kv_heads=len(numbers), d_head=2, d_value=2, d_model=8, numbers=numbers,
    )  # fmt: skip


class FakeStudy:
    """A study that has been pruned before, with made-up columns."""

    sites = (site(0, (0, 2)), site(1, (1, 5, 7)))

    def __init__(self) -> None:
        self.asked: list[str] = []

    def scores(self, measures: list[str]) -> Scores:
        self.asked += measures
        columns = [column.name for score in load_scores(measures).values() for column in score.columns]
        values: dict[str, dict[SiteId, Tensor]] = {
            name: {
                one.id: torch.arange(one.n_heads, dtype=torch.float64) + 10 * one.id.layer + 100 * number
                for one in self.sites
            }
            for number, name in enumerate(columns)
        }
        return Scores(tuple(measures), values)


def study(*, limit: int = 6, labelled: bool = True) -> Study:
    name = "vit-digits"
    options = StudyOptions(LoadOptions(dtype="float64"), DataOptions(limit=limit), steps=5)
    data = str(SAMPLES / name / TEST_FILES[name]) if labelled else None
    return Study.open(str(SAMPLES / name), data, options)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_a_criterion(name: str) -> None:
    criterion = CRITERIA[name]
    assert isinstance(criterion, Criterion)
    assert criterion.title == name and criterion.meaning
    assert criterion.needs_data or not criterion.needs_labels


@pytest.mark.parametrize(
    ("name", "measure", "column"),
    [("importance", "importance", 0), ("fisher", "importance", 5), ("sensitivity", "sensitivity", 0),
     ("effect", "effect", 0)],
)  # fmt: skip
def test_scores_are_a_column_under_original_numbers(name: str, measure: str, column: int) -> None:
    fake = FakeStudy()
    scores = CRITERIA[name].scores(cast(Any, fake), 0)
    assert fake.asked == [measure]
    first, second = fake.sites[0].id, fake.sites[1].id
    labels = [HeadId(first, 0), HeadId(first, 2), HeadId(second, 1), HeadId(second, 5), HeadId(second, 7)]
    assert scores == {head: 100 * column + value for head, value in zip(labels, (0, 1, 10, 11, 12), strict=True)}
    assert all(type(score) is float for score in scores.values())
    assert load_scores([measure])[measure].columns[column].name == name
    assert CRITERIA[name].needs_labels == bool(load_scores([measure])[measure].needs & LABELS)


def test_on_a_real_model_every_head_has_its_score() -> None:
    opened = study()
    scores = {name: CRITERIA[name].scores(opened, 1) for name in NAMES}
    heads = [head for one in opened.sites for head in one.heads]
    for name, found in scores.items():
        assert list(found) == heads, name
    signed = opened.scores(["importance"]).values["gradient_mean"]
    for one in opened.sites:
        for head, gradient in zip(one.heads, signed[one.id].tolist(), strict=True):
            assert scores["effect"][head] == pytest.approx(scores["sensitivity"][head] / 2 - gradient, rel=1e-9)
            assert scores["fisher"][head] >= scores["importance"][head] ** 2 * (1 - 1e-12)


def test_without_data_only_random_can_score() -> None:
    opened = study(labelled=False)
    for name in NAMES:
        if not CRITERIA[name].needs_data:
            assert len(CRITERIA[name].scores(opened, 0)) == 32
        else:
            with pytest.raises(UsageError, match="cannot be measured without data"):
                CRITERIA[name].scores(opened, 0)


def random_order(seed: int, n_heads: int = 10) -> list[int]:
    scores = CRITERIA["random"].scores(cast(Any, SimpleNamespace(sites=[site(0, tuple(range(n_heads)))])), seed)
    return [head.index for head in sorted(scores, key=scores.__getitem__)]


def test_random_is_a_permutation_that_the_seed_fixes() -> None:
    assert random_order(3) == random_order(3)
    assert sorted(random_order(3)) == list(range(10))
    assert len({tuple(random_order(seed)) for seed in range(20)}) == 20
    assert random_order(-1) == random_order(2**128 - 1)


def test_random_is_the_same_on_every_platform() -> None:
    assert random_order(0) == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]


def test_random_favours_no_head() -> None:
    """Each of 5 heads goes first in 400 of 2,000 orders, give or take 5 standard deviations."""
    first = [random_order(seed, 5)[0] for seed in range(2000)]
    assert all(abs(first.count(head) - 400) < 5 * (2000 * 0.2 * 0.8) ** 0.5 for head in range(5))


@pytest.mark.parametrize(
    ("name", "labelled", "chosen"),
    [("auto", True, "importance"), ("auto", False, "sensitivity"), ("fisher", False, "fisher"),
     ("random", True, "random")],
)  # fmt: skip
def test_auto_takes_labels_where_there_are_any(name: str, labelled: bool, chosen: str) -> None:
    assert choose_criterion(name, labelled) == chosen


def test_a_misspelt_criterion() -> None:
    with pytest.raises(UsageError, match="no criterion 'importence'") as caught:
        choose_criterion("importence", True)
    assert caught.value.hint is not None and caught.value.hint.startswith("did you mean 'importance'? known: auto, ")
