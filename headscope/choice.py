"""The choice of heads to remove: lowest scores first, exactly as many as asked for, within the rules."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from headscope.counts import ratio_of, round_counts, total_heads, wanted_count
from headscope.errors import InvalidPlan
from headscope.heads import HeadId
from headscope.plan import SiteHeads
from headscope.units import Part, Rules, Unit, parts

__all__ = [
    "Rules",
    "bounded_order",
    "choose",
    "choose_round",
    "possible_counts",
    "removal_order",
    "round_counts",
    "wanted_count",
]


def choose(
    sites: Sequence[SiteHeads],
    scores: Mapping[HeadId, float],
    count: int,
    rules: Rules,
    *,
    gone: Collection[HeadId] = (),
    total: int | None = None,
) -> tuple[HeadId, ...]:
    """The heads to remove: `count` in all, `gone` among them, with the lowest total score that the rules allow.

    Ties are broken by head order: site by site, then by number. With `--scope layer` each site loses the same share of
    its own lowest heads; what does not divide goes by largest remainder. `total` is the number of heads that a ratio
    refers to, where the model has more sites than these.

    Raises:
        UsageError: a head that is not gone has no score, or one that is not finite.
        InvalidPlan: exactly `count` heads cannot be removed; the message names the nearest numbers that can.
    """
    found = parts(sites, scores, rules, gone=gone)
    missing = count - sum(len(part.gone) for part in found)
    units: Sequence[Unit] | None = None
    if count > 0 and missing >= 0:
        if rules.scope == "uniform":
            levels = _uniform_levels(sites, found)
            taken = next((level for level in levels if _count(found, level) == count), None)
            units = None if taken is None else _first(found, taken)
        else:
            units = _cheapest(_offers(found, count if rules.scope == "layer" else None), missing)
    if units is None:
        possible = possible_counts(sites, rules, gone=gone)
        raise _impossible(count, total or total_heads(sites), possible, rules) if possible else _none_goes(sites, rules)
    return _heads(found, units)


def possible_counts(sites: Sequence[SiteHeads], rules: Rules, *, gone: Collection[HeadId] = ()) -> list[int]:
    """All numbers of heads that `choose` can remove, `gone` among them, ascending.

    Raises:
        InvalidPlan: the sites differ, so that `--scope uniform` means nothing.
    """
    nothing = {HeadId(site.id, number): 0.0 for site in sites for number in site.heads}
    found = parts(sites, nothing, rules, gone=gone)
    if rules.scope == "uniform":
        counts = {_count(found, level) for level in _uniform_levels(sites, found)}
    else:
        reached = 1 << sum(len(part.gone) for part in found)  # bit c: c heads can be gone
        for part in found:
            for unit in part.units:
                reached |= reached << len(unit.heads)
        counts = {count for count in range(reached.bit_length()) if reached >> count & 1}
    return sorted(counts - {0})


def removal_order(
    sites: Sequence[SiteHeads], scores: Mapping[HeadId, float], rules: Rules, *, gone: Collection[HeadId] = ()
) -> list[tuple[HeadId, ...]]:
    """Heads in the order in which they go beyond `gone`, step by step; plan k removes the first k steps.

    With `--scope model` a step is one unit, the lowest mean score per head first: where all units are of one size,
    plan k is what `choose` takes. With `layer` and `uniform` a step lowers all sites by one level.

    Raises:
        UsageError, InvalidPlan: as `choose`.
    """
    found = parts(sites, scores, rules, gone=gone)
    return [tuple(sorted(head for unit in step for head in unit.heads)) for step in _steps(sites, found, rules)]


def bounded_order(
    sites: Sequence[SiteHeads], scores: Mapping[HeadId, float], rules: Rules, *, total: int
) -> list[tuple[HeadId, ...]]:
    """The removal order up to where a model of `total` heads would lose its last one.

    Raises:
        UsageError, InvalidPlan: as `choose`; also where no head can be removed.
    """
    steps = removal_order(sites, scores, rules)
    if sum(map(len, steps)) == total:
        steps = steps[:-1]
    if not steps:
        raise _none_goes(sites, rules)
    return steps


def choose_round(
    sites: Sequence[SiteHeads],
    scores: Mapping[HeadId, float],
    count: int,
    *,
    goal: int,
    rules: Rules,
    gone: Collection[HeadId] = (),
) -> tuple[HeadId, ...]:
    """The heads gone after one of several rounds that end with `goal` heads: the lowest of those that `goal` removes.

    `count` heads, or as few more as whole units make; unlike `choose`, it never takes heads after which exactly `goal`
    is out of reach, as can happen where units are of different sizes.

    Raises:
        UsageError, InvalidPlan: as `choose` for `goal` heads.
    """
    wanted = set(choose(sites, scores, goal, rules, gone=gone))
    found = parts(sites, scores, rules, gone=gone)
    taken: list[Unit] = []
    missing = count - sum(len(part.gone) for part in found)
    for unit in (unit for step in _steps(sites, found, rules) for unit in step):
        if missing > 0 and wanted.issuperset(unit.heads):
            taken.append(unit)
            missing -= len(unit.heads)
    return _heads(found, taken)


@dataclass(frozen=True)
class _Offer:
    """A unit that may go, and what that costs."""

    cost: Fraction
    unit: Unit


@dataclass(frozen=True)
class _Deal:
    """The least cost of some number of heads, and how many offers of each size it takes."""

    cost: Fraction
    taken: tuple[int, ...]


def _offers(found: Sequence[Part], count: int | None) -> list[_Offer]:
    """Every unit at its score, or, where each site is to lose its share of `count` heads, at what it adds to the
    squared distance from that share: the least total is what largest remainders give.
    """
    if count is None:
        return [_Offer(unit.score, unit) for part in found for unit in part.units]
    total = sum(part.total for part in found)
    offers: list[_Offer] = []
    for part in found:
        share = Fraction(count * part.total, total)
        for before, unit in zip(part.counts, part.units, strict=False):
            size = len(unit.heads)
            offers.append(_Offer(size * (2 * (before - share) + size), unit))
    return offers


def _cheapest(offers: Sequence[_Offer], count: int) -> list[Unit] | None:
    """The units with the least total cost that have `count` heads together, or None if none have.

    Of units of one size the cheapest go first, so that only how many of each size go has to be searched.
    """
    sizes: dict[int, list[_Offer]] = {}
    for offer in sorted(offers, key=lambda offer: offer.cost):
        sizes.setdefault(len(offer.unit.heads), []).append(offer)
    order = sorted(sizes, reverse=True)
    best = {0: _Deal(Fraction(0), ())}
    for size in order:
        sums = list(accumulate((offer.cost for offer in sizes[size]), initial=Fraction(0)))
        better: dict[int, _Deal] = {}
        for reached, deal in best.items():
            most = min(len(sums) - 1, (count - reached) // size)
            least = most if size == order[-1] else 0  # the last size must fill what is left
            for number in range(least, most + 1):
                cost, now = deal.cost + sums[number], reached + number * size
                if now not in better or cost < better[now].cost:
                    better[now] = _Deal(cost, (*deal.taken, number))
        best = better
    if count not in best:
        return None
    return [offer.unit for size, number in zip(order, best[count].taken, strict=True) for offer in sizes[size][:number]]


def _steps(sites: Sequence[SiteHeads], found: Sequence[Part], rules: Rules) -> list[list[Unit]]:
    """The units in the order in which they go, those of one level of all sites together."""
    if rules.scope == "model":
        units = [unit for part in found for unit in part.units]
        return [[unit] for unit in sorted(units, key=lambda unit: unit.score / len(unit.heads))]
    levels = _uniform_levels(sites, found) if rules.scope == "uniform" else _layer_levels(found)
    steps: list[list[Unit]] = []
    done = [0] * len(found)
    for level in levels:
        step = [unit for part, old, new in zip(found, done, level, strict=True) for unit in part.units[old:new]]
        if step:
            steps.append(step)
        done = level
    return steps


def _uniform_levels(sites: Sequence[SiteHeads], found: Sequence[Part]) -> list[list[int]]:
    """For each number of heads that every site can be left with, the most first: units to take from each part."""
    first = sites[0] if sites else None
    for site in sites:
        assert first is not None
        if (len(site.heads), site.n_kv_heads) != (len(first.heads), first.n_kv_heads):
            raise InvalidPlan(
                f"--scope uniform needs sites alike: {first.id} has {len(first.heads)} heads and {first.n_kv_heads} "
                f"key/value heads, {site.id} has {len(site.heads)} and {site.n_kv_heads}",
                hint="--scope layer removes the same share of each site",
            )
    places = [{left: place for place, left in enumerate(part.left)} for part in found]
    common = set(places[0]).intersection(*places[1:]) if places else set()
    return [[place[left] for place in places] for left in sorted(common, reverse=True)]


def _layer_levels(found: Sequence[Part]) -> list[list[int]]:
    """For growing shares, as many as the finest site has steps: units to take from each part, nearest to the share."""
    finest = max((part.total // len(part.units[0].heads) for part in found if part.units), default=0)
    levels: list[list[int]] = []
    for number in range(1, finest + 1):
        share = Fraction(number, finest)
        levels.append([_nearest_place(part, share * part.total) for part in found])
    return levels


def _nearest_place(part: Part, heads: Fraction) -> int:
    """After how many units the number of heads gone is nearest to `heads`; the more, where two are as near."""
    counts = part.counts
    middles = [Fraction(low + high, 2) for low, high in zip(counts, counts[1:], strict=False)]
    return bisect_right(middles, heads)


def _first(found: Sequence[Part], level: Sequence[int]) -> list[Unit]:
    return [unit for part, place in zip(found, level, strict=True) for unit in part.units[:place]]


def _count(found: Sequence[Part], level: Sequence[int]) -> int:
    return sum(part.counts[place] for part, place in zip(found, level, strict=True))


def _heads(found: Sequence[Part], units: Sequence[Unit]) -> tuple[HeadId, ...]:
    """All heads that are gone after these units, sorted."""
    gone = {head for part in found for head in part.gone}
    return tuple(sorted(gone | {head for unit in units for head in unit.heads}))


def _none_goes(sites: Sequence[SiteHeads], rules: Rules) -> InvalidPlan:
    """The error that no head can go, with a hint where whole key/value groups are to blame."""
    smaller = rules.whole_groups and possible_counts(sites, replace(rules, unit="head"))
    return InvalidPlan(
        f"no head can be removed with {_said(rules)}",
        hint="--unit head takes some heads of every key/value group instead of whole groups" if smaller else None,
    )


def _impossible(count: int, total: int, possible: Sequence[int], rules: Rules) -> InvalidPlan:
    """The error that names the nearest possible numbers."""
    place = bisect_left(possible, count)
    near = possible[max(place - 1, 0) : place + 1]
    ratios = [f"--ratio {ratio_of(number, total)} removes {number}" for number in near]
    return InvalidPlan(
        f"exactly {count} of {total} heads cannot be removed with {_said(rules)}; "
        f"the nearest possible: {' or '.join(map(str, near))}",
        hint=", ".join(ratios),
    )


def _said(rules: Rules) -> str:
    return f"--scope {rules.scope} and --min-heads {rules.min_heads}"
