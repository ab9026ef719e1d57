"""Random subsets of exactly k heads, ruled by a learned weight for each block of heads, and the gradient towards it.

Differentiable subset pruning (Li et al. 2021): Gumbel noise is added to the log-weights, and the largest sums are open,
which draws subsets without replacement. Open and closed have no gradient; that of the nearest relaxation takes its
place, the limited multi-label projection (Amos et al. 2019): `σ(s − t)` with `t` such that the gates sum to k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.shapes import Float

HALVINGS = 64
"""Of the bracket around a threshold: as many as double precision can tell apart."""


def gumbel(uniforms: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Gumbel noise from numbers in [0, 1)."""
    return -torch.log(-torch.log(uniforms.clamp_min(torch.finfo(uniforms.dtype).tiny)))


def opened(
    sums: Float[Tensor, "draw block"], sizes: Float[Tensor, " block"], count: Float[Tensor, " draw"]
) -> Float[Tensor, "draw block"]:
    """1 for the largest blocks that have at most `count` heads together, 0 for the others."""
    order = sums.argsort(dim=1, descending=True, stable=True)
    fits = sizes[order].cumsum(dim=1) <= count[:, None]
    return torch.zeros_like(sums).scatter(1, order, fits.to(sums))


def relaxed(
    sums: Float[Tensor, "draw block"], sizes: Float[Tensor, " block"], count: Float[Tensor, " draw"]
) -> Float[Tensor, "draw block"]:
    """Gates in (0, 1), the larger the sum the wider open, with `count` heads open in all (more than 0, not all)."""
    share = (count / sizes.sum()).logit()
    low, high = sums.amin(dim=1) - share, sums.amax(dim=1) - share
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        wide = ((sums - middle[:, None]).sigmoid() * sizes).sum(dim=1) > count
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    return (sums - high[:, None]).sigmoid()


def pull_back(
    gates: Float[Tensor, "draw block"], sizes: Float[Tensor, " block"], pulls: Float[Tensor, "draw block"]
) -> Float[Tensor, "draw block"]:
    """The gradient towards the sums, from `pulls`, one towards the relaxed gates.

    The number of open heads stays: a block is pulled by what its gate is pulled more than the others at the threshold.
    """
    slope = gates * (1 - gates)
    mean = (slope * pulls).sum(dim=1) / (slope * sizes).sum(dim=1).clamp_min(torch.finfo(slope.dtype).tiny)
    return slope * (pulls - mean[:, None] * sizes)
