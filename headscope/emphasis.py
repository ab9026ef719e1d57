"""Emphasis: how much an error at each token counts when output projections are fitted anew.

Half of it is the same for all tokens. The other half goes by what an error there does to the prediction: the squared
gradient of drawn labels' loss towards what the heads put out, summed over its directions, which is the divergence that
a small random error causes. Where a model is sure of itself nearly everywhere, few tokens carry all that can be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headscope.capture import watch
from headscope.examples import Batch
from headscope.heads import SiteId
from headscope.least_squares import exact
from headscope.memory import in_halves
from headscope.objective import Objective
from headscope.output_moments import drawn
from headscope.study import Study, batches
from headscope.texts import Texts

EVEN = 0.5
"""The share of the weight that all tokens have alike."""


class Emphasis:
    """A weight for every real token of a study's examples at every site, with a mean of 1 at each."""

    def __init__(self, weights: dict[SiteId, dict[int, Tensor]]) -> None:
        self._weights = weights

    @classmethod
    def of(cls, study: Study) -> Emphasis:
        """From passes over a study's examples.

        Raises:
            DataError: a gradient is not finite.
        """
        pulls: dict[SiteId, dict[int, Tensor]] = {site.id: {} for site in study.sites}
        objective, notes, texts = Objective(study.loaded.model, study.loaded.task, study.sites), [], list[Texts]()
        objective.on_inputs = lambda inputs, batch: texts.__setitem__(slice(None), [Texts.of(inputs, batch)])

        def squares(batch: Batch) -> dict[SiteId, list[Tensor]]:
            found: dict[SiteId, list[Tensor]] = {}
            for wanted in drawn(study):
                objective.run(batch, seen, wanted)
                for site in study.sites:
                    record = seen.records[site.id]
                    if record.output is not None and record.pull is not None:
                        real = texts[0].real(site, record.output).cpu()
                        square = exact(record.pull).square().sum(dim=(2, 3)).cpu()
                        square /= batch.positions.clamp_min(1)[:, None]  # a draw is a sum over positions
                        own = [row[keep] for row, keep in zip(square, real, strict=True)]
                        before = found.get(site.id, [torch.zeros(())] * len(own))
                        found[site.id] = [a + b for a, b in zip(before, own, strict=True)]
                    record.output = record.pull = None
            return found

        with watch(study.loaded.model, study.sites, pulls=True) as seen:
            for batch in batches(study):
                for part, found in in_halves(squares, batch, notes):
                    for site, rows in found.items():
                        pulls[site] |= zip(part.numbers, rows, strict=True)
        return cls({site: _weights(rows) for site, rows in pulls.items()})

    def at(self, site: SiteId, numbers: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The weights of the real tokens of some examples, `counts` each, one behind the other.

        A token that was not there (frames of a longer padding) has the even share.
        """
        known = self._weights.get(site, {})
        return torch.cat([_fitted(known.get(number), count) for number, count in zip(numbers, counts, strict=True)])


def _weights(rows: dict[int, Tensor]) -> dict[int, Tensor]:
    """Squares as weights."""
    mean = float(torch.cat(list(rows.values())).mean()) if rows else 0.0
    return {number: EVEN + (1 - EVEN) * row / mean for number, row in rows.items()} if mean > 0 else {}


def _fitted(weights: Tensor | None, count: int) -> Tensor:
    if weights is None:
        return torch.ones(count, dtype=torch.float64)
    missing = torch.full((max(0, count - len(weights)),), EVEN, dtype=torch.float64)
    return torch.cat([weights[:count], missing])
