"""Likeness of what two heads look for: the cosine of their matrices `W_q W_kᵀ`, from the factors; 1 = the same.

Biases, norms of queries and keys, and rotary positions are left out.
"""

from __future__ import annotations

from headscope.circuits import circuit, cosines
from headscope.columns import Column
from headscope.measures import Evidence, Measure, PairValues
from headscope.pairs import HeadSpace


class QueryKey:
    """Looks at weights only."""

    def __init__(self, space: HeadSpace) -> None:
        self._space = space

    def add(self, part: object) -> None:
        """Data show nothing more."""

    def finish(self) -> PairValues:
        """The cosine of every pair; NaN where the widths differ or a head has no such matrices."""
        weights = [self._space.weights(site) for site in self._space.sites]
        return PairValues(cosines(self._space, [circuit(one.query, one.key) for one in weights]))


MEASURE = Measure(
    title="qk",
    column=Column("qk", "1", "cosine of the matrices W_q W_kᵀ of two heads (biases and rotary positions left out)"),
    evidence=Evidence.WEIGHTS,
    begin=QueryKey,
    least=-1.0,
)
