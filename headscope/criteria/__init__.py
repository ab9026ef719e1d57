"""Criteria: an order of removal, one score per head of which the lowest goes first; a file here is a `--criterion`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope import registry
from headscope.errors import UsageError, nearest
from headscope.heads import HeadId, SiteId

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.study import Study

Ranking = Callable[["Study", int], Mapping[HeadId, float]]
"""A score for every head of a study, lowest goes first; the number is a seed."""

Block = tuple[HeadId, ...]
"""Heads that go together: one head or one key/value group, in all layers that share its module."""
Greedy = Callable[["Study", int, Sequence[Block]], Mapping[HeadId, float]]
"""Scores of the heads in blocks, equal within a block and rising in the order in which a greedy choice takes them."""


@dataclass(frozen=True)
class Criterion:
    """One order of removal: what it asks of a head, and of the data.

    `greedy` is given where what a head is worth depends on which others are gone; `scores` then takes one head a time.
    """

    title: str
    meaning: str
    needs_labels: bool
    needs_data: bool
    scores: Ranking
    greedy: Greedy | None = None
    cheap: bool = False
    """Whether it takes so few passes that `auto` tries it."""

    @property
    def shared(self) -> bool:
        """Whether its passes are those of a measure, which the share of the study divides and keeps."""
        return isinstance(self.scores, _Column)


@dataclass(frozen=True)
class _Column:
    """The ranking by one column of a measure of `inspect`."""

    measure: str
    column: str

    def __call__(self, study: Study, seed: int) -> Mapping[HeadId, float]:
        return by_head(study, study.scores([self.measure]).values[self.column])


def column_of(measure: str, column: str) -> Ranking:
    """The ranking by one column of a measure of `inspect`."""
    return _Column(measure, column)


def by_head(study: Study, values: Mapping[SiteId, Tensor]) -> Mapping[HeadId, float]:
    """One column of a study's scores, `[head]` by site, under the heads' original numbers."""
    return {
        head: score for site in study.sites for head, score in zip(site.heads, values[site.id].tolist(), strict=True)
    }


def one_by_one(greedy: Greedy) -> Ranking:
    """The ranking by a greedy choice that takes single heads."""

    def scores(study: Study, seed: int) -> Mapping[HeadId, float]:
        blocks = [
            tuple(HeadId(label, head.index) for label in (site.id, *site.shared_with))
            for site in study.sites
            if not site.call
            for head in site.heads
        ]
        found = greedy(study, seed, blocks)
        return {head: found[head] for site in study.sites for head in site.heads}

    return scores


def choose_criterion(name: str, labelled: bool) -> str:
    """The name of a criterion; without anything to measure by, `auto` is importance, or sensitivity without labels.

    Raises:
        UsageError: there is no such criterion.
    """
    known = registry.names("criteria")
    if name == "auto":
        return "importance" if labelled else "sensitivity"
    if name not in known:
        raise UsageError(f"no criterion {name!r}", hint=nearest(name, ["auto", *known]))
    return name


def candidates(labelled: bool) -> tuple[str, ...]:
    """The criteria that `auto` measures against each other: the usual one, and those that a few passes give."""
    usual = choose_criterion("auto", labelled)
    known = {name: load_criterion(name) for name in registry.names("criteria")}
    cheap = [name for name, one in known.items() if one.cheap and (labelled or not one.needs_labels)]
    return tuple(dict.fromkeys([usual, *cheap]))


def load_criterion(name: str) -> Criterion:
    """The criterion in the file of that name."""
    return registry.load("criteria", name, "CRITERION")
