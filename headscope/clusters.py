"""Clusters of heads by average linkage, from a table of likenesses; how many there are may be asked for, or measured.

Heads whose likeness is not defined (other queries, no output) count as unlike as can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy
from scipy.cluster.hierarchy import cut_tree, leaves_list, linkage
from scipy.spatial.distance import squareform

Array: TypeAlias = numpy.ndarray
_ORDERED = 400
"""With more heads than this, neighbours in the tree are not turned so that like ones lie side by side: that is slow."""


@dataclass(frozen=True)
class Tree:
    """The tree of all heads: `distance` is `[head head]`, `merges` is scipy's linkage, `order` lists the leaves."""

    distance: Array
    merges: Array
    order: tuple[int, ...]

    @property
    def heads(self) -> int:
        """The number of leaves."""
        return len(self.distance)


def grow(likeness: Array, least: float) -> Tree:
    """The tree of a symmetric table `[head head]` of likenesses from `least` to 1; distances are one minus these."""
    distance = numpy.where(numpy.isfinite(likeness), 1.0 - likeness, 1.0 - least).clip(min=0.0)
    distance = (distance + distance.T) / 2
    numpy.fill_diagonal(distance, 0.0)
    if len(distance) < 2:
        return Tree(distance, numpy.empty((0, 4)), tuple(range(len(distance))))
    merges = linkage(squareform(distance, checks=False), "average", optimal_ordering=len(distance) <= _ORDERED)
    return Tree(distance, merges, tuple(leaves_list(merges).tolist()))


def cut(tree: Tree, count: int) -> Array:
    """The cluster of each head, `[head]`, with `count` clusters, numbered from 1 in the order of their first heads."""
    if tree.heads < 2:
        return numpy.ones(tree.heads, dtype=int)
    return _numbered(cut_tree(tree.merges, n_clusters=[count])[:, 0])


def best_count(tree: Tree) -> int:
    """The number of clusters with the largest mean silhouette (Rousseeuw 1987); 1 with fewer than three heads.

    A head alone in its cluster has the silhouette 0. Of equals, the fewest clusters.
    """
    count = tree.heads
    if count < 3:
        return 1
    sums, sizes = tree.distance.copy(), numpy.ones(count)  # [head cluster]: distances of a head to a cluster, summed
    owner = numpy.arange(count)
    names = list(range(count)) + [0] * (count - 1)  # the column of each node of the tree
    best, found = -numpy.inf, 1
    for step, (left, right) in enumerate(tree.merges[:-1, :2].astype(int)):
        kept, gone = names[left], names[right]
        names[count + step] = kept
        sums[:, kept] += sums[:, gone]
        sums[:, gone] = numpy.inf
        sizes[kept] += sizes[gone]
        owner[owner == gone] = kept
        value = _silhouette(sums, sizes, owner)
        if value >= best:
            best, found = value, count - step - 1
    return found


def _silhouette(sums: Array, sizes: Array, owner: Array) -> float:
    """The mean over heads of (b − a) / max(a, b): mean distances to the nearest other cluster, and to the own one."""
    rows = numpy.arange(len(owner))
    means = sums / sizes
    within = sums[rows, owner] / numpy.maximum(sizes[owner] - 1, 1)
    means[rows, owner] = numpy.inf
    nearest = means.min(axis=1)
    larger = numpy.maximum(within, nearest)
    with numpy.errstate(invalid="ignore", divide="ignore"):
        values = numpy.where((sizes[owner] > 1) & (larger > 0), (nearest - within) / larger, 0.0)
    return float(values.mean())


def medoids(tree: Tree, clusters: Array) -> Array:
    """The head of each head's cluster that is nearest to all others in it, `[head]`; of equals, the first."""
    found = numpy.zeros(tree.heads, dtype=int)
    for number in numpy.unique(clusters):
        members = numpy.flatnonzero(clusters == number)
        found[members] = members[tree.distance[numpy.ix_(members, members)].sum(axis=1).argmin()]
    return found


def _numbered(labels: Array) -> Array:
    known: dict[int, int] = {}
    return numpy.array([known.setdefault(int(label), len(known) + 1) for label in labels])
