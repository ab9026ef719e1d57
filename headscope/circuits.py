"""Inner products of the heads' circuits `W_q W_kᵀ` or `W_v W_o`, from their factors: no such matrix is ever held whole.

Two exact forms, the cheaper is taken. Factored: `⟨A Bᵀ, C Dᵀ⟩ = Σ (Aᵀ C) ∘ (Bᵀ D)`, two products of a head's width for
each pair. Row-blocked: a few rows of every circuit at a time, and one product of these for all pairs; cheaper unless
the model is wider than the square of a head's width. The factors of all heads are held at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.heads import AttentionKind
from headscope.matrices import HeadWeights
from headscope.measures import PairValues
from headscope.pairs import HeadSpace, double, normalised
from headscope.shapes import Float
from headscope.states import State

BLOCK_VALUES = 2**22
"""Values of circuits that are held at once: 16 MiB in float32."""


@dataclass(frozen=True)
class Factors:
    """The circuits `left rightᵀ` of one site's heads."""

    left: Float[Tensor, "head d_left rank"]
    right: Float[Tensor, "head d_right rank"]


def circuit(left: Tensor | None, right: Tensor | None) -> Factors | None:
    """The circuits of two stacks of matrices, or None where there are none or their inner widths differ."""
    if left is None or right is None or left.shape[-1] != right.shape[-1]:
        return None
    return Factors(left, right)


class Likeness:
    """The cosine of one circuit of every pair of heads, from weights alone; `pick` takes it from a site's matrices."""

    def __init__(self, space: HeadSpace, pick: Callable[[HeadWeights], Factors | None]) -> None:
        self._space, self._pick = space, pick

    def add(self, part: object) -> None:
        """Data show nothing more."""

    def state(self) -> State:
        """Nothing: what is known are the weights."""
        return {}

    def absorb(self, state: State) -> None:
        """Others know nothing more either."""

    @property
    def size(self) -> int:
        """Bytes of the state: none."""
        return 0

    def finish(self) -> PairValues:
        """The cosine of every pair; NaN where the widths differ or a head has no such matrices."""
        return PairValues(cosines(self._space, [self._pick(self._space.weights(site)) for site in self._space.sites]))


def cosines(space: HeadSpace, factors: Sequence[Factors | None]) -> Float[Tensor, "head head"]:
    """`⟨M_a, M_b⟩ / (‖M_a‖ ‖M_b‖)` of all pairs; NaN where a circuit is unknown or zero, or widths differ.

    Circuits that read a compressed stream of their own layer (latent attention) are compared within it only: the axes
    of another layer's mean something else.
    """
    table = torch.full_like(space.blank(), torch.nan)
    widths: dict[tuple[int, int, int | None], list[int]] = {}
    for number, (site, one) in enumerate(zip(space.sites, factors, strict=True)):
        if one is not None:
            d_left, d_right = one.left.shape[1], one.right.shape[1]
            inner = site.id.kind is not AttentionKind.CROSS and {d_left, d_right} != {site.d_model}
            widths.setdefault((d_left, d_right, number if inner else None), []).append(number)
    for numbers in widths.values():
        places = space.places_of(tuple(numbers))
        group = [one for number in numbers if (one := factors[number]) is not None]
        inner = factored(group) if _narrow(group) else row_blocked(group)
        table[places[:, None], places] = normalised(inner.cpu()).clamp(-1, 1)
    return table


def _narrow(group: Sequence[Factors]) -> bool:
    """Whether the factored form takes fewer multiplications."""
    heads = sum(len(one.left) for one in group)
    d_left, d_right = group[0].left.shape[1], group[0].right.shape[1]
    rank = max(one.left.shape[2] for one in group)
    return heads**2 * rank**2 * (d_left + d_right) < 2 * heads * (heads + rank) * d_left * d_right


def factored(group: Sequence[Factors]) -> Float[Tensor, "head head"]:
    """Inner products of all pairs, site by site, from `(Aᵀ C) ∘ (Bᵀ D)`."""
    rows = [
        torch.cat([_product(one, other) if j >= i else _product(other, one).T for j, other in enumerate(group)], 1)
        for i, one in enumerate(group)
    ]
    return torch.cat(rows)


def _product(one: Factors, other: Factors) -> Tensor:
    """Inner products of the heads of two sites, `[head head]`."""
    both = [torch.einsum("adr,bds->arbs", a, b) for a, b in ((one.left, other.left), (one.right, other.right))]
    return double(both[0] * both[1]).sum(dim=(1, 3))  # a, b: heads; r, s: their widths; d: the model's


def row_blocked(group: Sequence[Factors]) -> Float[Tensor, "head head"]:
    """Inner products of all pairs from a few rows of every circuit at a time."""
    heads, d_left, d_right = sum(len(one.left) for one in group), group[0].left.shape[1], group[0].right.shape[1]
    size = max(1, BLOCK_VALUES // (heads * d_right))
    total = 0
    for first in range(0, d_left, size):
        parts = [one.left[:, first : first + size] @ one.right.transpose(1, 2) for one in group]
        rows = torch.cat([part.flatten(1) for part in parts])
        total = total + double(rows @ rows.T)
    assert isinstance(total, Tensor)
    return total
