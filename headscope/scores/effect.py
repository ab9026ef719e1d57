"""Effect of removing each head on the loss, guessed to second order from mean gradient and sensitivity."""

from __future__ import annotations

from torch import Tensor

from headscope.columns import Column
from headscope.heads import Site
from headscope.scores import Evidence, Means, Need, Score, drawn_square, task_gradient


def moments(evidence: Evidence) -> dict[str, Tensor]:
    """Per example: the gate gradient, and the squared one of drawn labels, `[batch head]` each."""
    return {"signed": task_gradient(evidence).sum(dim=1), "sensitivity": drawn_square(evidence)}


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
