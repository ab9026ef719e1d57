"""Likeness of the attention of two heads: one minus the Jensen–Shannon distance √(mean JS / ln 2); 1 = the same rows.

`JS(p, q) = ½ Σ p ln p + ½ Σ q ln q − Σ m ln m` with `m = ½(p + q)`: one logarithm for each cell of a pair. For all
pairs that is much work, so the nearest ones can be found in two passes over the data, and are exact all the same: the
first measures `hellinger`, whose bounds leave few `candidates`, the second measures JS of these alone (`Divergence`
with `pairs`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headscope.columns import Column
from headscope.measures import Evidence, Measure, PairValues, Shares
from headscope.pairs import Averaged, HeadSpace, PairMeans, Pairs, double
from headscope.shapes import Float

CELLS = 4096
"""Cells of a head that are compared at once: the heads' logarithms stay in the processor's cache."""
SLACK = 1e-5
"""Allowance for rounding in bounds: overlaps are products in the rows' own type, float32 or wider."""


class Divergence(Averaged):
    """Sums of JS for all pairs, or for some."""

    def __init__(self, space: HeadSpace, pairs: Pairs | None = None) -> None:
        self._means = PairMeans(space)
        self._wanted: Tensor | None = None
        if pairs is not None:
            self._wanted = torch.eye(len(space.heads), dtype=torch.bool)
            self._wanted[pairs.left, pairs.right] = self._wanted[pairs.right, pairs.left] = True

    def add(self, part: Shares) -> None:
        """Add the rows of a part."""
        wanted = None if self._wanted is None else self._wanted[part.heads][:, part.heads]
        each = [divergences(cells.contiguous(), wanted) for cells in part.cells.split(CELLS, dim=1)]
        self._means.add(part.heads, torch.stack(each).sum(dim=0), part.texts)

    def finish(self) -> PairValues:
        """`1 − √(mean JS / ln 2)` of every pair, NaN for pairs that were not wanted."""
        values = 1 - (self._means.means() / math.log(2)).clamp(0, 1).sqrt()
        if self._wanted is not None:
            values[~self._wanted] = torch.nan
        return PairValues(values)


def divergences(cells: Float[Tensor, "head cell"], wanted: Tensor | None = None) -> Float[Tensor, "head head"]:
    """Σ over cells of `½ p ln p + ½ q ln q − m ln m`, in nats, for all pairs or the `wanted` ones, else 0.

    It cancels cell by cell, so that equal heads differ by exactly nothing.
    """
    count = len(cells)
    half = 0.5 * cells  # of a pair: p/2 + q/2 = m
    half.clamp_min_(torch.finfo(cells.dtype).tiny)  # 0 log 0 is nothing: so small a number changes nothing
    own = cells.clamp_min(torch.finfo(cells.dtype).tiny).log_().mul_(half)
    total = cells.new_zeros(count, count)
    for head in range(count - 1):
        others = slice(head + 1, count) if wanted is None else head + 1 + wanted[head, head + 1 :].nonzero()[:, 0]
        middle = half[others] + half[head]
        if len(middle):
            each = own[others] + own[head]
            each -= middle.log().mul_(middle)
            total[head, others] = each.sum(dim=1)
    return double(total + total.T)


def candidates(overlap: Float[Tensor, "head head"], count: int) -> Pairs:
    """All pairs that can be among the `count` nearest by JS, given their overlap (`hellinger`); NaN never is.

    A pair is left out only if `count` others have an upper bound of JS below its lower bound. The nearest to one head
    are found with an overlap that is NaN but in that head's row.
    """
    left, right = torch.triu_indices(*overlap.shape, offset=1)
    gap = 1 - torch.fmax(overlap, overlap.T)[left, right]
    known = ~gap.isnan()
    left, right, gap = left[known], right[known], gap[known]
    if len(gap) > count > 0:
        least_upper = gap.kthvalue(count).values / math.log(2)
        kept = gap <= least_upper + SLACK
        left, right = left[kept], right[kept]
    return Pairs(left, right)


def highest(overlap: Float[Tensor, "head head"]) -> Float[Tensor, "head head"]:
    """The most that `attention` can be, given the overlap (`hellinger`) of the same rows."""
    return 1 - (1 - overlap - SLACK).clamp_min(0).sqrt()


MEASURE = Measure(
    title="attention",
    column=Column(
        "attention",
        "1",
        "one minus the Jensen–Shannon distance √(mean JS / ln 2) of two heads' attention; mean over a text's queries, "
        "then over texts; 1: the same; only for heads with the same queries and keys",
        "Clark et al. 2019, What Does BERT Look At?",
    ),
    evidence=Evidence.ROWS,
    begin=Divergence,
)
