"""Curves: what a model loses as more and more of its heads go, by one criterion with and without repair, by Michel's
order, by the same normalised within each layer, and at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from headscope.card import Quality
from headscope.choice import Rules, bounded_order
from headscope.counts import total_heads
from headscope.criteria import by_head, choose_criterion, load_criterion
from headscope.errors import UsageError
from headscope.heads import HeadId
from headscope.models import load
from headscope.offload import require_in_memory
from headscope.plan import Plan, SiteHeads
from headscope.prepared import Prepared, prepare
from headscope.provenance import Provenance
from headscope.pruning import PruneOptions
from headscope.score_files import read_scores
from headscope.selection import able_sites
from headscope.study import Progress, Scores
from headscope.trials import Trials, Verdict
from headscope.units import blocks

COLUMNS = {"importance": "importance", "importance-layer-norm": "importance_layer_norm"}
"""The column of the measure importance behind each series that goes with every curve."""
WITHOUT_LABELS = {"sensitivity": "sensitivity"}
"""The same of the measure sensitivity, where importance cannot be measured."""
RANDOM = tuple(f"random-{seed}" for seed in range(3))
"""Random orders, each named by its seed."""
_STEP = Fraction(1, 10)


@dataclass(frozen=True)
class Point:
    """So many heads gone, and how the model does without them on held-out examples."""

    removed: int
    quality: Quality


@dataclass(frozen=True)
class Series:
    """One order of removal, repaired or not; the first of its `points` is the whole model, then `removed` grows."""

    criterion: str
    repair: bool
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Curve:
    """The trade-off of a model of so many `heads`, judged on so many `examples`; the criterion asked for comes first.

    `unit` is that of the divergence.
    """

    heads: int
    examples: int
    series: tuple[Series, ...]
    unit: str
    provenance: Provenance
    notes: tuple[str, ...] = ()

    @property
    def criterion(self) -> str:
        """The criterion asked for, `auto` resolved."""
        return self.series[0].criterion

    @property
    def whole(self) -> Quality:
        """How the whole model does."""
        return self.series[0].points[0].quality


def trade_off(model: str, data: str | None, options: PruneOptions, progress: Progress | None = None) -> Curve:
    """The curve up to the request's ratio, in steps of 0.1; nothing is written, and scores are made once.

    Raises:
        HeadscopeError: the model or the data cannot be used, or no head can be removed.
    """
    return Tracing.open(model, data, options, progress).curve()


class Tracing:
    """The way from one model and its data to a curve; `asked` is the criterion asked for, `auto` resolved."""

    @classmethod
    def open(cls, model: str, data: str | None, options: PruneOptions, progress: Progress | None = None) -> Tracing:
        """Load the model, and read the data; nothing is run on them.

        Raises:
            HeadscopeError: the model or the data cannot be used.
        """
        if data is None:
            raise UsageError("a curve is judged on data, and there is none", hint="give --data FILE")
        loaded = load(model, options.study.load)
        require_in_memory(loaded.model, "a curve")
        prepared = prepare(loaded, data, options.study, eval_data=options.eval_data, compensate=options.compensate)
        prepared.require_metric(options.metric)
        return cls(prepared, options, progress)

    def __init__(self, prepared: Prepared, options: PruneOptions, progress: Progress | None) -> None:
        self.study, self.mender, self.request = prepared.study, prepared.mender, options.request
        self.judging, self.progress = prepared.judging, progress
        self.study.progress = progress
        self.done = self.total = 0
        request, examples = self.request, self.study.examples
        self.labelled = examples is not None and examples.labelled
        self.asked = "scores" if request.scores is not None else choose_criterion(request.criterion, self.labelled)
        self.rules = Rules(request.scope, request.unit, request.min_heads, structural=not request.masked)
        self.able = able_sites(self.study, masked=request.masked)
        self.sites = tuple(SiteHeads.of(site) for site in self.study.sites)
        self.trials = Trials(self.judging, options.metric, self.mender)
        self.notes = [*self.study.loaded.notes, *prepared.notes]
        if len(self.able) < len(self.sites):
            self.notes.append(f"{len(self.sites) - len(self.able)} sites whose heads are coupled keep all of them")
        self.notes += [f"not analysed: {problem}" for problem in self.study.discovery.problems]

    def curve(self) -> Curve:
        """Every series, each from one ranking."""
        examples = self.trials.whole.examples  # judged first: a metric that does not fit is refused at once
        plans = {name: self.plans(scores) for name, scores in self.rankings().items()}
        self.total = sum(map(len, plans.values()))
        series: list[Series] = []
        for name, own in plans.items():
            mended = name == self.asked and self.mender is not None
            series += self._repaired(name, own) if mended else self._bare(name, own)
        return Curve(
            heads=total_heads(self.sites),
            examples=examples,
            series=tuple(series),
            unit=self.trials.unit,
            provenance=self.study.provenance(),
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def rankings(self) -> dict[str, Mapping[HeadId, float]]:
        """A score for every head, lowest goes first, by the name of its series, the one asked for first.

        Columns of one measure are made in one pass over the data.
        """
        found = self.study.scores(["importance" if self.labelled else "sensitivity"])
        rankings = {self.asked: self._asked_for(found)}
        for title, column in self.columns.items():
            rankings.setdefault(title, by_head(self.study, found.values[column]))
        random = load_criterion("random")
        return rankings | {title: random.scores(self.study, seed) for seed, title in enumerate(RANDOM)}

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns of the one measure whose series go with every curve, by the names of the series."""
        return COLUMNS if self.labelled else WITHOUT_LABELS

    def _asked_for(self, found: Scores) -> Mapping[HeadId, float]:
        """The ranking of the criterion asked for, from the scores that are there already if it is one of them."""
        if self.request.scores is not None:
            assert self.request.by is not None
            heads = [head for site in self.study.sites for head in site.heads]
            return read_scores(self.request.scores, self.request.by, heads)
        if self.asked in found.values:
            return by_head(self.study, found.values[self.asked])
        criterion, seed = load_criterion(self.asked), self.study.options.seed
        if criterion.greedy is None:
            return criterion.scores(self.study, seed)
        return criterion.greedy(self.study, seed, blocks(self.sites, self.rules))

    def plans(self, scores: Mapping[HeadId, float]) -> list[Plan]:
        """Plans along one order of removal, each within the next; the first removes nothing.

        Raises:
            InvalidPlan: no head can be removed.
        """
        total = total_heads(self.sites)
        steps = bounded_order(self.able, scores, self.rules, total=total)
        counts = list(accumulate(map(len, steps), initial=0))
        rules = f"--scope {self.rules.scope}, --unit {self.rules.unit} and --min-heads {self.rules.min_heads}"
        assert self.request.ratio is not None
        furthest = Fraction(str(self.request.ratio))
        if counts[-1] < furthest * total:
            self.notes.append(f"the curve ends at {counts[-1]} of {total} heads: no more can go with {rules}")
        shares = [number * _STEP for number in range(int(furthest / _STEP) + 1)]
        places = sorted({_nearest(counts, share * total) for share in shares})
        return [Plan(self.sites, tuple(sorted(head for step in steps[:place] for head in step))) for place in places]

    def _bare(self, name: str, plans: Sequence[Plan]) -> list[Series]:
        """Without repair, all plans in one pass."""
        qualities = self.trials.compared(plans)[1:]
        self._tell(len(plans))
        return [Series(name, False, _points(plans, qualities))]

    def _repaired(self, name: str, plans: Sequence[Plan]) -> list[Series]:
        """With repair, one plan after the other, and without."""
        verdicts: list[Verdict] = []
        for plan in plans:
            verdicts.append(self.trials.judged(plan))
            self._tell(1)
        repairs = [verdict.repair for verdict in verdicts[1:]]
        self.notes += [note for repair in repairs if repair is not None for note in repair.notes]
        if None in repairs:
            listing = ", ".join(str(len(plan.removed)) for plan, one in zip(plans[1:], repairs, strict=True) if not one)
            self.notes.append(f"no repair helps with {listing} heads gone: these rows are without one")
        return [
            Series(name, True, _points(plans, [verdict.final for verdict in verdicts])),
            Series(name, False, _points(plans, [verdict.pruned for verdict in verdicts])),
        ]

    def _tell(self, plans: int) -> None:
        """So many more plans are judged, each on all examples."""
        self.done += plans
        if self.progress is not None:
            examples = self.trials.whole.examples
            self.progress(self.done * examples, self.total * examples)


def _points(plans: Sequence[Plan], qualities: Sequence[Quality]) -> tuple[Point, ...]:
    return tuple(Point(len(plan.removed), quality) for plan, quality in zip(plans, qualities, strict=True))


def _nearest(counts: Sequence[int], heads: Fraction) -> int:
    """The place of the count nearest to `heads`; the larger of two, as `--ratio` rounds."""
    return min(range(len(counts)), key=lambda place: (abs(counts[place] - heads), -counts[place]))
