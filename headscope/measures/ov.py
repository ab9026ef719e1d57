"""Likeness of what two heads move: the cosine of their matrices `W_v W_o`, from the factors; 1 = the same.

Biases are left out.
"""

from __future__ import annotations

from headscope.circuits import Factors, Likeness, circuit
from headscope.columns import Column
from headscope.matrices import HeadWeights
from headscope.measures import Evidence, Measure


def _moved(weights: HeadWeights) -> Factors | None:
    output = None if weights.output is None else weights.output.transpose(1, 2)  # [head d_model d_value]
    return circuit(weights.value, output)


MEASURE = Measure(
    title="ov",
    column=Column("ov", "1", "cosine of the matrices W_v W_o of two heads (biases left out)"),
    evidence=Evidence.WEIGHTS,
    begin=lambda space: Likeness(space, _moved),
    least=-1.0,
)
