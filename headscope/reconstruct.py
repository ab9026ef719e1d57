"""Greedy orders by reconstruction: heads go first whose outputs those that stay, repaired, can still put together.

What removing the heads `r` of a site costs is `½ tr(G W_o R W_oᵀ)`: `R` is the covariance of their outputs that the
remaining heads and a constant cannot explain, `G` the second moment of the gradient towards what the site writes,
summed over tokens, the mean over examples. It guesses to second order what a model loses whose output projections are
fitted anew. In sites whose heads are mixed before the projection, which no repair can follow, it is too low.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from headscope.criteria import Block
from headscope.downdates import RIDGE, Survivors
from headscope.greedy import order, rising
from headscope.heads import HeadId
from headscope.output_moments import SiteMoments, Weighting, feature_blocks, output_moments
from headscope.study import Study


class _Module:
    """The blocks of one module's heads, and what is left of its features."""

    def __init__(self, moments: SiteMoments, heads: Sequence[Block], ridge: float) -> None:
        self.heads = heads
        site = moments.layers[0]
        places = {head: place for place, head in enumerate(site.heads)}
        self._features: list[Tensor] = [
            feature_blocks(site, [places[head] for head in block if head in places]) for block in heads
        ]
        self._left = Survivors(moments.covariance, moments.cost, ridge=ridge)

    def added(self, block: int) -> float:
        """What the block's removal adds to the cost."""
        return self._left.price(self._features[block])

    def take(self, block: int) -> None:
        """Remove it, and let the others take over what they can."""
        self._left.drop(self._features[block])


def by(study: Study, blocks: Sequence[Block], *, weighting: Weighting, ridge: float = RIDGE) -> Mapping[HeadId, float]:
    """The same with another cost of errors, or another ridge on the variances.

    Raises:
        UsageError: there is no data.
        DataError: a loss or a gradient is not finite.
    """
    modules: list[_Module] = []
    for moments in output_moments(study, weighting):
        own = moments.layers[0].id
        modules.append(_Module(moments, [block for block in blocks if block[0].site == own], ridge))
    return rising(order(modules))
