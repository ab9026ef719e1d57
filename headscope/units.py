"""Units of removal: the query heads of a module that go together, in the order in which they go.

Under MHA a unit is one head. Under GQA it is one whole group, or the next lowest head of every group at once, so that
the groups stay of one size; heads that are only masked go one by one. Scores are summed as fractions: sums are exact,
so that neither the order of summing nor rounding decides which of two units is lower.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from headscope.errors import InvalidPlan, UsageError, nearest
from headscope.heads import HeadId
from headscope.plan import SCOPES, UNITS, SiteHeads


@dataclass(frozen=True)
class Rules:
    """What a choice of heads must respect.

    `scope`: `model` (one ranking), `layer` (the same share in each site) or `uniform` (as many left in every site).
    `unit`: `group` (whole key/value groups), `head` (heads one by one, or one of every group at once under GQA), or
    `auto`: groups if heads are removed for real (`structural`), heads if they are only masked.
    `min_heads`: query heads that each site keeps at least; 0 allows an empty one.
    """

    scope: str
    unit: str
    min_heads: int = 1
    structural: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (("scope", self.scope, SCOPES), ("unit", self.unit, UNITS)):
            if value not in known:
                raise UsageError(f"no {name} {value!r}", hint=nearest(value, known))

    @property
    def whole_groups(self) -> bool:
        """Whether key/value groups go as a whole."""
        return self.unit == "group" or (self.unit == "auto" and self.structural)


@dataclass(frozen=True)
class Unit:
    """Heads that go together, in all layers that share their module, and the sum of their scores."""

    heads: tuple[HeadId, ...]
    score: Fraction


@dataclass(frozen=True)
class Part:
    """One attention module that may lose heads, counted once for each of its `layers`.

    `total` heads were there, `gone` are gone already, and `units` may follow, the lowest first.
    """

    total: int
    layers: int
    gone: tuple[HeadId, ...]
    units: tuple[Unit, ...]

    @property
    def counts(self) -> list[int]:
        """`counts[k]` is the number of heads gone after k units."""
        return list(accumulate((len(unit.heads) for unit in self.units), initial=len(self.gone)))

    @property
    def left(self) -> list[int]:
        """`left[k]` is the number of heads that each of its layers has after k units."""
        return [(self.total - count) // self.layers for count in self.counts]


def parts(
    sites: Sequence[SiteHeads], scores: Mapping[HeadId, float], rules: Rules, *, gone: Collection[HeadId]
) -> list[Part]:
    """The modules of these sites, in order of their first layers, with the units that each may still lose.

    A head that is gone from one layer of a shared module is gone from all.

    Raises:
        UsageError: a head that is not gone has no score, or one that is not finite.
        InvalidPlan: heads are gone in a way that leaves unequal groups, but groups must stay equal.
    """
    return [_part(layers, scores, rules, gone) for layers in _modules(sites)]


def blocks(sites: Sequence[SiteHeads], rules: Rules, *, gone: Collection[HeadId] = ()) -> list[tuple[HeadId, ...]]:
    """The heads not yet gone, in blocks that a greedy choice may take, in order: one head, or one key/value group where
    the rules remove whole groups, in all layers that share its module.

    Where one head of every group goes at a time, blocks are single heads: which of a group go together follows from
    their scores.
    """
    found: list[tuple[HeadId, ...]] = []
    for layers in _modules(sites):
        for group in layers[0].groups:
            left = [number for number in group if HeadId(layers[0].id, number) not in gone]
            for block in [left] if rules.whole_groups else [[number] for number in left]:
                if block:
                    found.append(tuple(HeadId(site.id, number) for site in layers for number in block))
    return found


def _modules(sites: Sequence[SiteHeads]) -> Iterator[list[SiteHeads]]:
    """The layers of each module."""
    for place, site in enumerate(sites):
        if not any(earlier.id in site.shared_with for earlier in sites[:place]):
            yield [each for each in sites if each.id == site.id or each.id in site.shared_with]


def _part(layers: list[SiteHeads], scores: Mapping[HeadId, float], rules: Rules, gone: Collection[HeadId]) -> Part:
    ids, first = {site.id for site in layers}, layers[0]
    taken = {head.index for head in gone if head.site in ids}
    groups = [left for group in first.groups if (left := tuple(number for number in group if number not in taken))]

    def everywhere(numbers: Sequence[int]) -> tuple[HeadId, ...]:
        return tuple(HeadId(site.id, number) for site in layers for number in numbers)

    score = {number: _total(everywhere([number]), scores) for group in groups for number in group}
    units = [
        Unit(everywhere(block), sum((score[number] for number in block), Fraction(0)))
        for block in _blocks(first, groups, score, rules)
    ]
    units.sort(key=lambda unit: unit.score)  # stable: ties stay in head order
    return Part(
        total=len(first.heads) * len(layers),
        layers=len(layers),
        gone=everywhere(sorted(taken)),
        units=tuple(_spared(units, len(score) - rules.min_heads, len(layers))),
    )


def _total(heads: Sequence[HeadId], scores: Mapping[HeadId, float]) -> Fraction:
    """The exact sum of the heads' scores."""
    total = Fraction(0)
    for head in heads:
        if head not in scores:
            raise UsageError(f"no score for {head}")
        if not math.isfinite(scores[head]):
            raise UsageError(f"the score of {head} is {scores[head]}", hint="every head needs a finite score")
        total += Fraction(float(scores[head]))
    return total


def _blocks(
    site: SiteHeads, groups: list[tuple[int, ...]], score: Mapping[int, Fraction], rules: Rules
) -> list[tuple[int, ...]]:
    """Numbers of heads that go together."""
    if rules.whole_groups or site.group_size == 1:
        return groups
    if not rules.structural:
        return [(number,) for group in groups for number in group]
    if len({len(group) for group in groups}) > 1:
        raise InvalidPlan(
            f"{site.id}: the heads that are gone leave key/value groups of different sizes",
            hint="--layout masked needs no equal groups",
        )
    return list(zip(*(sorted(group, key=score.__getitem__) for group in groups), strict=True))


def _spared(units: Sequence[Unit], most: int, layers: int) -> Iterator[Unit]:
    """The first units, at most `most` heads of each layer."""
    for unit, count in zip(units, accumulate(len(unit.heads) // layers for unit in units), strict=True):
        if count > most:
            return
        yield unit
