"""Clusters of heads: planted ones are found, the count is that of the largest silhouette, medoids are nearest."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import given, settings

from headscope.clusters import best_count, cut, grow, medoids


def planted(*sizes: int, within: float = 0.9, between: float = 0.1, seed: int = 0) -> numpy.ndarray:
    """A table of likenesses with blocks of these sizes, slightly uneven."""
    owner = numpy.repeat(numpy.arange(len(sizes)), sizes)
    table = numpy.where(owner[:, None] == owner, within, between)
    noise = numpy.random.default_rng(seed).uniform(-0.02, 0.02, table.shape)
    table = table + (noise + noise.T) / 2
    numpy.fill_diagonal(table, 1.0)
    return table


def silhouette(distance: numpy.ndarray, labels: numpy.ndarray) -> float:
    """Rousseeuw 1987 by loops."""
    values = []
    for i, own in enumerate(labels):
        mates = [j for j, label in enumerate(labels) if label == own and j != i]
        if not mates:
            values.append(0.0)
            continue
        a = numpy.mean([distance[i, j] for j in mates])
        groups = [numpy.flatnonzero(labels == label) for label in set(labels) - {own}]
        b = min(numpy.mean(distance[i, members]) for members in groups)
        values.append(0.0 if max(a, b) == 0 else (b - a) / max(a, b))
    return float(numpy.mean(values))


@pytest.mark.parametrize("sizes", [(3, 4), (2, 5, 3), (4, 4, 4, 4)])
def test_planted_clusters_are_found(sizes: tuple[int, ...]) -> None:
    order = numpy.random.default_rng(1).permutation(sum(sizes))
    tree = grow(planted(*sizes)[numpy.ix_(order, order)], 0.0)
    owner = numpy.repeat(numpy.arange(len(sizes)), sizes)[order]
    assert best_count(tree) == len(sizes)
    labels = cut(tree, len(sizes))
    assert len(set(zip(labels.tolist(), owner.tolist(), strict=True))) == len(sizes)
    assert labels[0] == 1 and list(dict.fromkeys(labels)) == list(range(1, len(sizes) + 1)), "numbered by first heads"
    starts = [owner[place] for place in tree.order]
    assert sum(a != b for a, b in zip(starts, starts[1:], strict=False)) == len(sizes) - 1, "clusters lie together"


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 12), st.integers(0, 2**31))
def test_the_count_has_the_largest_silhouette(heads: int, seed: int) -> None:
    table = numpy.random.default_rng(seed).uniform(0, 1, (heads, heads))
    table = (table + table.T) / 2
    tree = grow(table, 0.0)
    values = {count: silhouette(tree.distance, cut(tree, count)) for count in range(2, heads)}
    found = best_count(tree)
    assert values[found] == pytest.approx(max(values.values()), abs=1e-12)
    assert all(values[count] < values[found] + 1e-12 for count in range(2, found))


def test_what_cannot_be_compared_never_shares_a_cluster_with_it() -> None:
    table = planted(3, 3)
    table[:3, 3:] = table[3:, :3] = numpy.nan
    tree = grow(table, -1.0)
    assert best_count(tree) == 2
    assert set(cut(tree, 2)[:3]) == {1} and set(cut(tree, 2)[3:]) == {2}
    assert tree.distance.max() == 2.0


def test_a_medoid_is_the_nearest_to_all_others() -> None:
    table = planted(3, 2)
    table[0, 1] = table[1, 0] = table[1, 2] = table[2, 1] = 0.95
    found = medoids(grow(table, 0.0), numpy.array([1, 1, 1, 2, 2]))
    assert found.tolist() == [1, 1, 1, 3, 3]


@pytest.mark.parametrize("heads", [1, 2])
def test_very_few_heads(heads: int) -> None:
    tree = grow(numpy.eye(heads), 0.0)
    assert best_count(tree) == 1
    assert cut(tree, 1).tolist() == [1] * heads
    assert sorted(tree.order) == list(range(heads))


def test_thousands_of_heads_in_a_chain() -> None:
    """A tree as deep as it has leaves: nothing here may recurse."""
    place = numpy.cumsum(numpy.linspace(0.0001, 0.001, 1500))
    tree = grow(1 - numpy.abs(place[:, None] - place) / place[-1], 0.0)
    assert sorted(tree.order) == list(range(1500))
    assert len(set(cut(tree, 7).tolist())) == 7
