"""Joint Fisher information as criterion: heads go first whose removal, with all that are gone, moves the loss least.

`F` is the mean over examples of `g gᵀ`, `g` the gradient of an example's loss towards all gates of the model. Removing
the heads `r` is guessed to cost `½ 1ᵀ F 1` over them: heads that push the same way cost more together. There is no
linear term: it lets a greedy choice collect heads whose gradients only seem to help.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headscope.capture import watch
from headscope.criteria import Block, Criterion, one_by_one
from headscope.errors import UsageError
from headscope.examples import Batch
from headscope.greedy import Quadratic, order, rising
from headscope.heads import HeadId
from headscope.memory import in_halves
from headscope.objective import Objective, Outcome, Wanted
from headscope.output_moments import Weighting, weighting_of
from headscope.study import Study, batches


def fisher(study: Study) -> Tensor:
    """`F` in float64, `[head head]` over the heads of all sites in order: of the task's loss where there are labels,
    else of the loss of labels drawn from the prediction, per predicted position.

    Raises:
        UsageError: there is no data.
        DataError: a loss or a gradient is not finite.
    """
    if study.examples is None:
        raise UsageError("joint-fisher cannot be measured without data", hint="give --data FILE")
    own = weighting_of(study) is Weighting.GRADIENT
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    wanted = Wanted(own, int(not own), study.options.seed)
    size = sum(site.n_heads for site in study.sites)
    total, notes, done = torch.zeros(size, size, dtype=torch.float64), list[str](), 0
    with watch(study.loaded.model, study.sites) as seen:
        for batch in batches(study):
            for part, outcome in in_halves(lambda part: objective.run(part, seen, wanted), batch, notes):
                gradients = _gradients(study, part, outcome)
                total += gradients.T @ gradients
            done += len(batch)
            if study.progress is not None:
                study.progress(done, len(study.examples))
    return total / len(study.examples)


def _gradients(study: Study, batch: Batch, outcome: Outcome) -> Tensor:
    """The gradient of each example towards every gate, `[example head]`."""
    if outcome.gate:
        return torch.cat([outcome.gate[site.id].cpu().double().sum(dim=1) for site in study.sites], dim=1)
    drawn = torch.cat([outcome.sampled[site.id][0].cpu().double() for site in study.sites], dim=1)
    return drawn / batch.positions.clamp_min(1).to(drawn).sqrt()[:, None]


def greedy(study: Study, seed: int, blocks: Sequence[Block]) -> Mapping[HeadId, float]:
    """Each time the block that adds least to the joint cost."""
    places = {head: place for place, head in enumerate(head for site in study.sites for head in site.heads)}
    return rising(order([Quadratic(fisher(study), places, blocks)]))


CRITERION = Criterion(
    title="joint-fisher",
    meaning="heads go first that, together with all that are gone, have the smallest mean squared joint gradient",
    needs_labels=False,
    needs_data=True,
    scores=one_by_one(greedy),
    greedy=greedy,
)
