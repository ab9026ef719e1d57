"""Ridge least squares from streamed moments: the change of a linear map that best makes up for what its output lacks.

With features `x` of each token (a constant last, where there is a bias) and the lack `r`, the change `Δ` minimises
`Σ ‖r − xᵀΔ‖² + λ s ‖Δ‖²`: λ is the ridge, `s` the summed square of a feature, the mean over features; the constant is
not held back. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Ridges that are tried, relative to the mean square of a feature."""


@dataclass(frozen=True)
class Moments:
    """Sums over tokens: `products` of features `[feature feature]`, `cross` of features and lack `[feature d_model]`,
    the summed `square` of the lack, and how many `tokens` there were, each times its weight. `constant`: whether the
    last feature is always 1.
    """

    products: Tensor
    cross: Tensor
    square: Tensor
    tokens: float
    constant: bool

    @classmethod
    def of(cls, features: Tensor, lack: Tensor, *, constant: bool, weights: Tensor | None = None) -> Moments:
        """The moments of features `[token feature]`, to which a constant may be added, and a lack `[token d_model]`.

        `weights` are `[token]`; all 1 by default.
        """
        x, r = exact(features), exact(lack)
        if constant:
            x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        if weights is None:
            return cls(x.T @ x, x.T @ r, r.square().sum(), len(x), constant)
        each = weights.to(x)[:, None]
        return cls(x.T @ (each * x), x.T @ (each * r), (each * r * r).sum(), float(each.sum()), constant)

    def __add__(self, other: Moments) -> Moments:
        products, cross = self.products + other.products, self.cross + other.cross
        return Moments(products, cross, self.square + other.square, self.tokens + other.tokens, self.constant)

    def change(self, ridge: float) -> Tensor | None:
        """The best change `[feature d_model]`; None where all features are 0."""
        penalty = torch.full_like(self.products.diagonal(), ridge)
        features = len(penalty) - self.constant
        penalty *= self.products.diagonal()[:features].mean()
        if self.constant:
            penalty[-1] = 0.0
        if not bool(penalty[:features].gt(0).all()):
            return None
        return torch.linalg.solve(self.products + torch.diag(penalty), self.cross)

    def error(self, change: Tensor) -> float:
        """What still lacks after a change: squared, summed over the width, the weighted mean over tokens."""
        left = self.square - 2 * (change * self.cross).sum() + (change * (self.products @ change)).sum()
        return float(left.clamp_min(0)) / (self.tokens or 1)

    @property
    def lack(self) -> float:
        """What lacks without a change, in the unit of `error`."""
        return float(self.square) / (self.tokens or 1)


@dataclass(frozen=True)
class Fit:
    """The new map that left the smallest error on held-out tokens, its ridge, and that error before and after."""

    map: Tensor
    ridge: float
    before: float
    after: float


def best(fitting: Moments, held: Moments, ridges: Sequence[float], start: Tensor, *, dtype: torch.dtype) -> Fit | None:
    """The map changed with the ridge that lowers the held-out error most; None where none lowers it.

    `start` is the map that is changed, `[feature d_model]`: errors are of the changed map as `dtype` holds it.
    """
    found: Fit | None = None
    for ridge in ridges:
        change = fitting.change(ridge)
        if change is None:
            return None
        new = (start + change).to(dtype).double()
        error = held.error(new - start)
        if error < (held.lack if found is None else found.after):
            found = Fit(new, ridge, held.lack, error)
    return found


def exact(values: Tensor) -> Tensor:
    """In float64, off devices that have none."""
    return values.cpu().double() if values.device.type == "mps" else values.double()
