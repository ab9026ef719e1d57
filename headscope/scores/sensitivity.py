"""Sensitivity of the prediction to each head's gate, without labels: the Fisher information of the gate per position.

Labels are drawn from the model's own prediction; half of the sensitivity is the second-order guess of the divergence
that removing the head causes (definitions: Importance).
"""

from __future__ import annotations

from torch import Tensor

from headscope.columns import Column
from headscope.heads import Site
from headscope.scores import Evidence, Means, Need, Score, drawn_square


def moments(evidence: Evidence) -> dict[str, Tensor]:
    """Per example: the mean over draws of the squared summed gradient, over the number of positions, `[batch head]`."""
    return {"sensitivity": drawn_square(evidence)}


def finish(site: Site, means: Means) -> dict[str, Tensor]:
    """The column, `[head]`."""
    return {"sensitivity": means["sensitivity"]}


SCORE = Score(
    title="sensitivity",
    columns=(
        Column(
            "sensitivity",
            "nats per unit gate²",
            "mean over examples of (1/T)·(Σ_t ∂ℓ_t/∂ξ)² for labels drawn from the model's own prediction; "
            "half of it guesses the divergence caused by removal",
        ),
    ),
    needs=frozenset({Need.SAMPLED}),
    moments=moments,
    finish=finish,
    ranks="sensitivity",
)
