"""Plans that the census prunes by: the same heads everywhere, others from site to site, one of each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headscope.heads import HeadId, Site
from headscope.plan import Plan, SiteHeads

Choice = Callable[[Site, int], list[int]]
"""The numbers of the heads that a site loses; the second argument counts the sites."""


def plan_of(sites: Sequence[Site], choose: Choice) -> Plan:
    """The plan that takes what `choose` says; layers that share a module lose the same."""
    removed = [
        HeadId(label, number)
        for turn, site in enumerate(site for site in sites if not site.call)
        for label in (site.id, *site.shared_with)
        for number in choose(site, turn)
    ]
    return Plan(tuple(SiteHeads.of(site) for site in sites), tuple(sorted(removed)))


def same_everywhere(site: Site, turn: int) -> list[int]:
    """The second key/value head with its query heads; the second query head where there is one key/value head."""
    if site.n_kv_heads > 1:
        return list(site.groups[1])
    return [site.heads[1].index] if site.n_heads > 1 else []


def other_everywhere(site: Site, turn: int) -> list[int]:
    """Other heads and other counts from site to site; of grouped heads whole groups here, one of each group there."""
    if site.group_size > 1 and (turn % 2 or site.n_kv_heads == 1):
        return [group[(turn + place) % site.group_size] for place, group in enumerate(site.groups)]
    if site.n_kv_heads < 2:
        return []
    count = 1 + turn % (site.n_kv_heads - 1)
    chosen = [(turn + step) % site.n_kv_heads for step in range(count)]
    return [number for place in chosen for number in site.groups[place]]


def one_of_each_group(site: Site, turn: int) -> list[int]:
    """The first query head of every key/value head; nothing where each has its own."""
    return [group[0] for group in site.groups] if site.group_size > 1 else []
