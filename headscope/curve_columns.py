"""The columns of a curve, and how far it goes; without torch, so that a misspelt column is refused at once."""

from __future__ import annotations

from headscope.columns import Column

FURTHEST = 0.9
"""The largest share of heads that a curve removes, where the model allows that many."""
CURVE_COLUMNS = (
    Column(
        "criterion",
        "name",
        "what goes first: the criterion asked for (scores: those of --scores); importance, the order of the paper's "
        "figures, and importance-layer-norm, the same divided by the l2 norm of a site (sensitivity alone without "
        "labels); random-N, the order of the seed N",
        "Michel et al. 2019, Are Sixteen Heads Really Better than One?, section 4",
    ),
    Column(
        "repair",
        "true or false",
        "whether the output projections of the heads that stay are fitted anew, where that helps",
    ),
    Column("ratio", "1", "heads_removed over the query heads of the model"),
    Column("heads_removed", "count", "query heads that are gone, as near to ratio 0, 0.1, ..., 0.9 as units allow"),
    Column("loss", "nats", "mean task loss of the held-out examples; empty without labels"),
    Column("metric", "", "the task's metric, or that of --metric, on the held-out examples; empty without labels"),
    Column("divergence", "nats", "mean KL(whole model || this one) of the held-out examples; embeddings: 1 - cos"),
)
