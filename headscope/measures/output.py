"""Likeness of what two heads write into the residual stream: linear CKA of `z_a W_o,a` and `z_b W_o,b`; 1 = the same up
to rotation and scale.

All real tokens, special ones included, are samples, and features are centred over all of them (Kornblith et al. 2019).
"""

from __future__ import annotations

from headscope import moments
from headscope.columns import Column
from headscope.measures import Evidence, Measure, PairSum
from headscope.pairs import HeadSpace


def begin(space: HeadSpace) -> PairSum:
    """Exact cross-moments where they fit into memory, else a sample of tokens whose values carry a standard error."""
    fits = moments.moment_bytes(space) <= moments.MOMENT_BYTES
    return moments.CrossMoments(space) if fits else moments.TokenSample(space)


MEASURE = Measure(
    title="output",
    column=Column(
        "output",
        "1",
        "linear CKA of what two heads write (z W_o), over all real tokens; 1: the same up to rotation and scale; only "
        "for heads with the same query tokens",
        "Kornblith et al. 2019, Similarity of Neural Network Representations Revisited",
    ),
    evidence=Evidence.OUTPUTS,
    begin=begin,
)
