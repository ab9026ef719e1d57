"""Ablation of each head: the change of the loss, and of the task's metric, when only that head is gated to 0."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.columns import Column
from headscope.heads import Site
from headscope.scores import Evidence, Means, Need, Score


def moments(evidence: Evidence) -> dict[str, Tensor]:
    """Per example: L(x; ξ = 0) − L(x) and its square, `[batch head]` each; nothing where a budget gave means only."""
    if evidence.ablated is None:
        return {}
    return {"change": evidence.ablated, "change_square": evidence.ablated.square()}


def finish(site: Site, means: Means) -> dict[str, Tensor]:
    """The three columns, `[head]` each; NaN where half of the examples, or a budget, cannot tell."""
    unknown = torch.full((site.n_heads,), torch.nan, dtype=torch.float64)
    change = means.values.get("change", unknown)
    error = means.values.get("change_error", unknown)
    if "change_square" in means.values and means.count > 1:
        spread = (means["change_square"] - change.square()).clamp_min(0) / (means.count - 1)
        error = spread.sqrt()
    return {"ablation": change, "ablation_se": error, "ablation_metric": means.values.get("metric_change", unknown)}


SCORE = Score(
    title="ablation",
    columns=(
        Column(
            "ablation",
            "nats",
            "mean over examples of L(x; ξ = 0) − L(x), one head at a time: exact, or with --budget an unbiased "
            "estimate from a subset with the gradient as control variate",
        ),
        Column(
            "ablation_se",
            "nats",
            "standard error of ablation from the examples' paired differences, with --budget also from the subset",
        ),
        Column(
            "ablation_metric",
            "that of the metric",
            "the task's metric with the head gated to 0 minus that of the whole model; empty with --budget",
        ),
    ),
    needs=frozenset({Need.ABLATED}),
    moments=moments,
    finish=finish,
    ranks="ablation",
)
