"""Criteria: an order of removal, one score per head of which the lowest goes first; a file here is a `--criterion`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope import registry
from headscope.errors import UsageError, nearest
from headscope.heads import HeadId

if TYPE_CHECKING:
    from headscope.study import Study

Ranking = Callable[["Study", int], Mapping[HeadId, float]]
"""A score for every head of a study, lowest goes first; the number is a seed."""


@dataclass(frozen=True)
class Criterion:
    """One order of removal: what it asks of a head, and of the data."""

    title: str
    meaning: str
    needs_labels: bool
    needs_data: bool
    scores: Ranking


def column_of(measure: str, column: str) -> Ranking:
    """The ranking by one column of a measure of `inspect`."""

    def scores(study: Study, seed: int) -> Mapping[HeadId, float]:
        values = study.scores([measure]).values[column]
        return {
            head: score
            for site in study.sites
            for head, score in zip(site.heads, values[site.id].tolist(), strict=True)
        }

    return scores


def choose_criterion(name: str, labelled: bool) -> str:
    """The name of a criterion; `auto` is importance where the data has labels for the model, else sensitivity.

    Raises:
        UsageError: there is no such criterion.
    """
    known = registry.names("criteria")
    if name == "auto":
        return "importance" if labelled else "sensitivity"
    if name not in known:
        raise UsageError(f"no criterion {name!r}", hint=nearest(name, ["auto", *known]))
    return name


def load_criterion(name: str) -> Criterion:
    """The criterion in the file of that name."""
    return registry.load("criteria", name, "CRITERION")
