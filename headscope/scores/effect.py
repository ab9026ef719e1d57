"""Effect of removing each head on the loss, guessed to second order from mean gradient and sensitivity."""

from __future__ import annotations

from torch import Tensor

from headscope.columns import Column
from headscope.heads import Site
from headscope.scores import Evidence, Means, Need, Score
from headscope.scores.importance import moments as importance_moments
from headscope.scores.sensitivity import moments as sensitivity_moments


def moments(evidence: Evidence) -> dict[str, Tensor]:
    """Those of importance and sensitivity, `[batch head]` each."""
    return importance_moments(evidence) | sensitivity_moments(evidence)


def finish(site: Site, means: Means) -> dict[str, Tensor]:
    """The column, `[head]`."""
    return {"effect": means["sensitivity"] / 2 - means["signed"]}


SCORE = Score(
    title="effect",
    columns=(
        Column(
            "effect",
            "nats",
            "second-order guess of what removing the head does to the loss: −gradient_mean + ½·sensitivity; "
            "unlike importance it has a sign",
        ),
    ),
    needs=frozenset({Need.GRADIENT, Need.SAMPLED}),
    moments=moments,
    finish=finish,
    ranks="effect",
)
