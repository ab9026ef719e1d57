"""Alignment of key/value heads: the maps that turn the heads of a group so that they are as alike as they can be.

A map `R` of a head turns its vectors `x` (rows) into `x R`. Which maps leave the model's outputs alone depends on what
it does with the vectors: values may be turned by any orthogonal map, since the output projection turns them back;
keys too, together with their queries, unless positions are told by rotations of pairs of features, which only
rotations of the same pairs commute with.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

SWEEPS = 200
"""Rounds over the heads of a group at most; each raises how alike they are."""
CONVERGED = 1e-12
"""The gain of a round, relative to what there is to gain, below which no other follows."""


class Family(StrEnum):
    """A set of maps, from the widest to the one that holds only the identity."""

    ORTHOGONAL = "orthogonal maps"
    HALVES = "rotations of the features i and i + d/2"
    INTERLEAVED = "rotations of the features 2i and 2i + 1"
    NONE = "no map"

    def nearest(self, target: Tensor) -> Tensor:
        """The map `R` of the family that maximises `tr(Rᵀ target)`; `target` is `[d d]`.

        Orthogonal: the polar factor (Schönemann 1966, the solution of the orthogonal Procrustes problem).
        """
        size = len(target)
        if self is Family.ORTHOGONAL:
            left, _, right = torch.linalg.svd(target)
            return left @ right
        if self is Family.NONE or size % 2:
            return torch.eye(size, dtype=target.dtype)
        order = torch.arange(size)
        first, second = order.view(2, -1) if self is Family.HALVES else order.view(-1, 2).T
        cosine = target[first, first] + target[second, second]
        sine = target[first, second] - target[second, first]
        length = torch.hypot(cosine, sine)
        still = length == 0
        cosine, sine = torch.where(still, 1.0, cosine / length), torch.where(still, 0.0, sine / length)
        found = torch.zeros_like(target)
        found[first, first] = found[second, second] = cosine
        found[first, second], found[second, first] = sine, -sine
        return found


def align(moments: Tensor, family: Family) -> Tensor:
    """Maps `[head d d]` of one family that make the heads of a group alike; that of the first is the identity.

    `moments` are `[head d head d]`, symmetric: means over tokens of products of two heads' features. The maps maximise
    `Σ_i<j tr(R_iᵀ S_ij R_j)`, which minimises the summed squared distance of the turned heads' vectors (generalised
    Procrustes, Gower 1975). Each round takes one head after the other and turns it to the sum of the rest, so that the
    sum never falls; a local maximum is found.
    """
    count, size = moments.shape[:2]
    maps = torch.zeros(count, size, size, dtype=moments.dtype)
    for head in range(count):  # each new head is turned to those before it
        pull = torch.einsum("ajc,jcd->ad", moments[head, :, :head], maps[:head])  # a, c, d: features; j: heads
        maps[head] = family.nearest(pull) if head else torch.eye(size, dtype=moments.dtype)
    reached = alikeness(moments, maps)
    scale = float(torch.einsum("iaia->", moments)) * count
    for _ in range(SWEEPS):
        for head in range(count):
            rest = maps.clone()
            rest[head] = 0.0
            maps[head] = family.nearest(torch.einsum("ajc,jcd->ad", moments[head], rest))
        before, reached = reached, alikeness(moments, maps)
        if reached - before <= CONVERGED * scale:
            break
    return maps @ maps[0].T.clone()


def alikeness(moments: Tensor, maps: Tensor) -> float:
    """`Σ_i≠j tr(R_iᵀ S_ij R_j)` of maps `[head d d]`: twice what `align` maximises."""
    turned = torch.einsum("iab,iajc,jcd->ibjd", maps, moments, maps)  # i, j: heads; the others: features
    return float(torch.einsum("ibjb->", turned) - torch.einsum("ibib->", turned))
