"""Mean loss with every other head of a head's site gated to 0 (Michel et al. 2019, table 3), in nats; low = keep."""

from __future__ import annotations

from torch import Tensor

from headscope.columns import Column
from headscope.heads import Site
from headscope.scores import Evidence, Means, Need, Score


def moments(evidence: Evidence) -> dict[str, Tensor]:
    """Per example: its loss with each head alone in the site, `[batch head]`."""
    assert evidence.alone is not None
    return {"alone": evidence.alone}


def finish(site: Site, means: Means) -> dict[str, Tensor]:
    """The column, `[head]`."""
    return {"only": means["alone"]}


SCORE = Score(
    title="only",
    columns=(
        Column(
            "only",
            "nats",
            "mean loss with every other head of the same site gated to 0; takes a forward pass for each head",
            "Michel et al. 2019, Are Sixteen Heads Really Better than One?, table 3",
        ),
    ),
    needs=frozenset({Need.ALONE}),
    moments=moments,
    finish=finish,
    ranks="only",
)
