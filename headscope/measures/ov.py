"""Likeness of what two heads move: the cosine of their matrices `W_v W_o`, from the factors; 1 = the same.

Biases are left out.
"""

from __future__ import annotations

from headscope.circuits import Factors, circuit, cosines
from headscope.columns import Column
from headscope.measures import Evidence, Measure, PairValues
from headscope.pairs import HeadSpace


class ValueOutput:
    """Looks at weights only."""

    def __init__(self, space: HeadSpace) -> None:
        self._space = space

    def add(self, part: object) -> None:
        """Data show nothing more."""

    def finish(self) -> PairValues:
        """The cosine of every pair; NaN where the widths differ or a head has no such matrices."""
        found: list[Factors | None] = []
        for site in self._space.sites:
            weights = self._space.weights(site)
            output = None if weights.output is None else weights.output.transpose(1, 2)  # [head d_model d_value]
            found.append(circuit(weights.value, output))
        return PairValues(cosines(self._space, found))


MEASURE = Measure(
    title="ov",
    column=Column("ov", "1", "cosine of the matrices W_v W_o of two heads (biases left out)"),
    evidence=Evidence.WEIGHTS,
    begin=ValueOutput,
    least=-1.0,
)
