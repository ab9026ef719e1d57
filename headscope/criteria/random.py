"""Random order as criterion, the baseline of every other one: a permutation of all heads, fixed by the seed.

Raw words of Philox are the same on every platform and in every version of numpy, which its shuffles need not be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from numpy.random import Philox

from headscope.criteria import Criterion
from headscope.heads import HeadId

if TYPE_CHECKING:
    from headscope.study import Study


def scores(study: Study, seed: int) -> Mapping[HeadId, float]:
    """The place of each head in a permutation that the seed fixes."""
    heads = [head for site in study.sites for head in site.heads]
    words = Philox(key=seed % 2**128).random_raw(len(heads)).tolist()
    order = sorted(range(len(heads)), key=words.__getitem__)
    places = {heads[number]: float(place) for place, number in enumerate(order)}
    return {head: places[head] for head in heads}


CRITERION = Criterion(
    title="random",
    meaning="heads go in an order that only the seed decides; what any other criterion must beat",
    needs_labels=False,
    needs_data=False,
    scores=scores,
)
