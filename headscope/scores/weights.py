"""Weights of each head: Frobenius norms of its query, key, value and output matrices, and effective ranks of QK and OV.

An effective rank is exp of the entropy of the normalised singular values of `W_q W_kᵀ` or `W_v W_o`, taken from the
factors: with `A = Q_a R_a` and `B = Q_b R_b`, the product `A Bᵀ` has the singular values of the small `R_a R_bᵀ`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.columns import Column
from headscope.heads import Site
from headscope.scores import Means, Need, Score, nothing
from headscope.shapes import Float


def finish(site: Site, means: Means) -> dict[str, Tensor]:
    """Norms and ranks, `[head]` each; NaN where the model has no such matrix."""
    weights = means.weights
    assert weights is not None
    output = None if weights.output is None else weights.output.transpose(1, 2)  # [head d_model d_value]
    missing = torch.full((site.n_heads,), torch.nan, dtype=torch.float64)
    return {
        "query_norm": _norm(weights.query, missing),
        "key_norm": _norm(weights.key, missing),
        "value_norm": _norm(weights.value, missing),
        "output_norm": _norm(output, missing),
        "qk_rank": _rank(weights.query, weights.key, missing),
        "ov_rank": _rank(weights.value, output, missing),
    }


def _norm(matrices: Float[Tensor, "head d_in d_out"] | None, missing: Float[Tensor, " head"]) -> Float[Tensor, " head"]:
    return missing if matrices is None else torch.linalg.matrix_norm(_precise(matrices)).cpu()


def _rank(left: Tensor | None, right: Tensor | None, missing: Tensor) -> Tensor:
    """Effective rank of `left rightᵀ` for each head; NaN where a product is zero or its factors do not fit."""
    if left is None or right is None or left.shape[-1] != right.shape[-1]:
        return missing
    return torch.stack([effective_rank(a, b) for a, b in zip(left, right, strict=True)]).double().cpu()


def effective_rank(left: Float[Tensor, "d_a rank"], right: Float[Tensor, "d_b rank"]) -> Float[Tensor, ""]:
    """exp of the entropy of the normalised singular values of `left rightᵀ`."""
    if not bool(torch.isfinite(left).all() and torch.isfinite(right).all()):
        return torch.tensor(torch.nan)
    core_left = torch.linalg.qr(_precise(left)).R
    core_right = torch.linalg.qr(_precise(right)).R
    singular = torch.linalg.svdvals(core_left @ core_right.T)
    total = singular.sum()
    if total <= 0:
        return torch.tensor(torch.nan)
    return torch.special.entr(singular / total).sum().exp()


def _precise(tensor: Tensor) -> Tensor:
    """In float64, off devices that have none."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


SCORE = Score(
    title="weights",
    columns=(
        Column("query_norm", "1", "Frobenius norm of the head's query matrix W_q"),
        Column("key_norm", "1", "Frobenius norm of the head's key matrix W_k; shared in a KV group"),
        Column("value_norm", "1", "Frobenius norm of the head's value matrix W_v; shared in a KV group"),
        Column("output_norm", "1", "Frobenius norm of the head's slice of the output projection W_o"),
        Column(
            "qk_rank",
            "dimensions",
            "effective rank of W_q W_kᵀ: exp of the entropy of its normalised singular values (rotary left out)",
            "Roy & Vetterli 2007, The effective rank",
        ),
        Column(
            "ov_rank",
            "dimensions",
            "effective rank of W_v W_o: exp of the entropy of its normalised singular values",
            "Roy & Vetterli 2007, The effective rank",
        ),
    ),
    needs=frozenset({Need.WEIGHTS}),
    moments=nothing,
    finish=finish,
)
