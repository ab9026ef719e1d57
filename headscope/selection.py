"""The selection of heads for `prune`: from a number, a list, a file, or a limit on what may be lost, to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headscope.boundary import boundaries
from headscope.choice import Rules, bounded_order, choose, choose_round, possible_counts, round_counts, wanted_count
from headscope.counts import total_heads
from headscope.criteria import choose_criterion, load_criterion
from headscope.errors import InvalidPlan, ThresholdError, UsageError
from headscope.first_scores import FirstScores, criteria_of, scored_on
from headscope.heads import HeadId, Site, parse_heads
from headscope.mending import Mender, divergence
from headscope.plan import Plan, SiteHeads, read_plan, require_removable
from headscope.portable import carried
from headscope.repair import without
from headscope.request import Request
from headscope.score_files import read_scores
from headscope.stand_in import in_memory
from headscope.study import Study
from headscope.surgery import is_separable, parameters_left, require_separable
from headscope.trials import Trials
from headscope.units import blocks

AUTO_EXAMPLES = 192
"""Examples, a quarter of them held out, by which `auto` compares repaired plans at most; orders are made from all."""


@dataclass(frozen=True)
class Selection:
    """A plan and what happened on the way to it."""

    plan: Plan
    notes: tuple[str, ...] = ()
    history: tuple[dict[str, Any], ...] = field(default=())
    """What each round did: how many heads were gone after it, and which it took."""


def select(
    study: Study,
    request: Request,
    trials: Trials | None,
    *,
    seed: int = 0,
    mender: Mender | None = None,
    known: FirstScores | None = None,
) -> Selection:
    """The plan that a request means for the model of a study; `trials` judges it where a limit asks for that.

    With a `mender`, the scores of later rounds are those of the repaired model. First scores may be `known` already.

    Raises:
        InvalidPlan: exactly these heads, or exactly this number, cannot be removed.
        ThresholdError: a limit cannot be kept whatever is removed.
        UsageError: the request does not fit the model or the data.
    """
    if request.heads is not None:
        found = _named(study, request)
    elif request.plan is not None:
        found = Selection(read_plan(request.plan, _all(study)))
    else:
        found = _Chooser(study, request, seed, mender=mender, known=known or {}).choose(trials)
    if not found.plan.removed:
        raise InvalidPlan("nothing is left to remove: all of these heads are gone already")
    if len(found.plan.removed) == total_heads(found.plan.sites):
        raise InvalidPlan("the plan removes every head of the model")
    require_removable(found.plan, min_heads=request.min_heads, structural=not request.masked)
    if not request.masked:
        require_separable(site for site in study.sites if found.plan.removed_from(site.id))
    return found


def _all(study: Study) -> tuple[SiteHeads, ...]:
    return tuple(SiteHeads.of(site) for site in study.sites)


def able_sites(study: Study, *, masked: bool) -> tuple[SiteHeads, ...]:
    """The sites whose heads can go: all where heads are only silenced, else those whose heads come apart exactly.

    Raises:
        InvalidPlan: there is none.
    """
    able = [site for site in study.sites if masked or is_separable(site)]
    if not able:
        require_separable(study.sites)
    return tuple(SiteHeads.of(site) for site in able)


def _named(study: Study, request: Request) -> Selection:
    """The heads of --heads, without those that an earlier pruning took."""
    assert request.heads is not None
    try:
        heads, repeats = parse_heads(request.heads, _before_pruning(study))
    except ValueError as error:
        raise UsageError(f"--heads {request.heads}: {error}", hint="headscope inspect MODEL lists the heads") from None
    present = {head for site in study.sites for head in site.heads}
    gone = [str(head) for head in heads if head not in present]
    notes = [f"{', '.join(repeats)}: named twice"] if repeats else []
    notes += [f"{', '.join(gone)}: removed before, passed over"] if gone else []
    twins = {site.id: site.shared_with for site in study.sites}
    every = {head for head in heads if head in present}
    shared = {HeadId(twin, head.index) for head in every for twin in twins[head.site]} - every
    if shared:
        listing = ", ".join(map(str, sorted(shared)))
        notes.append(f"layers share their heads: {listing} go too, being the same")
    plan = Plan(_all(study), tuple(sorted(every | shared)), criterion="named", unit=request.unit)
    return Selection(plan, tuple(notes))


def _before_pruning(study: Study) -> list[Site]:
    """The sites with all the heads that they had before any pruning, those among them that have none any more."""
    found = {str(site.id): site for site in study.sites}
    for entry in carried(study.loaded.model.config).get("sites", ()):
        site = found.get(entry["id"], study.sites[0])
        label = HeadId.parse(f"{entry['id']}.0").site
        found[entry["id"]] = replace(site, id=label, n_heads=entry["heads"], numbers=())
    return list(found.values())


class _Chooser:
    """Chooses heads by scores."""

    def __init__(self, study: Study, request: Request, seed: int, *, mender: Mender | None, known: FirstScores) -> None:
        self.study, self.request, self.seed, self.mender = study, request, seed, mender
        self.scored = scored_on(study, request, mender)
        self.sites = _all(study)
        self.able = able_sites(study, masked=request.masked)
        self.rules = Rules(request.scope, request.unit, request.min_heads, structural=not request.masked)
        self.notes: list[str] = []
        if len(self.able) < len(study.sites):
            self.notes.append(f"{len(study.sites) - len(self.able)} sites whose heads are coupled keep all of them")
        self.history: list[dict[str, Any]] = []
        self._first_scores = dict(known)
        self.criterion = "scores"
        if request.scores is None:
            labelled = study.examples is not None and study.examples.labelled
            self.criterion = choose_criterion(request.criterion, labelled)

    def choose(self, trials: Trials | None) -> Selection:
        """By number, or as much as the limit allows; what no scores make possible is refused before any are made."""
        self._ranked({head: 0.0 for site in self.study.sites for head in site.heads})
        if trials is not None:
            trials.require(self.request)
        self._settle()
        if self.request.ratio is None:
            scores = self._scores(())
            removed = self._search(scores, trials)
        else:
            removed, scores = self._rounds(wanted_count(self.request.ratio, self.sites))
        plan = Plan(
            self.sites,
            tuple(sorted(removed)),
            criterion=self.criterion,
            scope=self.request.scope,
            unit=self.request.unit,
            seed=self.seed,
            scores=scores,
            rounds=self.request.rounds,
        )
        return Selection(plan, tuple(self.notes), tuple(self.history))

    def _settle(self) -> None:
        """Let `auto` be the candidate whose plan diverges least, repaired if it is to be, on held-out examples.

        Where a limit is searched for, the plans compared remove half of what can go.
        """
        if self.request.scores is not None or (names := criteria_of(self.study, self.request)) == (self.criterion,):
            return
        examples = self.study.examples
        assert examples is not None
        found: dict[str, float] = {}
        some = self.study.on(replace(examples, items=examples.items[:AUTO_EXAMPLES]))
        mender = None if self.mender is None else self.mender.on(some)
        for name in names:
            self.criterion = name
            plan = Plan(self.sites, tuple(sorted(self._removed(self._scores(())))))
            found[name] = divergence(some, plan) if mender is None else mender.divergence(plan)
        self.criterion = min(found, key=found.__getitem__)
        listing = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        self.notes.append(f"auto is {self.criterion}: divergence on held-out examples: {listing}")

    def _removed(self, scores: Mapping[HeadId, float]) -> Sequence[HeadId]:
        """What goes by these scores in one round."""
        steps = self._ranked(scores)
        if self.request.ratio is not None:
            return _first(steps, len(steps))
        if self.request.target_parameters is not None:
            return self._small_enough(steps, self.request.target_parameters)
        return _first(steps, -(-len(steps) // 2))

    def _ranked(self, scores: Mapping[HeadId, float]) -> Sequence[tuple[HeadId, ...]]:
        """The steps in which heads go by these scores; for a ratio one step, in which all do that are to go."""
        total = total_heads(self.sites)
        if self.request.ratio is None:
            return bounded_order(self.able, scores, self.rules, total=total)
        return [choose(self.able, scores, wanted_count(self.request.ratio, self.sites), self.rules, total=total)]

    def _rounds(self, goal: int) -> tuple[Sequence[HeadId], Mapping[HeadId, float]]:
        """Remove `goal` heads in rounds, each by scores of what is left then."""
        gone: tuple[HeadId, ...] = ()
        known: dict[HeadId, float] = {}
        possible = possible_counts(self.able, self.rules) if self.request.rounds > 1 else []
        total = total_heads(self.sites)
        for count in round_counts(goal, self.request.rounds, possible):
            scores = self._scores(gone)
            known |= {head: score for head, score in scores.items() if head not in gone}
            before = set(gone)
            if count == goal:
                gone = choose(self.able, scores, goal, self.rules, gone=gone, total=total)
            else:
                gone = choose_round(self.able, scores, count, goal=goal, rules=self.rules, gone=gone)
            self.history.append({"gone": len(gone), "taken": [str(head) for head in sorted(set(gone) - before)]})
        return gone, known

    def _scores(self, gone: Sequence[HeadId]) -> Mapping[HeadId, float]:
        """A score for every head while those in `gone` are gated to 0 and, with a mender, what is left is repaired."""
        heads = [head for site in self.study.sites for head in site.heads]
        if self.request.scores is not None:
            assert self.request.by is not None
            return read_scores(self.request.scores, self.request.by, heads)
        if not gone and self.criterion in self._first_scores:
            return self._first_scores[self.criterion]
        criterion = load_criterion(self.criterion)
        if criterion.needs_data and self.study.examples is None:
            raise UsageError(
                f"the criterion {self.criterion} needs data",
                hint="give --data FILE, or --scores FILE --by COLUMN, or --criterion random",
            )
        plan = Plan(self.sites, tuple(sorted(gone)))
        with without(self.study, plan) if self.mender is None else self.mender.mended(plan):
            if criterion.greedy is None:
                found = criterion.scores(self.scored, self.seed)
            else:
                found = criterion.greedy(self.scored, self.seed, blocks(self.sites, self.rules, gone=gone))
        if not gone:
            self._first_scores[self.criterion] = found
        return found

    def _search(self, scores: Mapping[HeadId, float], trials: Trials | None) -> tuple[HeadId, ...]:
        steps = self._ranked(scores)
        if self.request.target_parameters is not None:
            return self._small_enough(steps, self.request.target_parameters)
        if trials is None:
            raise UsageError("a limit on what may be lost is judged on data", hint="give --data FILE")
        count = most(len(steps), lambda number: self._bearable(trials, _first(steps, number)))
        if count == 0:
            raise ThresholdError(f"no head can be removed: {trials.why_not(self.request)}", hint="loosen the limit")
        return _first(steps, count)

    def _bearable(self, trials: Trials, removed: Sequence[HeadId]) -> bool:
        return trials.bears(Plan(self.sites, tuple(sorted(removed))), self.request)

    def _small_enough(self, steps: Sequence[tuple[HeadId, ...]], target: int) -> tuple[HeadId, ...]:
        """The fewest heads whose removal leaves at most so many parameters."""
        model, sites = self.study.loaded.model, self.study.sites
        edges = boundaries(in_memory(model), sites)

        def left(number: int) -> int:
            return parameters_left(model, sites, Plan(self.sites, tuple(sorted(_first(steps, number)))), edges)

        if left(0) <= target:
            raise InvalidPlan(f"--target-parameters {target}: the model has only {left(0)}")
        if (least := left(len(steps))) > target:
            raise ThresholdError(
                f"--target-parameters {target} cannot be met: {least} are left when all heads that may go are gone",
                hint="heads are only part of a model; lower --min-heads or raise the target",
            )
        low, high = 0, len(steps)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if left(middle) <= target else (middle, high)
        return _first(steps, high)


def _first(steps: Sequence[tuple[HeadId, ...]], number: int) -> tuple[HeadId, ...]:
    return tuple(head for step in steps[:number] for head in step)


LOOK_AHEAD = 3
"""Steps behind a limit that are tried too: what is lost does not grow evenly."""


def most(count: int, bears: Callable[[int], bool]) -> int:
    """The largest number of steps that was seen to be bearable: by bisection, then a few steps further on."""
    low, high = 0, count + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bears(middle) else (low, middle)
    ahead = low + 1
    while ahead < min(low + 1 + LOOK_AHEAD, count):
        ahead += 1
        if bears(ahead):
            low = ahead
    return low
