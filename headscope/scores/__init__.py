"""Scores: one number per head and column; a file here is a measure of the command line.

A score says what it takes from each example (`moments`) and how the means over all examples become its columns
(`finish`). Summing, splitting into halves and cutting into batches happen elsewhere, once for all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from headscope.columns import Column
from headscope.heads import Site
from headscope.matrices import HeadWeights


class Need(StrEnum):
    """What a score must see."""

    WEIGHTS = "weights"
    GRADIENT = "gradient"
    """The gate gradient of the task loss: needs labels."""
    SAMPLED = "sampled"
    """The gate gradient of labels drawn from the model's own prediction."""


@dataclass(frozen=True)
class Evidence:
    """What one batch showed at one site.

    `gate` is ⟨z, ∂L/∂z⟩ of the task loss, `[batch token head]`; `sampled` the gate gradient of the summed loss of drawn
    labels, `[draw batch head]`; `positions` the predicted positions of each example, `[batch]`.
    """

    site: Site
    positions: Tensor
    gate: Tensor | None = None
    sampled: Tensor | None = None


@dataclass(frozen=True)
class Means:
    """Means over examples by moment, `[head]` each in float64; `count` examples; the weights if asked for."""

    count: int
    values: Mapping[str, Tensor] = field(default_factory=dict)
    weights: HeadWeights | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]


@dataclass(frozen=True)
class Score:
    """One measure. `moments` are `[batch head]` each; `ranks` names the column whose stability is reported."""

    title: str
    columns: tuple[Column, ...]
    needs: frozenset[Need]
    moments: Callable[[Evidence], dict[str, Tensor]]
    finish: Callable[[Site, Means], dict[str, Tensor]]
    ranks: str = ""


def nothing(evidence: Evidence) -> dict[str, Tensor]:
    """The moments of a score that looks at no example."""
    return {}
