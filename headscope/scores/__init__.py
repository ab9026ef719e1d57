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
from headscope.heads import Site, SiteId
from headscope.matrices import HeadWeights
from headscope.shapes import Bool, Float, Int


class Need(StrEnum):
    """What a score must see."""

    WEIGHTS = "weights"
    GRADIENT = "gradient"
    """The gate gradient of the task loss: needs labels."""
    ROWS = "rows"
    """Attention rows."""
    SAMPLED = "sampled"
    """The gate gradient of labels drawn from the model's own prediction."""
    ALONE = "alone"
    """The loss with each head alone in its site: needs labels, and a forward pass for each head."""
    ABLATED = "ablated"
    """The change of the loss without each head: needs labels, and about half a forward pass for each head."""


LABELS = frozenset({Need.GRADIENT, Need.ALONE, Need.ABLATED})
"""What cannot be seen without labels."""
GATED = frozenset({Need.ALONE, Need.ABLATED})
"""What needs passes of its own, with gated heads."""


@dataclass(frozen=True)
class RowBlock:
    """Attention rows of a few queries, with what stands at their positions.

    `positions` are the queries' places in their sequence; `visible` says which keys a query may look at (padding is not
    visible), `real` which queries are no padding, `special` which keys are special tokens. Tokens are None where the
    sequence is no text. `logits` are log A up to a constant of each query, its largest 0, where that is known.
    """

    site: Site
    positions: Int[Tensor, " query"]
    rows: Float[Tensor, "sequence head query key"]
    visible: Bool[Tensor, "#sequence query key"]
    real: Bool[Tensor, "sequence query"]
    query_tokens: Int[Tensor, "sequence query"] | None = None
    key_tokens: Int[Tensor, "sequence key"] | None = None
    special: Bool[Tensor, "sequence key"] | None = None
    logits: Float[Tensor, "sequence head query key"] | None = None
    first: int = 0
    """The place of the first query, which a device need not be asked for."""


@dataclass(frozen=True)
class Evidence:
    """What one batch showed at one site.

    `gate` is ⟨z, ∂L/∂z⟩ of the task loss, `sampled` the gate gradient of the summed loss of drawn labels, `positions`
    the predicted positions of each example, `rows` what the scores summed over attention rows, `[batch head]` each,
    `alone` the loss of each example with only that head left in the site, `ablated` what its loss gains without it.
    """

    site: Site
    positions: Int[Tensor, " batch"]
    gate: Float[Tensor, "batch token head"] | None = None
    sampled: Float[Tensor, "draw batch head"] | None = None
    rows: Mapping[str, Tensor] | None = None
    alone: Float[Tensor, "batch head"] | None = None
    ablated: Float[Tensor, "batch head"] | None = None


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
    """One measure. `moments` are `[batch head]` each, NaN where an example has none; `ranks` names the column whose
    stability is reported.
    """

    title: str
    columns: tuple[Column, ...]
    needs: frozenset[Need]
    moments: Callable[[Evidence], dict[str, Tensor]]
    finish: Callable[[Site, Means], dict[str, Tensor]]
    ranks: str = ""
    rows: Callable[[RowBlock], dict[str, Tensor]] | None = None
    """Sums over the real queries of a block, `[sequence head]` each, for scores that look at attention rows."""


@dataclass(frozen=True)
class Scores:
    """What the measures gave: `values[column][site]` is `[head]` in float64.

    `stability` is the Spearman correlation between the rankings of two random halves of the examples, by column.
    """

    measures: tuple[str, ...]
    values: Mapping[str, Mapping[SiteId, Tensor]]
    stability: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None
    examples: int = 0
    notes: tuple[str, ...] = ()


def nothing(evidence: Evidence) -> dict[str, Tensor]:
    """The moments of a score that looks at no example."""
    return {}


def task_gradient(evidence: Evidence) -> Float[Tensor, "batch token head"]:
    """⟨z, ∂L/∂z⟩ of the task loss at each token, in float64."""
    assert evidence.gate is not None
    return evidence.gate.double()


def drawn_square(evidence: Evidence) -> Float[Tensor, "batch head"]:
    """Each example's share of the sensitivity: (1/T)·(Σ_t ∂ℓ_t/∂ξ)², the mean over draws, in float64."""
    assert evidence.sampled is not None
    square = evidence.sampled.double().square().mean(dim=0)
    return square / evidence.positions.clamp_min(1).to(square)[:, None]
