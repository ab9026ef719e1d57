"""Likeness: which heads are alike in what they attend to and in what they write, as pairs, clusters or a matrix.

Only pairs that are reported need their exact `attention`. Where the nearest ones or those above a threshold are asked
for, a first pass bounds it for all pairs by `hellinger`, and a second one measures those that may be among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headscope import pairing, registry
from headscope.comparison import open_studies
from headscope.errors import UsageError
from headscope.heads import parse_heads
from headscope.measures import Evidence, Measure, PairValues
from headscope.measures.attention import Divergence, candidates, highest
from headscope.pair_sums import PairSums, load_measures
from headscope.pairing import Party
from headscope.pairs import Pairs
from headscope.study import Progress, Scores, Study, StudyOptions

ORDER = ("attention", "hellinger", "output", "cosine", "qk", "ov")
"""The order of columns; measures that are not listed come behind."""
ATTENTION, HELLINGER = "attention", "hellinger"


@dataclass(frozen=True)
class Question:
    """Which pairs to report, and by what; the defaults are those of the command line.

    The pairs most alike by the measure `by` (the first of `measures`) are wanted: the `top` ones, or those from
    `threshold` on, or all. `head` asks for the pairs of one head, `same_layer` for those inside a layer. `exact`
    measures every pair by every measure; `importance` adds that of both heads.
    """

    measures: tuple[str, ...] = ()
    by: str | None = None
    top: int | None = None
    threshold: float | None = None
    head: str | None = None
    same_layer: bool = False
    exact: bool = False
    importance: bool = False


@dataclass(frozen=True)
class Likeness:
    """Measures of pairs of heads: `values[measure]` are `[head head]`, NaN where not defined or not measured.

    `pairs` are those asked for, most alike first; `importance` holds the scores of each model, if they were asked for.
    """

    party: Party
    by: str
    values: Mapping[str, PairValues]
    pairs: Pairs
    importance: tuple[Scores, ...] = ()
    notes: tuple[str, ...] = ()
    compared: int = 0
    """Pairs whose `attention` was measured."""
    matched: Tensor | None = None
    """With two models, the one-to-one pairs that are most alike together, `[head head]`."""


def default_measures(data: bool) -> tuple[str, ...]:
    """All measures with data, else those of the weights, in the order of the report."""
    known = registry.names("measures")
    ordered = [name for name in ORDER if name in known] + [name for name in known if name not in ORDER]
    return tuple(name for name in ordered if data or not needs_data(name))


def needs_data(measure: str) -> bool:
    """Whether a measure looks at more than weights."""
    return load_measures([measure])[measure].evidence is not Evidence.WEIGHTS


def open_party(models: Sequence[str], data: str | None, options: StudyOptions) -> Party:
    """The heads of one or two models, which read the examples that were made for the first.

    Raises:
        UsageError: the models cannot read the same examples.
    """
    if data is not None:
        return Party(tuple(open_studies(models, data, options)))
    return Party(tuple(Study.open(model, None, options) for model in models))


def compare_heads(party: Party, question: Question, progress: Progress | None = None) -> Likeness:
    """Measure the pairs that a question asks for.

    Raises:
        UsageError: a measure or head is unknown, or needs data or labels that are not there.
    """
    return _Comparing(party, question, progress).run()


class _Comparing:
    """One question on its way to an answer."""

    def __init__(self, party: Party, question: Question, progress: Progress | None) -> None:
        self.party, self.question, self.progress = party, question, progress
        first = party.studies[0]
        names = question.measures or default_measures(first.examples is not None)
        self.measures = load_measures(names)
        self.by = next(iter(self.measures)) if question.by is None else question.by
        if self.by not in self.measures:
            raise UsageError(f"{self.by} is not measured, so it cannot order pairs", hint="add it to --measures")
        hungry = [*filter(needs_data, self.measures), *(["importance"] if question.importance else [])]
        if hungry and first.examples is None:
            raise UsageError(f"{', '.join(hungry)} cannot be measured without data", hint="give --data FILE")
        self.wanted = self._wanted()
        self.notes: list[str] = []
        self.importance: tuple[Scores, ...] = ()

    def _wanted(self) -> Tensor:
        """The pairs that may be reported, `[head head]`, each once."""
        mask = self.party.candidates()
        if self.question.same_layer:
            mask &= self.party.same_layer()
        if self.question.head is not None:
            place = self._place(self.question.head)
            own = torch.zeros(len(mask), dtype=torch.bool)
            own[place] = True
            mask &= own[:, None] | own
        return mask

    def _place(self, label: str) -> int:
        sites = self.party.studies[0].sites
        try:
            heads, _ = parse_heads(label, sites)
        except ValueError as error:
            raise UsageError(f"--head {label}: {error}", hint="headscope inspect MODEL lists the heads") from None
        if len(heads) != 1:
            raise UsageError(f"--head {label}: names {len(heads)} heads", hint="the nearest to one head are shown")
        return self.party.heads.index(heads[0])

    def run(self) -> Likeness:
        """Measure in one pass, or in two where the second needs few pairs."""
        asked = self.question
        chosen = (asked.top is not None or asked.threshold is not None) and len(self.party.studies) == 1
        twice = ATTENTION in self.measures and chosen and not asked.exact
        first = {name: one for name, one in self.measures.items() if not (twice and name == ATTENTION)}
        if twice and self.by == ATTENTION:
            first |= load_measures([HELLINGER])
        elif ATTENTION in first and (not asked.exact or len(self.party.studies) > 1):
            first[ATTENTION] = only(first[ATTENTION], self.wanted)
        found = self._measured(first, importance=asked.importance)
        if twice:
            near = self._near(found[HELLINGER].values) if self.by == ATTENTION else self._best(found[self.by].values)
            mask = torch.zeros_like(self.wanted)
            mask[near.left, near.right] = True
            found |= self._measured({ATTENTION: only(self.measures[ATTENTION], mask)})
        values = {name: found[name] for name in self.measures}
        compared = 0
        if ATTENTION in values:
            compared = int((values[ATTENTION].values.isfinite() & self.party.candidates()).sum())
        notes = [*self.notes, *(note for one in values.values() for note in one.notes)]
        matched = self._matched(values[self.by].values) if len(self.party.studies) > 1 else None
        pairs = self._best(values[self.by].values, matched)
        said = tuple(dict.fromkeys(notes))
        return Likeness(self.party, self.by, values, pairs, self.importance, said, compared, matched)

    def _measured(self, measures: Mapping[str, Measure], *, importance: bool = False) -> dict[str, PairValues]:
        """One pass for these measures; the first one serves the importance of a single model too."""
        sums = PairSums(self.party.space, measures)
        studies = self.party.studies
        if importance and len(studies) == 1:
            self.importance = (studies[0].scores(["importance"], pairs=sums, progress=self.progress),)
            self.notes += self.importance[0].notes
        elif any(map(needs_data, measures)):
            self.notes += pairing.run(self.party, sums, self.progress)
        if importance and len(studies) > 1:
            self.importance = tuple(study.scores(["importance"], progress=self.progress) for study in studies)
            self.notes += [note for scores in self.importance for note in scores.notes]
        return sums.finish()

    def _near(self, overlap: Tensor) -> Pairs:
        """The pairs that can be among those asked for, by the bounds of their overlap."""
        bounded = torch.where(self.wanted, overlap, torch.nan)
        if self.question.threshold is not None:
            bounded[highest(bounded) < self.question.threshold] = torch.nan
        return candidates(bounded, len(self.wanted) ** 2 if self.question.top is None else self.question.top)

    def _best(self, values: Tensor, matched: Tensor | None = None) -> Pairs:
        """The pairs asked for, matched ones first, the largest value first, pairs without one last."""
        left, right = self.wanted.nonzero(as_tuple=True)
        value = values[left, right]
        order = value.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
        if matched is not None:
            order = order[(~matched[left, right])[order].int().argsort(stable=True)]
        if self.question.threshold is not None:
            order = order[value[order] >= self.question.threshold]
        order = order[: self.question.top]
        return Pairs(left[order], right[order])

    def _matched(self, values: Tensor) -> Tensor:
        """Each head of one model with at most one of the other, so that the sum of their likeness is largest."""
        from scipy.optimize import linear_sum_assignment

        first = self.party.first
        block = values[:first, first:]
        rows, columns = linear_sum_assignment(block.nan_to_num(nan=-2.0).numpy(), maximize=True)
        mask = torch.zeros_like(self.wanted)
        mask[torch.as_tensor(rows), first + torch.as_tensor(columns)] = True
        return mask & values.isfinite()


def only(measure: Measure, wanted: Tensor) -> Measure:
    """Exact attention for the pairs of a mask alone; the whole measure where that is every pair."""
    if bool(wanted.triu(diagonal=1).sum() == len(wanted) * (len(wanted) - 1) // 2):
        return measure
    pairs = Pairs(*wanted.nonzero(as_tuple=True))
    digest = hashlib.sha256(wanted.numpy().tobytes()).hexdigest()
    return replace(measure, begin=partial(Divergence, pairs=pairs), pairs=digest)
