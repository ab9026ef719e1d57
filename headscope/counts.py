"""How many heads to remove: from a ratio, and over several rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from headscope.errors import InvalidPlan
from headscope.plan import SiteHeads


def total_heads(sites: Sequence[SiteHeads]) -> int:
    """The query heads of all sites."""
    return sum(len(site.heads) for site in sites)


def check_ratio(ratio: float) -> None:
    """Refuse what is no share of the heads.

    Raises:
        InvalidPlan: it is not in 0 <= R < 1.
    """
    if 0 <= ratio < 1:
        return
    percent = 2 <= ratio < 100
    hint = f"a share, not a percentage: did you mean {ratio / 100:g}?" if percent else None
    if ratio in (1, 100):
        hint = "1.0 would remove every head; to remove certain heads, name them with --heads"
    raise InvalidPlan(f"--ratio {ratio:g} is not a share 0 <= R < 1 of the heads", hint=hint)


def wanted_count(ratio: float, sites: Sequence[SiteHeads]) -> int:
    """⌊R·N + ½⌋, the number of heads that `--ratio R` removes of N; R as it is written, so that 0.35·10 is 3.5.

    Raises:
        InvalidPlan: R is no share, or so small that no head goes.
    """
    check_ratio(ratio)
    total = total_heads(sites)
    count = _rounded(ratio, total)
    if count == 0:
        raise InvalidPlan(
            f"--ratio {ratio:g} of {total} heads removes none", hint=f"--ratio {ratio_of(1, total)} removes one"
        )
    return count


def ratio_of(count: int, total: int) -> str:
    """The shortest R < 1 with which `--ratio R` removes `count` of `total` heads, from 1 to all of them."""
    assert 0 < count <= total
    for digits in range(1, 18):
        for target in (Fraction(count, total), Fraction(4 * count - 1, 4 * total)):
            ratio = round(float(target), digits)
            if 0 < ratio < 1 and _rounded(ratio, total) == count:
                return f"{ratio}"
    raise AssertionError(f"no ratio removes {count} of {total} heads")


def round_counts(count: int, rounds: int, possible: Sequence[int]) -> list[int]:
    """How many heads are gone after each round, at most `rounds`: even steps of possible counts, the last is `count`.

    There are fewer rounds where fewer counts lie on the way.
    """
    found: list[int] = []
    rounds = min(rounds, count)
    for number in range(1, rounds):
        target = Fraction(count * number, rounds)
        near = min(possible, key=lambda other: (abs(other - target), other), default=count)
        if (found[-1] if found else 0) < near < count:
            found.append(near)
    return [*found, count]


def _rounded(ratio: float, total: int) -> int:
    return math.floor(Fraction(repr(float(ratio))) * total + Fraction(1, 2))
