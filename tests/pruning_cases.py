"""Plans for tests of pruning, and what a model says: uneven plans that take other heads, and other counts, per site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.capture import gate
from headscope.heads import HeadId, Site, SiteId
from headscope.plan import Plan, SiteHeads


def plan_of(sites: Sequence[Site], removed: Sequence[HeadId]) -> Plan:
    """A plan that removes these heads."""
    return Plan(tuple(SiteHeads.of(site) for site in sites), tuple(sorted(removed)))


def uneven(sites: Sequence[Site]) -> Plan:
    """Other heads and other counts in each site: whole key/value groups here, one head of every group there.

    Coupled sites and single heads keep all; layers that share a module lose the same.
    """
    removed: list[HeadId] = []
    for turn, site in enumerate(site for site in sites if not (site.coupled or site.mixes_heads)):
        if site.call:
            continue
        gone: list[int] = []
        if site.group_size > 1 and (turn % 2 or site.n_kv_heads == 1):
            gone = [group[(turn + place) % site.group_size] for place, group in enumerate(site.groups)]
        elif site.n_kv_heads > 1:
            count = 1 + turn % (site.n_kv_heads - 1)
            chosen = [(turn + step) % site.n_kv_heads for step in range(count)]
            gone = [number for place in chosen for number in site.groups[place]]
        removed += [HeadId(label, number) for label in (site.id, *site.shared_with) for number in gone]
    return plan_of(sites, removed)


def gates(sites: Sequence[Site], plan: Plan) -> dict[SiteId, Tensor]:
    """Gates that are 0 for the heads of a plan."""
    return {site.id: torch.tensor([float(head.index in plan.kept(site.id)) for head in site.heads]) for site in sites}


def said(model: PreTrainedModel, inputs: dict[str, Any]) -> list[Tensor]:
    """Every floating tensor that a model returns, caches left out."""
    with torch.no_grad():
        output = model(**inputs)
    return [value for value in output.values() if isinstance(value, Tensor) and value.is_floating_point()]


def masked(model: PreTrainedModel, sites: Sequence[Site], plan: Plan, inputs: dict[str, Any]) -> list[Tensor]:
    """The same with the heads of a plan gated to 0."""
    with gate(model, gates(sites, plan), sites):
        return said(model, inputs)


def difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """The largest difference of two models' outputs, relative to the largest value."""
    assert len(first) == len(second)
    largest = max(float(one.abs().max()) for one in first)
    return max(float((one - other).abs().max()) for one, other in zip(first, second, strict=True)) / largest
