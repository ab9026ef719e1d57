"""Linear CKA with its standard error, from unbiased estimates of HSIC on groups of tokens (Song et al. 2012)."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.measures import PairValues
from headscope.shapes import Float


class Estimate:
    """Sums over groups of HSIC of all pairs, and of what its error needs."""

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 0
        self._own: list[Tensor] = []

    def add(self, kernels: Float[Tensor, "head token token"]) -> None:
        """Add the unbiased HSIC of one group."""
        n = self.size
        rows = kernels.sum(dim=2)
        totals = rows.sum(dim=1)
        flat = kernels.flatten(1)
        hsic = flat @ flat.T + torch.outer(totals, totals) / ((n - 1) * (n - 2)) - 2 / (n - 2) * rows @ rows.T
        hsic = (hsic / (n * (n - 3))).cpu()
        own = hsic.diagonal().clone()
        if not self.count:
            self._sum, self._square, self._with_own = (torch.zeros_like(hsic) for _ in range(3))
        self._sum += hsic
        self._square += hsic**2
        self._with_own += hsic * own[:, None]
        self._own.append(own)
        self.count += 1

    def finish(self) -> PairValues:
        """CKA and its standard error; the error is that of `u/√(s_a s_b) − ½ CKA (v_a/s_a + v_b/s_b)` over groups."""
        count = self.count
        mean, own = self._sum / count, torch.stack(self._own)  # [group head]
        level = mean.diagonal().clone()
        level[level <= 0] = torch.nan
        scale = (level[:, None] * level).sqrt()
        cka = mean / scale
        part = own / level  # [group head]
        cross = part.T @ part
        with_own = self._with_own / scale / level[:, None]
        mixed = with_own + with_own.T
        squares = self._square / scale**2 - cka * mixed
        own_squares = cross.diagonal()
        squares += cka**2 / 4 * (own_squares[:, None] + own_squares + 2 * cross)
        error = (squares.clamp_min(0) / (count * max(1, count - 1))).sqrt()
        return PairValues(cka.clamp(0, 1), error)
