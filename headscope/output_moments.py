"""Second moments of what heads put out and of what an error there costs, for every site from one pass over the data.

Memory: two matrices of `(heads · d_value)²` float64 numbers for each module, and one batch's activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from headscope.capture import watch
from headscope.errors import UsageError
from headscope.examples import Batch
from headscope.heads import Site
from headscope.least_squares import exact
from headscope.losses import Distribution
from headscope.memory import in_halves
from headscope.objective import Objective, Wanted
from headscope.output_weights import head_columns, obstacle
from headscope.study import Study, batches
from headscope.texts import Texts

MOST_DRAWS, ENOUGH_DRAWN = 8, 1024
"""Of few predicted positions several drawn pulls are summed: as many as make so many in all, but not more than that."""


class Weighting(StrEnum):
    """What an error in what a site writes costs."""

    GRADIENT = "gradient"
    """The squared change of the task's loss, to first order."""
    SENSITIVITY = "sensitivity"
    """The same for labels drawn from the model's own prediction: the divergence that the error causes."""
    OUTPUT = "output"
    """Its own square, whatever the rest of the model makes of it."""


@dataclass(frozen=True)
class SiteMoments:
    """One module's heads: `covariance` of their outputs over real tokens, and the `cost` of errors in them.

    Both are `[head*d_value head*d_value]` in float64. An error `e` of each token costs `½ Σ e_t cost e_tᵀ` divided by
    the number of tokens; `cost` is summed over an example's tokens, the mean over examples. `layers` share the module.
    """

    layers: tuple[Site, ...]
    covariance: Tensor
    cost: Tensor


def weighting_of(study: Study) -> Weighting:
    """By the task's loss where the data has labels for it, else by drawn labels."""
    examples, kind = study.examples, study.loaded.task.distribution
    labelled = examples is not None and examples.labelled and kind is not Distribution.DIRECTION
    return Weighting.GRADIENT if labelled else Weighting.SENSITIVITY


def output_moments(study: Study, weighting: Weighting) -> list[SiteMoments]:
    """The moments of every module with heads, in reporting order of its first layer.

    Raises:
        UsageError: there is no data.
        DataError: a loss or a gradient is not finite.
    """
    if study.examples is None:
        raise UsageError("reconstruction cannot be measured without data", hint="give --data FILE")
    return _Pass(study, weighting).run()


def drawn(study: Study) -> list[Wanted]:
    """The backward passes of drawn labels that a batch takes: the fewer positions are predicted, the more."""
    assert study.examples is not None
    positions = sum(len(one.targets) for one in study.examples.items)
    draws = min(MOST_DRAWS, -(-ENOUGH_DRAWN // max(1, positions)))
    return [Wanted(False, 1, study.options.seed + (number << 32), smooth=True) for number in range(draws)]


class _Sums:
    """Running sums of one module."""

    def __init__(self, layers: tuple[Site, ...]) -> None:
        self.layers = layers
        size = layers[0].n_heads * layers[0].d_value
        self.products, self.cost = (torch.zeros(size, size, dtype=torch.float64) for _ in range(2))
        self.total, self.tokens = torch.zeros(size, dtype=torch.float64), 0

    def add(self, outputs: Tensor, pulls: Tensor | None) -> None:
        """Outputs and pulls at real tokens, `[token feature]`."""
        z = exact(outputs)
        self.products += (z.T @ z).cpu()
        self.total += z.sum(dim=0).cpu()
        self.tokens += len(z)
        if pulls is not None:
            self.cost += (pulls.T @ pulls).cpu()

    def covariance(self) -> Tensor:
        """Of the outputs, over tokens."""
        mean = self.total / max(1, self.tokens)
        return self.products / max(1, self.tokens) - torch.outer(mean, mean)


class _Pass:
    """One pass over a study's examples."""

    def __init__(self, study: Study, weighting: Weighting) -> None:
        self.study, self.weighting = study, weighting
        self.texts = Texts({}, None, None)
        modules: dict[str, list[Site]] = {}
        for site in study.sites:
            modules.setdefault(site.output, []).append(site)
        self.sums = {path: _Sums(tuple(layers)) for path, layers in modules.items()}

    def run(self) -> list[SiteMoments]:
        """The moments of all modules."""
        study, model = self.study, self.study.loaded.model
        assert study.examples is not None
        objective = Objective(model, study.loaded.task, study.sites)
        objective.on_inputs = self._begin
        notes: list[str] = []
        done, count = 0, len(study.examples)
        with watch(model, study.sites, pulls=True) as seen:
            for batch in batches(study):
                for wanted in self._wanted():
                    for part, _ in in_halves(lambda part, want=wanted: objective.run(part, seen, want), batch, notes):
                        for site in study.sites:
                            record = seen.records[site.id]
                            if record.output is not None:
                                self._add(site, part, record.output, record.pull)
                            record.output = record.pull = None  # a site that the next batch does not run shows nothing
                done += len(batch)
                if study.progress is not None:
                    study.progress(done, count)
        times = count * len(self._wanted())
        return [SiteMoments(one.layers, one.covariance(), self._cost(one, times)) for one in self.sums.values()]

    def _wanted(self) -> list[Wanted]:
        """The backward passes that a batch takes, each after a forward pass of its own."""
        if self.weighting is Weighting.SENSITIVITY:
            return drawn(self.study)
        return [Wanted(self.weighting is Weighting.GRADIENT, 0, self.study.options.seed)]

    def _begin(self, inputs: dict[str, Any], batch: Batch) -> None:
        self.texts = Texts.of(inputs, batch)

    def _add(self, site: Site, batch: Batch, outputs: Tensor, pulls: Tensor | None) -> None:
        real = self.texts.real(site, outputs)
        chosen: Tensor | None = None
        if pulls is not None:
            scaled = exact(pulls)
            if self.weighting is Weighting.SENSITIVITY:  # the drawn loss is a sum over positions, divergence a mean
                scaled = scaled / batch.positions.clamp_min(1).to(scaled).sqrt()[:, None, None, None]
            chosen = scaled[real.to(scaled.device)].flatten(1)
        self.sums[site.output].add(outputs[real].flatten(1), chosen)

    def _cost(self, sums: _Sums, examples: int) -> Tensor:
        if self.weighting is not Weighting.OUTPUT:
            return sums.cost / examples
        site = sums.layers[0]
        if obstacle(self.study.loaded.model, site):
            return torch.eye(len(sums.cost), dtype=torch.float64)
        columns = head_columns(self.study.loaded.model, site, range(site.n_heads)).flatten(0, 1)
        return columns @ columns.T


def feature_blocks(site: Site, places: Sequence[int]) -> Tensor:
    """The features of the heads at these places."""
    width = torch.arange(site.d_value)
    return torch.cat([place * site.d_value + width for place in places])
