"""Greedy orders: what a step adds to a cost that depends on all earlier steps, and scores that rise in that order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headscope.heads import HeadId
from headscope.shapes import Float


@dataclass(frozen=True)
class Step:
    """A block of heads and what taking it adds to the cost, given the blocks before it."""

    heads: tuple[HeadId, ...]
    added: float


class Pool(Protocol):
    """Blocks whose costs depend on each other only; `heads[b]` are those of block `b`."""

    @property
    def heads(self) -> Sequence[tuple[HeadId, ...]]: ...

    def added(self, block: int) -> float:
        """What taking the block now would add to the cost."""
        ...

    def take(self, block: int) -> None:
        """Take it."""
        ...


def order(pools: Sequence[Pool]) -> Iterator[Step]:
    """The blocks of all pools, each time the one that adds least; of equal ones the first."""
    left = [list(range(len(pool.heads))) for pool in pools]
    prices = [{block: pool.added(block) for block in blocks} for pool, blocks in zip(pools, left, strict=True)]
    while any(prices):
        added, number, block = min(
            (price, number, block) for number, known in enumerate(prices) for block, price in known.items()
        )
        pool = pools[number]
        yield Step(pool.heads[block], added)
        pool.take(block)
        prices[number] = {other: pool.added(other) for other in prices[number] if other != block}


def rising(steps: Iterable[Step]) -> dict[HeadId, float]:
    """A score for every head: the most that any step so far has added, a little above the score before it.

    All heads of a step have one score and every later step a higher one, so that whoever takes the lowest scores takes
    the steps in their order.
    """
    found: dict[HeadId, float] = {}
    last = -math.inf
    for step in steps:
        last = max(step.added, math.nextafter(last, math.inf))
        found |= dict.fromkeys(step.heads, last)
    return found


class Quadratic:
    """Blocks whose joint cost is `½ 1ᵀ F 1` over the taken heads; `matrix` is F, `[head head]`."""

    def __init__(
        self, matrix: Float[Tensor, "head head"], places: Mapping[HeadId, int], heads: Sequence[tuple[HeadId, ...]]
    ) -> None:
        self.heads = heads
        members = torch.zeros(len(heads), len(matrix), dtype=matrix.dtype)
        for number, block in enumerate(heads):
            members[number, [places[head] for head in block]] = 1.0
        self._between = members @ matrix @ members.T  # [block block]
        self._added = self._between.diagonal() / 2
        self._prices: list[float] = self._added.tolist()

    def added(self, block: int) -> float:
        """½ of the block with itself, and the block with all that are gone."""
        return self._prices[block]

    def take(self, block: int) -> None:
        """Let the block be gone."""
        self._added = self._added + self._between[block]
        self._prices = self._added.tolist()
