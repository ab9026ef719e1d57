"""Importance of each head (Michel et al. 2019, eq. 2): mean absolute gradient of an example's loss towards its gate."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.columns import Column
from headscope.heads import Site
from headscope.scores import Evidence, Means, Need, Score, task_gradient

_MICHEL = "Michel et al. 2019, Are Sixteen Heads Really Better than One?, section 4.1"


def moments(evidence: Evidence) -> dict[str, Tensor]:
    """Per example: |g|, g, g² and the sum over tokens of absolute values, `[batch head]` each."""
    by_token = task_gradient(evidence)
    gradient = by_token.sum(dim=1)
    return {
        "absolute": gradient.abs(),
        "signed": gradient,
        "square": gradient.square(),
        "token": by_token.abs().sum(dim=1),
    }


def finish(site: Site, means: Means) -> dict[str, Tensor]:
    """The six columns, `[head]` each."""
    importance, fisher = means["absolute"], means["square"]
    if means.count > 1:
        spread = (fisher - importance.square()).clamp_min(0) / (means.count - 1)
        error = spread.sqrt()
    else:
        error = torch.full_like(importance, torch.nan)
    norm = importance.norm()
    return {
        "importance": importance,
        "importance_se": error,
        "importance_layer_norm": importance / norm if norm > 0 else torch.zeros_like(importance),
        "importance_token": means["token"],
        "gradient_mean": means["signed"],
        "fisher": fisher,
    }


SCORE = Score(
    title="importance",
    columns=(
        Column(
            "importance",
            "loss per unit gate",
            "mean over examples of |∂L/∂ξ|, ξ being the head's gate; high = keep",
            _MICHEL,
        ),
        Column("importance_se", "loss per unit gate", "standard error of importance over examples"),
        Column(
            "importance_layer_norm", "1", "importance divided by the l2 norm of the importances of its site", _MICHEL
        ),
        Column(
            "importance_token",
            "loss per unit gate",
            "mean over examples of the sum over tokens of absolute values, the form of the paper's own code",
            _MICHEL,
        ),
        Column(
            "gradient_mean",
            "loss per unit gate",
            "mean over examples of ∂L/∂ξ, signed: negative of the first-order guess of what removal does to the loss",
        ),
        Column("fisher", "loss² per unit gate²", "mean over examples of (∂L/∂ξ)²"),
    ),
    needs=frozenset({Need.GRADIENT}),
    moments=moments,
    finish=finish,
    ranks="importance",
)
