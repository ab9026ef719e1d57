"""Measures: one number per pair of heads; a file here is a measure of `headscope similarity`.

A measure is begun once, shown its kind of evidence part by part, and finished once. What it is shown comes from one
running batch and is dropped at once, so memory does not grow with the number of texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from headscope.columns import Column
from headscope.pairs import HeadSpace
from headscope.shapes import Float, Int
from headscope.states import State


class Evidence(StrEnum):
    """What a measure looks at."""

    WEIGHTS = "weights"
    ROWS = "rows"
    """Attention rows, as `Shares`."""
    OUTPUTS = "outputs"
    """Head outputs, as `Outputs`."""


@dataclass(frozen=True)
class Shares:
    """Attention of some heads that have the same queries and the same keys, for some real queries of one text.

    A cell is one key of one query. A row's mass is divided by the number of real queries of its text, so that the cells
    of a head sum to one over a whole text; `texts` is what they sum to here. Where a sink takes mass outside the keys,
    it counts as one more key, so that every row is a distribution.
    """

    heads: Int[Tensor, " head"]
    cells: Float[Tensor, "head cell"]
    texts: float


@dataclass(frozen=True)
class Outputs:
    """Outputs z of all heads of some sites that have the same query tokens, at real tokens.

    `outputs[i]` is `[token head d_value]` of the site numbered `sites[i]`; `numbers` and `positions` say which example
    of the data a token stands in, and where.
    """

    sites: tuple[int, ...]
    outputs: tuple[Float[Tensor, "token _ _"], ...]
    numbers: Int[Tensor, " token"]
    positions: Int[Tensor, " token"]


@dataclass(frozen=True)
class PairValues:
    """A measure of all pairs, `[head head]` in float64, NaN where it is not defined.

    `error` is the standard error where the values are estimates, and None where they are exact.
    """

    values: Float[Tensor, "head head"]
    error: Float[Tensor, "head head"] | None = None
    notes: tuple[str, ...] = ()


@runtime_checkable
class PairSum(Protocol):
    """Sums over the data that become the values of one measure."""

    def add(self, part: Any) -> None:
        """Add what a part of a batch shows: `Shares` or `Outputs`, by what the measure looks at."""
        ...

    def state(self) -> State:
        """The sums so far; nothing is added after this."""
        ...

    def absorb(self, state: State) -> None:
        """Add the sums of other parts of the data; afterwards they count as if they had been added here."""
        ...

    @property
    def size(self) -> int:
        """Bytes that the state takes, at most."""
        ...

    def finish(self) -> PairValues:
        """The values of all pairs."""
        ...


@dataclass(frozen=True)
class Measure:
    """One measure: its column, what it looks at, how it begins, and the least value it can take (the largest is 1)."""

    title: str
    column: Column
    evidence: Evidence
    begin: Callable[[HeadSpace], PairSum]
    least: float = 0.0
    pairs: str = ""
    """Says which pairs are measured, where it is not every one: the sums of other pairs are no use to these."""
