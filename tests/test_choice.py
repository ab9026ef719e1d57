"""The choice is exact in number, lowest in score (against trying everything), and the same however it is asked."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headscope.choice import (
    Rules,
    choose,
    choose_round,
    possible_counts,
    removal_order,
    round_counts,
    wanted_count,
)
from headscope.errors import InvalidPlan, UsageError
from headscope.heads import AttentionKind, HeadId, SiteId
from headscope.plan import Plan, SiteHeads, require_removable


def site(layer: int, n_heads: int, group: int = 1, *, shared_with: tuple[int, ...] = ()) -> SiteHeads:
    """A site whose heads share key/value heads in groups of `group`."""
    groups = tuple(tuple(range(start, start + group)) for start in range(0, n_heads, group))
    return SiteHeads(name(layer), groups, tuple(name(twin) for twin in shared_with))


def name(layer: int) -> SiteId:
    return SiteId("decoder", AttentionKind.CAUSAL, layer)


def shared(n_heads: int, *layers: int, group: int = 1) -> list[SiteHeads]:
    """Layers that use one module."""
    return [site(layer, n_heads, group, shared_with=tuple(x for x in layers if x != layer)) for layer in layers]


def every(sites: Sequence[SiteHeads]) -> list[HeadId]:
    return [HeadId(each.id, number) for each in sites for number in each.heads]


def scored(sites: Sequence[SiteHeads], *values: float) -> dict[HeadId, float]:
    return dict(zip(every(sites), values, strict=True))


def short(heads: Sequence[HeadId]) -> list[str]:
    return [f"{head.site.layer}.{head.index}" for head in heads]


MODELS = {
    "mha": [site(0, 3), site(1, 4)],
    "gqa": [site(0, 4, 2), site(1, 4, 2)],
    "mqa": [site(0, 3, 3), site(1, 4, 4)],
    "mixed": [site(0, 4, 2), site(1, 3), site(2, 3, 3)],
    "albert": [*shared(3, 0, 1), site(2, 2)],
    "albert-gqa": [*shared(4, 0, 1, group=2), site(2, 3)],
    "even": [site(0, 4, 2), site(1, 4, 2), site(2, 4, 2)],
}
RULES = [
    Rules(scope, unit, min_heads, structural)
    for scope, unit, min_heads, structural in itertools.product(
        ("model", "layer", "uniform"), ("head", "group", "auto"), (0, 1, 2), (True, False)
    )
]


def allowed(sites: Sequence[SiteHeads], rules: Rules) -> Iterator[tuple[HeadId, ...]]:
    """Every set of heads that the rules allow, straight from what they say."""
    heads = every(sites)
    by_site = {each.id: each for each in sites}
    for picks in itertools.product((False, True), repeat=len(heads)):
        removed = tuple(head for head, pick in zip(heads, picks, strict=True) if pick)
        numbers = {each.id: frozenset(head.index for head in removed if head.site == each.id) for each in sites}
        if all(_site_allows(each, numbers[each.id], rules) for each in sites) and all(
            numbers[twin] == numbers[each.id] for each in sites for twin in each.shared_with if twin in by_site
        ):
            left = {len(each.heads) - len(numbers[each.id]) for each in sites}
            if rules.scope != "uniform" or len(left) == 1:
                yield removed


def _site_allows(each: SiteHeads, gone: frozenset[int], rules: Rules) -> bool:
    if gone and len(each.heads) - len(gone) < rules.min_heads:
        return False
    lost = [len(gone.intersection(group)) for group in each.groups]
    if rules.unit == "group" or (rules.unit == "auto" and rules.structural):
        return all(count in (0, each.group_size) for count in lost)
    return not rules.structural or each.group_size == 1 or len(set(lost)) == 1


def total(heads: Sequence[HeadId], scores: dict[HeadId, float]) -> Fraction:
    return sum((Fraction(scores[head]) for head in heads), Fraction(0))


def unevenness(sites: Sequence[SiteHeads], removed: Sequence[HeadId]) -> Fraction:
    """Squared distance of each module's loss from its share of all that is removed."""
    whole, gone = len(every(sites)), Counter(head.site for head in removed)
    modules = {frozenset((each.id, *each.shared_with)): each for each in sites}
    return sum(
        (
            (sum(gone[layer] for layer in layers) - Fraction(len(removed) * len(each.heads) * len(layers), whole)) ** 2
            for layers, each in modules.items()
        ),
        Fraction(0),
    )


def usable(sites: Sequence[SiteHeads], rules: Rules) -> bool:
    return rules.scope != "uniform" or len({(len(each.heads), each.n_kv_heads) for each in sites}) == 1


CASES = [(model, rules) for model in MODELS for rules in RULES if usable(MODELS[model], rules) if model != "even"]
EVEN = [("gqa", rules) for rules in RULES if rules.scope == "uniform"]


@pytest.mark.parametrize(
    ("model", "rules"), CASES, ids=[f"{m}-{r.scope}-{r.unit}-{r.min_heads}-{r.structural}" for m, r in CASES]
)
def test_against_trying_everything(model: str, rules: Rules) -> None:
    sites = MODELS[model]
    draw = random.Random(str(rules))
    scores = {head: draw.choice([-1.5, 0.0, 0.1, 0.2, 0.3, 1.0, 7.0]) for head in every(sites)}
    by_count: dict[int, list[tuple[HeadId, ...]]] = {}
    for removed in allowed(sites, rules):
        by_count.setdefault(len(removed), []).append(removed)
    assert possible_counts(sites, rules) == sorted(set(by_count) - {0})
    for count in range(len(every(sites)) + 2):
        if count == 0 or count not in by_count:
            with pytest.raises(InvalidPlan):
                choose(sites, scores, count, rules)
            continue
        chosen = choose(sites, scores, count, rules)
        assert chosen in {tuple(sorted(removed)) for removed in by_count[count]}
        rivals = by_count[count]
        if rules.scope == "layer":
            least = min(unevenness(sites, removed) for removed in rivals)
            assert unevenness(sites, chosen) == least
            spread = Counter(head.site for head in chosen)
            rivals = [removed for removed in rivals if Counter(head.site for head in removed) == spread]
        assert total(chosen, scores) == min(total(removed, scores) for removed in rivals)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[SiteHeads], dict[HeadId, float], Rules]:
    """Sites with unequal numbers of heads, some sharing a module, with scores full of ties."""
    sites: list[SiteHeads] = []
    for _ in range(draw(st.integers(1, 4))):
        group, n_groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        first = len(sites)
        layers = range(first, first + draw(st.sampled_from([1, 1, 2])))
        sites += shared(group * n_groups, *layers, group=group)
    number = st.sampled_from([0.0, 0.1, 0.3]) | st.floats(-1e308, 1e308)
    scores = {head: draw(number) for head in every(sites)}
    rules = Rules(
        draw(st.sampled_from(["model", "layer"])),
        draw(st.sampled_from(["auto", "head", "group"])),
        draw(st.integers(0, 3)),
        draw(st.booleans()),
    )
    return sites, scores, rules


@given(problem=problems(), data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_choice_is_exact_and_removable(
    problem: tuple[list[SiteHeads], dict[HeadId, float], Rules], data: st.DataObject
) -> None:
    sites, scores, rules = problem
    possible = possible_counts(sites, rules)
    assume(possible)
    count = data.draw(st.sampled_from(possible))
    chosen = choose(sites, scores, count, rules)
    assert len(chosen) == len(set(chosen)) == count
    assert list(chosen) == sorted(chosen)
    require_removable(Plan(tuple(sites), chosen), min_heads=rules.min_heads, structural=rules.structural)
    shuffled = dict(data.draw(st.permutations(list(scores.items()))))
    assert choose(sites, shuffled, count, rules) == chosen


@given(problem=problems())
@settings(deadline=None, max_examples=60)
def test_the_order_of_removal_grows_by_what_may_go(
    problem: tuple[list[SiteHeads], dict[HeadId, float], Rules],
) -> None:
    sites, scores, rules = problem
    possible = possible_counts(sites, rules)
    gone: list[HeadId] = []
    for step in removal_order(sites, scores, rules):
        assert step and not set(step).intersection(gone)
        gone += step
        plan = Plan(tuple(sites), tuple(sorted(gone)))
        require_removable(plan, min_heads=rules.min_heads, structural=rules.structural)
        assert len(gone) in possible
    assert len(gone) == max(possible, default=0)


@pytest.mark.parametrize("structural", [True, False])
@pytest.mark.parametrize("unit", ["head", "group"])
@pytest.mark.parametrize("model", ["mha", "gqa"])
def test_with_units_of_one_size_the_order_of_removal_is_the_choice(model: str, unit: str, structural: bool) -> None:
    sites, rules = MODELS[model], Rules("model", unit, 1, structural)
    draw = random.Random(unit)
    scores = {head: draw.choice([0.0, 0.5, 1.0]) for head in every(sites)}
    gone: list[HeadId] = []
    for step in removal_order(sites, scores, rules):
        gone += step
        assert choose(sites, scores, len(gone), rules) == tuple(sorted(gone))  # so choices are nested, too


def test_levels_of_the_scopes() -> None:
    sites = [site(0, 2), site(1, 4)]
    scores = scored(sites, 1, 0, 3, 2, 1, 0)
    steps = [short(step) for step in removal_order(sites, scores, Rules("layer", "auto", 0))]
    assert steps == [["0.1", "1.3"], ["1.2"], ["0.0", "1.1"], ["1.0"]]
    pair = [site(0, 4, 2), site(1, 4, 2)]
    steps = removal_order(pair, scored(pair, 0, 3, 1, 2, 9, 8, 7, 6), Rules("uniform", "head"))
    assert [short(step) for step in steps] == [["0.0", "0.2", "1.1", "1.3"]]


def test_units_of_different_sizes_go_by_the_mean_of_their_heads() -> None:
    sites = [site(0, 4, 2), site(1, 3)]
    steps = removal_order(sites, scored(sites, 1, 1, 9, 9, 0.5, 1.5, 9), Rules("model", "auto"))
    assert [short(step) for step in steps] == [["1.0"], ["0.0", "0.1"], ["1.1"]]


def test_ties_go_by_head_order() -> None:
    sites = [site(0, 3), site(1, 3), site(2, 3)]
    flat = dict.fromkeys(every(sites), 1.0)
    assert short(choose(sites, flat, 4, Rules("model", "auto"))) == ["0.0", "0.1", "1.0", "1.1"]
    assert short(choose(sites, flat, 4, Rules("layer", "auto"))) == ["0.0", "0.1", "1.0", "2.0"]
    assert short(choose(sites, flat, 3, Rules("uniform", "auto"))) == ["0.0", "1.0", "2.0"]
    other = list(reversed(sites))
    assert short(choose(other, flat, 1, Rules("model", "auto"))) == ["2.0"]  # the first of the order given
    groups = [site(0, 6, 2)]
    tied = dict.fromkeys(every(groups), 0.0)
    assert short(choose(groups, tied, 2, Rules("model", "group"))) == ["0.0", "0.1"]
    assert short(choose(groups, tied, 3, Rules("model", "head"))) == ["0.0", "0.2", "0.4"]


def test_largest_remainders() -> None:
    sites = [site(0, 2), site(1, 5), site(2, 6)]
    flat = dict.fromkeys(every(sites), 1.0)
    spread = Counter(head.site.layer for head in choose(sites, flat, 6, Rules("layer", "auto")))
    assert spread == {0: 1, 1: 2, 2: 3}  # shares .92, 2.31, 2.77


def test_the_score_of_a_group_is_the_sum_of_its_heads() -> None:
    sites = [site(0, 4, 2)]
    scores = scored(sites, 0, 5, 2, 2)
    assert short(choose(sites, scores, 2, Rules("model", "group"))) == ["0.2", "0.3"]
    assert short(choose(sites, scores, 2, Rules("model", "auto"))) == ["0.2", "0.3"]
    assert short(choose(sites, scores, 2, Rules("model", "head"))) == ["0.0", "0.2"]
    assert short(choose(sites, scores, 1, Rules("model", "auto", structural=False))) == ["0.0"]


def test_sums_are_exact() -> None:
    sites = [site(0, 6, 3)]
    scores = scored(sites, 0.1, 0.2, 0.3, 0.3, 0.2, 0.1)  # equal, though not when added as floats from the left
    assert sum([0.1, 0.2, 0.3]) != sum([0.3, 0.2, 0.1])
    assert short(choose(sites, scores, 3, Rules("model", "group"))) == ["0.0", "0.1", "0.2"]
    layers = shared(2, 0, 1, 2)
    scores = scored(layers, 0.1, 0.3, 0.2, 0.2, 0.3, 0.1)
    assert short(choose(layers, scores, 3, Rules("model", "auto"))) == ["0.0", "1.0", "2.0"]
    scores = scored(layers, 0.3, 0.1, 0.2, 0.2, 0.1, 0.3)
    assert short(choose(layers, scores, 3, Rules("model", "auto"))) == ["0.0", "1.0", "2.0"]
    huge = scored(sites, *[1.7e308] * 3, *[1.6e308] * 3)
    assert short(choose(sites, huge, 3, Rules("model", "group"))) == ["0.3", "0.4", "0.5"]


def test_a_shared_module_counts_in_every_layer() -> None:
    sites = [*shared(2, 0, 1, 2), site(3, 2)]
    scores = scored(sites, 0, 1, 9, 1, 0, 1, 4, 5)
    assert possible_counts(sites, Rules("model", "auto")) == [1, 3, 4]
    assert short(choose(sites, scores, 3, Rules("model", "auto"))) == ["0.1", "1.1", "2.1"]  # 3 against 9
    assert wanted_count(0.5, sites) == 4


def test_heads_that_are_gone_stay_gone() -> None:
    sites = [site(0, 4), site(1, 4)]
    scores = scored(sites, *range(8))
    gone = [HeadId(name(0), 3), HeadId(name(1), 0)]
    scores[gone[0]] = math.nan
    del scores[gone[1]]
    for scope, wanted in (
        ("model", ["0.0", "0.1", "0.3", "1.0"]),
        ("layer", ["0.0", "0.3", "1.0", "1.1"]),
        ("uniform", ["0.0", "0.3", "1.0", "1.1"]),
    ):
        assert short(choose(sites, scores, 4, Rules(scope, "auto"), gone=gone)) == wanted
    assert choose(sites, scores, 2, Rules("model", "auto"), gone=gone) == tuple(gone)
    assert possible_counts(sites, Rules("model", "auto"), gone=gone) == [2, 3, 4, 5, 6]
    assert short(removal_order(sites, scores, Rules("model", "auto"), gone=gone)[0]) == ["0.0"]
    with pytest.raises(InvalidPlan, match="the nearest possible: 2$"):
        choose(sites, scores, 1, Rules("model", "auto"), gone=gone)


def test_twice_is_once() -> None:
    """Heads keep their numbers: removing 0 and then 3 is removing both."""
    sites = [site(0, 4)]
    once = choose(sites, scored(sites, 0, 2, 3, 1), 2, Rules("model", "auto"))
    first = choose(sites, scored(sites, 0, 2, 3, 1), 1, Rules("model", "auto"))
    assert short(first) == ["0.0"]
    assert choose(sites, scored(sites, math.nan, 2, 3, 1), 2, Rules("model", "auto"), gone=first) == once
    assert short(once) == ["0.0", "0.3"]


def test_a_head_gone_from_a_shared_module_is_gone_from_all_layers() -> None:
    sites = shared(3, 0, 1)
    chosen = choose(sites, scored(sites, *[0.0] * 6), 4, Rules("model", "auto"), gone=[HeadId(name(1), 2)])
    assert short(chosen) == ["0.0", "0.2", "1.0", "1.2"]


def test_unequal_groups_left_by_earlier_rounds_are_refused() -> None:
    sites = [site(0, 4, 2)]
    gone = [HeadId(name(0), 1)]
    with pytest.raises(InvalidPlan, match=r"decoder\.causal\.0: the heads that are gone leave"):
        choose(sites, scored(sites, *range(4)), 2, Rules("model", "head"), gone=gone)
    masked = Rules("model", "head", structural=False)
    assert short(choose(sites, scored(sites, *range(4)), 2, masked, gone=gone)) == ["0.0", "0.1"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_head_needs_a_finite_score(value: float) -> None:
    sites = MODELS["mha"]
    scores = dict.fromkeys(every(sites), 1.0)
    scores[HeadId(name(1), 2)] = value
    with pytest.raises(UsageError, match=rf"the score of decoder\.causal\.1\.2 is {value}"):
        choose(sites, scores, 1, Rules("model", "auto"))
    del scores[HeadId(name(1), 2)]
    with pytest.raises(UsageError, match=r"no score for decoder\.causal\.1\.2"):
        removal_order(sites, scores, Rules("model", "auto"))


def refusal(sites: Sequence[SiteHeads], count: int, rules: Rules) -> InvalidPlan:
    with pytest.raises(InvalidPlan) as caught:
        choose(sites, dict.fromkeys(every(sites), 0.0), count, rules)
    return caught.value


def test_what_cannot_be_removed_exactly_names_the_nearest() -> None:
    sites = [site(layer, 8, 4) for layer in range(3)]
    error = refusal(sites, 6, Rules("model", "auto"))
    assert str(error) == (
        "exactly 6 of 24 heads cannot be removed with --scope model and --min-heads 1; the nearest possible: 4 or 8"
    )
    assert error.hint == "--ratio 0.17 removes 4, --ratio 0.33 removes 8"
    assert [wanted_count(ratio, sites) for ratio in (0.17, 0.33)] == [4, 8]
    with pytest.raises(InvalidPlan, match="exactly 6 of 40 heads") as caught:
        choose(sites, dict.fromkeys(every(sites), 0.0), 6, Rules("model", "auto"), total=40)
    assert caught.value.hint == "--ratio 0.1 removes 4, --ratio 0.2 removes 8"
    assert str(refusal(sites, 20, Rules("model", "auto"))).endswith("the nearest possible: 12")
    assert str(refusal(sites, 9, Rules("uniform", "head"))).endswith("the nearest possible: 6 or 12")
    assert str(refusal(sites, 5, Rules("model", "auto", min_heads=8))) == (
        "no head can be removed with --scope model and --min-heads 8"
    )


def test_uniform_needs_sites_alike() -> None:
    for sites in (MODELS["mha"], [site(0, 4), site(1, 4, 2)]):
        error = refusal(sites, 2, Rules("uniform", "auto"))
        assert str(error).startswith("--scope uniform needs sites alike: decoder.causal.0 has")
        assert error.hint is not None and "--scope layer" in error.hint


def test_uniform_plans_are_uniform() -> None:
    for rules in (Rules("uniform", unit, minimum) for unit in ("head", "group") for minimum in (0, 1)):
        sites = MODELS["even"]
        scores = {head: random.Random(str(head)).random() for head in every(sites)}
        for count in possible_counts(sites, rules):
            assert Plan(tuple(sites), choose(sites, scores, count, rules)).is_uniform()


def test_unknown_rules() -> None:
    with pytest.raises(UsageError, match="no scope 'modell'") as caught:
        Rules("modell", "auto")
    assert caught.value.hint is not None and caught.value.hint.startswith("did you mean 'model'?")
    with pytest.raises(UsageError, match="no unit 'heads'"):
        Rules("model", "heads")


@given(problem=problems(), data=st.data())
@settings(deadline=None, max_examples=60)
def test_rounds_always_reach_their_goal(
    problem: tuple[list[SiteHeads], dict[HeadId, float], Rules], data: st.DataObject
) -> None:
    sites, scores, rules = problem
    possible = possible_counts(sites, rules)
    assume(possible)
    goal = data.draw(st.sampled_from(possible))
    gone: tuple[HeadId, ...] = ()
    for count in round_counts(goal, data.draw(st.integers(1, 6)), possible):
        scores = dict(zip(scores, data.draw(st.permutations(list(scores.values()))), strict=True))
        now = choose_round(sites, scores, count, goal=goal, rules=rules, gone=gone)
        assert set(now).issuperset(gone)
        assert count <= len(now) <= goal
        gone = now
    assert len(gone) == goal


def test_a_round_does_not_strand_the_next() -> None:
    sites = [site(0, 6, 2), site(1, 6, 3)]  # one unit of three and two of two may go
    scores = scored(sites, *[5.0] * 6, *[0.0] * 6)
    rules = Rules("model", "group")
    stranded = choose(sites, scores, 3, rules)
    with pytest.raises(InvalidPlan):
        choose(sites, scores, 4, rules, gone=stranded)
    first = choose_round(sites, scores, 3, goal=4, rules=rules)
    assert {head.site.layer for head in first} == {0}
    assert len(choose_round(sites, scores, 4, goal=4, rules=rules, gone=first)) == 4


def test_uniform_rounds_reach_their_goal() -> None:
    sites, rules = MODELS["even"], Rules("uniform", "head")
    scores = {head: random.Random(str(head)).random() for head in every(sites)}
    first = choose_round(sites, scores, 2, goal=6, rules=rules)
    assert len(first) == 2  # only masked between rounds, so not yet uniform
    final = choose_round(sites, scores, 6, goal=6, rules=rules, gone=first)
    assert len(final) == 6 and Plan(tuple(sites), final).is_uniform()


def test_one_sites_minimum_does_not_bind_another() -> None:
    sites = [site(0, 2), site(1, 6)]
    scores = scored(sites, *range(8))
    assert short(choose(sites, scores, 4, Rules("model", "auto", min_heads=2))) == ["1.0", "1.1", "1.2", "1.3"]
    assert short(choose(sites, scores, 2, Rules("model", "auto", min_heads=0))) == ["0.0", "0.1"]
    small = Rules("model", "auto", min_heads=3)
    assert possible_counts(sites, small) == [1, 2, 3]
    assert possible_counts(sites, replace(small, min_heads=9)) == []


def test_a_large_model_is_quick() -> None:
    draw = random.Random(0)
    sites = [site(layer, 64, 8 if layer % 3 else 4) for layer in range(80)] + [site(80 + x, 16) for x in range(27)]
    scores = {head: draw.gauss(0, 1) for head in every(sites)}
    start = time.perf_counter()
    for scope in ("model", "layer"):
        assert len(choose(sites, scores, 2001, Rules(scope, "auto"))) == 2001
    assert len(removal_order(sites, scores, Rules("layer", "auto"))) == 15  # of the finest site, all but the last
    assert time.perf_counter() - start < 60
