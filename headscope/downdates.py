"""Features that are dropped one block after another while the others make up for them, without ever fitting again.

With the covariance `C` of all features and the cost `K` of errors in them (`K = W G Wᵀ` where `W` is what they are
multiplied by and `G` the cost of errors of the result), dropping the features `r` costs `½ tr(R K_rr)`: `R` is the
covariance of what the others and a constant cannot explain, the inverse of the block `r` of the precision `P = C⁻¹`.
The others then stand for `r` too: `P` loses a Schur complement, and `K` becomes that of the repaired `W`.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-4
"""Added to every variance, relative to their mean: so much of each feature no other can explain."""


class Survivors:
    """The features of one site that are still there; float64, two matrices `[feature feature]`."""

    def __init__(self, covariance: Tensor, cost: Tensor, *, ridge: float = RIDGE) -> None:
        scale = covariance.diagonal().mean()
        self.cost = cost.double().clone()
        if not bool(scale > 0):  # nothing ever varies, so nothing is lost
            self.precision = torch.eye(len(cost), dtype=torch.float64)
            self.cost.zero_()
            return
        held = covariance.double() + ridge * scale * torch.eye(len(cost), dtype=torch.float64)
        self.precision = torch.linalg.inv(held)
        self.precision = (self.precision + self.precision.T) / 2

    def price(self, block: Tensor) -> float:
        """What dropping the features at these indices would cost now."""
        precision, cost = self.precision[block][:, block], self.cost[block][:, block]
        return float(torch.linalg.solve(precision, cost).trace()) / 2

    def drop(self, block: Tensor) -> None:
        """Drop them; the others make up for them as well as they can."""
        rows = self.precision[block]  # [dropped feature]
        share = torch.linalg.solve(rows[:, block], rows)  # minus what each other feature takes over
        self.precision -= rows.T @ share
        crossed = share.T @ self.cost[block]
        inner = share.T @ self.cost[block][:, block] @ share
        self.cost += inner - crossed - crossed.T
        for matrix in (self.precision, self.cost):
            matrix[block] = 0.0
            matrix[:, block] = 0.0
