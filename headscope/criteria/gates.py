"""Learned gates as criterion: heads stay longest without which the prediction, in random subsets, moves most.

Every block of heads has one learned weight; the model's own weights are frozen. At each step some examples are run
twice: whole, and with a random subset of heads, drawn for each example by the weights (differentiable subset pruning,
Li et al. 2021). Adam lowers the divergence of the two predictions. How many heads stay is drawn for each example too,
evenly from one to all but one, so that one order serves every ratio. Noise and examples are keyed by seed and step:
neither the batch size nor memory that runs out changes more than rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy
import torch
from torch import Tensor

from headscope.criteria import Block, Criterion, one_by_one
from headscope.errors import UsageError
from headscope.evaluation import divergences
from headscope.examples import Batch, Example
from headscope.heads import HeadId
from headscope.losses import uniforms
from headscope.memory import in_halves
from headscope.objective import Objective
from headscope.shapes import Float
from headscope.study import Study, batches
from headscope.subsets import gumbel, opened, pull_back, relaxed

STEPS = 200
"""Steps of training unless told."""
EXAMPLES = 16
"""Examples that a step runs, whatever the batch size."""
RATE = 0.2
"""Adam's step, in units of the log-weights, whose noise has a standard deviation of 1.3."""


def greedy(study: Study, seed: int, blocks: Sequence[Block]) -> Mapping[HeadId, float]:
    """The learned weight of every head's block, over the steps that the study's options ask for.

    Raises:
        UsageError: there is no data.
        DataError: a divergence or a gradient is not finite.
    """
    if study.examples is None:
        raise UsageError("gates cannot be measured without data", hint="give --data FILE")
    weights = _Training(study, blocks, seed).run(study.options.steps or STEPS).tolist()
    return {head: weight for block, weight in zip(blocks, weights, strict=True) for head in block}


class _Training:
    """One study's heads, and what their blocks have learned."""

    def __init__(self, study: Study, blocks: Sequence[Block], seed: int) -> None:
        self.study, self.seed = study, seed
        self.objective = Objective(study.loaded.model, study.loaded.task, study.sites)
        places = {head: place for place, head in enumerate(head for site in study.sites for head in site.heads)}
        self.members = torch.zeros(len(blocks), len(places), dtype=torch.float64)  # [block head]
        for number, block in enumerate(blocks):
            self.members[number, [places[head] for head in block]] = 1.0
        self.sizes = self.members.sum(dim=1)
        self.weights = torch.zeros(len(blocks), dtype=torch.float64)
        self.notes: list[str] = []

    def run(self, steps: int) -> Float[Tensor, " block"]:
        """The weights after so many steps; a single block has nothing to learn."""
        if len(self.weights) < 2:
            return self.weights
        optimizer = torch.optim.Adam([self.weights], lr=RATE)
        assert self.study.examples is not None
        for step, chosen in enumerate(portions(self.study.examples.items, steps, seed=self.seed)):
            self.weights.grad = self._gradient(chosen, step)
            optimizer.step()
            if self.study.progress is not None:
                self.study.progress((step + 1) * len(chosen), steps * len(chosen))
        return self.weights

    def _gradient(self, chosen: Sequence[Example], step: int) -> Float[Tensor, " block"]:
        """The gradient of the mean divergence of a step's examples."""
        total = torch.zeros_like(self.weights)
        for batch in batches(self.study, chosen):
            for _, pulled in in_halves(lambda part: self._pulled(part, step), batch, self.notes):
                total += pulled
        return total / len(chosen)

    def _pulled(self, batch: Batch, step: int) -> Float[Tensor, " block"]:
        """The gradient of the summed divergence of a batch, each example with a subset of its own."""
        noise = [uniforms(len(self.weights) + 1, seed=self.seed, example=number, draw=step) for number in batch.numbers]
        table = torch.stack(noise)
        sums, count = self.weights + gumbel(table[:, 1:]), self._count(table[:, 0])
        closed = (1 - opened(sums, self.sizes, count)) @ self.members  # [example head]; heads of no block stay open
        parts = (1 - closed).split([site.n_heads for site in self.study.sites], dim=1)
        gates = {site.id: part for site, part in zip(self.study.sites, parts, strict=True)}
        kind = self.study.loaded.task.distribution
        apart = self.objective.apart(batch, gates, lambda first, other: divergences(first, other, kind))
        pulls = torch.cat([apart.pulls[site.id] for site in self.study.sites], dim=1) @ self.members.T
        return pull_back(relaxed(sums, self.sizes, count), self.sizes, pulls).sum(dim=0)

    def _count(self, drawn: Float[Tensor, " example"]) -> Float[Tensor, " example"]:
        """How many heads stay: evenly from the smallest block to all but that."""
        total, least = self.sizes.sum(), self.sizes.min()
        return least + ((total - 2 * least + 1) * drawn).floor()


def portions(items: Sequence[Example], steps: int, *, seed: int) -> Iterator[list[Example]]:
    """The examples of each step: the next of a permutation, then of another one, never one twice in a step."""
    size = min(EXAMPLES, len(items))
    whole = len(items) // size
    for step in range(steps):
        epoch, place = divmod(step, whole)
        order = numpy.random.Generator(numpy.random.Philox([seed, epoch])).permutation(len(items))
        yield [items[number] for number in order[place * size : (place + 1) * size]]


CRITERION = Criterion(
    title="gates",
    meaning="heads go first that a gate learns to close: without them, in random subsets, the prediction moves least",
    needs_labels=False,
    needs_data=True,
    scores=one_by_one(greedy),
    greedy=greedy,
)
