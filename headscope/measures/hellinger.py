"""Overlap of the attention of two heads, the mean of Σ_s √(A_a A_b) (Bhattacharyya): all pairs by one matrix product.

It bounds the Jensen–Shannon divergence of the two, row by row and so in the mean:
`1 − hellinger ≤ JS / ln 2 ≤ (1 − hellinger) / ln 2`.
"""

from __future__ import annotations

from headscope.columns import Column
from headscope.measures import Evidence, Measure, PairValues, Shares
from headscope.pairs import Averaged, HeadSpace, PairMeans


class Overlap(Averaged):
    """Sums of √(A_a A_b) for all pairs."""

    def __init__(self, space: HeadSpace) -> None:
        self._means = PairMeans(space)

    def add(self, part: Shares) -> None:
        """Add the rows of a part."""
        roots = part.cells.sqrt()
        self._means.add(part.heads, roots @ roots.T, part.texts)

    def finish(self) -> PairValues:
        """The mean overlap of every pair."""
        return PairValues(self._means.means().clamp(0, 1))


MEASURE = Measure(
    title="hellinger",
    column=Column(
        "hellinger",
        "1",
        "mean overlap Σ_s √(A_a A_b) of two heads' attention, over a text's queries and then over texts; 1: the same",
        "Bhattacharyya 1943",
    ),
    evidence=Evidence.ROWS,
    begin=Overlap,
)
