"""Likeness of what two heads look for: the cosine of their matrices `W_q W_kᵀ`, from the factors; 1 = the same.

Biases, norms of queries and keys, and rotary positions are left out.
"""

from __future__ import annotations

from headscope.circuits import Likeness, circuit
from headscope.columns import Column
from headscope.measures import Evidence, Measure

MEASURE = Measure(
    title="qk",
    column=Column("qk", "1", "cosine of the matrices W_q W_kᵀ of two heads (biases and rotary positions left out)"),
    evidence=Evidence.WEIGHTS,
    begin=lambda space: Likeness(space, lambda one: circuit(one.query, one.key)),
    least=-1.0,
)
