"""Exact losses of examples with heads gated to 0: one forward pass without gradients for each setting of the gates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headscope.capture import gate
from headscope.examples import Batch
from headscope.heads import Site, SiteId
from headscope.objective import Objective
from headscope.shapes import Float


def alone(objective: Objective, batch: Batch) -> Float[Tensor, "example head"]:
    """The loss of each example with one head left in its site, for the heads of all sites in order, in float64."""
    columns: list[Tensor] = []
    for site in objective.sites:
        for kept in torch.eye(site.n_heads):
            with gate(objective.model, {site.id: kept}, [site]):
                columns.append(objective.losses(batch))
    return torch.stack(columns, dim=1)


def by_site(values: Sequence[Float[Tensor, " head"]], sites: Sequence[Site]) -> dict[SiteId, Tensor]:
    """Values of each example for the heads of all sites, as `[example head]` of each site."""
    parts = torch.stack(list(values)).split([site.n_heads for site in sites], dim=1)
    return {site.id: part for site, part in zip(sites, parts, strict=True)}
