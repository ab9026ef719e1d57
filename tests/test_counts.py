"""Numbers of heads follow the ratio as it is written, and rounds are whole numbers that end where asked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headscope.counts import ratio_of, round_counts, wanted_count
from headscope.errors import InvalidPlan
from headscope.heads import AttentionKind, SiteId
from headscope.plan import SiteHeads


def sites(*sizes: int) -> list[SiteHeads]:
    return [
        SiteHeads(SiteId("encoder", AttentionKind.SELF, layer), tuple((number,) for number in range(size)))
        for layer, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("ratio", "n_heads", "count"),
    [(0.35, 10, 4), (0.145, 100, 15), (0.3, 5, 2), (0.5, 3, 2), (0.999, 4, 4), (0.3, 36, 11), (1e-05, 100_000, 1),
     (0.25, 2, 1)],
)  # fmt: skip
def test_a_ratio_is_rounded_as_it_is_written(ratio: float, n_heads: int, count: int) -> None:
    assert wanted_count(ratio, sites(n_heads)) == count


def test_ratios_that_drift_as_floats() -> None:
    assert math.floor(0.145 * 100 + 0.5) == 14  # what the test above would show without exact arithmetic


@pytest.mark.parametrize(
    ("ratio", "message", "hint"),
    [
        (1.5, "--ratio 1.5 is not a share 0 <= R < 1", None),
        (-0.1, "--ratio -0.1 is not a share 0 <= R < 1", None),
        (math.nan, "--ratio nan is not a share", None),
        (math.inf, "--ratio inf is not a share", None),
        (1.0, "--ratio 1 is not a share", "1.0 would remove every head"),
        (100, "--ratio 100 is not a share", "1.0 would remove every head"),
        (30, "--ratio 30 is not a share", "a share, not a percentage: did you mean 0.3?"),
        (0, "--ratio 0 of 12 heads removes none", "--ratio 0.1 removes one"),
        (0.04, "--ratio 0.04 of 12 heads removes none", "--ratio 0.1 removes one"),
    ],
)
def test_ratios_that_are_refused(ratio: float, message: str, hint: str | None) -> None:
    with pytest.raises(InvalidPlan) as caught:
        wanted_count(ratio, sites(4, 8))
    assert str(caught.value).startswith(message)
    assert (caught.value.hint or "").startswith(hint or "") and (caught.value.hint is None) == (hint is None)


@given(total=st.integers(1, 5000), data=st.data())
def test_the_ratio_of_a_count_gives_that_count(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, total))
    ratio = float(ratio_of(count, total))
    assert 0 < ratio < 1
    assert wanted_count(ratio, sites(total)) == count


def test_short_ratios() -> None:
    assert [ratio_of(count, 12) for count in (1, 3, 6, 8, 12)] == ["0.1", "0.25", "0.5", "0.7", "0.98"]


@given(total=st.integers(1, 60), data=st.data())
def test_rounds_are_whole_numbers_that_end_where_asked(total: int, data: st.DataObject) -> None:
    possible = sorted(data.draw(st.sets(st.integers(1, total), min_size=1)))
    count, rounds = data.draw(st.sampled_from(possible)), data.draw(st.integers(1, 30))
    plan = round_counts(count, rounds, possible)
    assert plan[-1] == count
    assert 1 <= len(plan) <= rounds
    assert plan == sorted(set(plan))
    assert set(plan) <= set(possible)


def test_rounds_are_even() -> None:
    assert round_counts(12, 5, range(1, 13)) == [2, 5, 7, 10, 12]
    assert round_counts(6, 1, range(1, 13)) == [6]
    assert round_counts(3, 9, range(1, 13)) == [1, 2, 3]
    assert round_counts(12, 4, [4, 8, 12]) == [4, 8, 12]
