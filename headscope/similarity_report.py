"""The reports of `similarity`: pairs of heads with a verdict, clusters, and the matrix of one measure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from headscope import clusters
from headscope.columns import Column
from headscope.comparison import joint_provenance
from headscope.errors import UsageError
from headscope.inspection import listed
from headscope.inspection import notes as study_notes
from headscope.likeness import ATTENTION, HELLINGER, Likeness, default_measures
from headscope.pair_sums import load_measures
from headscope.reports._matrix import MatrixPicture
from headscope.study import Scores
from headscope.tables import Cell, Table

ALIKE = 0.9
"""From this likeness on, patterns or outputs count as the same."""
ERRORS = 2.0
"""Two importances are apart when they differ by more standard errors of the difference than this."""
OUTPUT = "output"

PAIR_COLUMNS = (
    Column(
        "a", "label", "one head, by its number in the unpruned model; with --with, of the first model", untrusted=True
    ),
    Column("b", "label", "the other head; with --with, of the second model", untrusted=True),
    Column("same_layer", "true or false", "both stand in layers of one number and stack"),
    Column("shared_kv", "true or false", "both read one key/value head: keys and values are alike by construction"),
)
VERDICT_COLUMN = Column(
    "verdict",
    "name",
    f"redundant: attention and output are both ≥ {ALIKE} and importance, where measured, does not set the two apart "
    f"(by more than {ERRORS:g} standard errors); same-pattern: only attention is, or importance sets two apart; "
    "same-output: only output is; different; empty where attention and output were not both measured",
)
MATCHED_COLUMN = Column(
    "matched", "true or false", "of the one-to-one pairs of both models that are most alike together"
)
IMPORTANCE_COLUMNS = (
    Column("importance_a", "nats", "importance of head a", "Michel et al. 2019"),
    Column("importance_b", "nats", "importance of head b", "Michel et al. 2019"),
)
CLUSTER_COLUMNS = (
    Column("head", "label", "stack.kind.layer.head, numbered as in the unpruned model", untrusted=True),
    Column("cluster", "number", "cluster by average linkage, numbered from 1 in the order of first heads"),
    Column("medoid", "label", "the head of the cluster that is nearest to all others in it", untrusted=True),
)


def pair_columns(measures: tuple[str, ...], *, importance: bool, two: bool) -> tuple[Column, ...]:
    """The columns of the report of pairs."""
    measured = tuple(measure.column for measure in load_measures(measures).values())
    more = ((MATCHED_COLUMN,) if two else ()) + (IMPORTANCE_COLUMNS if importance else ())
    return (*PAIR_COLUMNS, *measured, VERDICT_COLUMN, *more)


def every_column() -> tuple[Column, ...]:
    """Every column that a report of similarity can have, but those of a matrix."""
    return (*pair_columns(default_measures(True), importance=True, two=True), *CLUSTER_COLUMNS)


def pair_table(found: Likeness) -> Table:
    """One row per pair, in the order of the question's pairs."""
    heads = [str(head) for head in found.party.heads]
    same_layer, shared = found.party.same_layer(), found.party.space.shared_kv
    two = len(found.party.studies) > 1
    strength = _strengths(found)
    rows: list[dict[str, Cell]] = []
    for a, b in zip(found.pairs.left.tolist(), found.pairs.right.tolist(), strict=True):
        row: dict[str, Cell] = {
            "a": heads[a],
            "b": heads[b],
            "same_layer": bool(same_layer[a, b]),
            "shared_kv": None if two else bool(shared[a, b]),
        }
        row |= {name: _number(one.values[a, b]) for name, one in found.values.items()}
        row["verdict"] = verdict(row, apart=bool(strength) and strength[a].apart(strength[b]))
        if found.matched is not None:
            row["matched"] = bool(found.matched[a, b])
        if strength:
            row |= {"importance_a": strength[a].value, "importance_b": strength[b].value}
        rows.append(row)
    columns = pair_columns(tuple(found.values), importance=bool(strength), two=two)
    return Table("similarity", columns, tuple(rows), "", joint_provenance(found.party.studies), notes(found))


def verdict(row: dict[str, Cell], *, apart: bool = False) -> str | None:
    """What a pair's `attention` and `output` say together; None where they were not both measured.

    A pair without one of the two (other queries or keys) is not the same in it. `apart` says that importance sets the
    heads apart.
    """
    if ATTENTION not in row or OUTPUT not in row:
        return None
    pattern, output = (float(row[name] or 0.0) >= ALIKE for name in (ATTENTION, OUTPUT))
    if pattern and output:
        return "same-pattern" if apart else "redundant"
    return "same-pattern" if pattern else "same-output" if output else "different"


@dataclass(frozen=True)
class _Strength:
    """The importance of a head, and its standard error."""

    value: float
    error: float

    def apart(self, other: _Strength) -> bool:
        """Whether two differ by more than chance."""
        return abs(self.value - other.value) > ERRORS * math.hypot(self.error, other.error)


def _strengths(found: Likeness) -> list[_Strength]:
    """The importance of every head by place; empty where it was not asked for."""
    strengths: list[_Strength] = []
    for study, scores in zip(found.party.studies, found.importance, strict=False):
        for site in study.sites:
            both = [scores.values[name][site.id].tolist() for name in ("importance", "importance_se")]
            strengths += [_Strength(value, error) for value, error in zip(*both, strict=True)]
    return strengths


def matrix_table(found: Likeness) -> Table:
    """The whole table of the measure that orders the pairs; with two models, rows are of the first."""
    heads, measure = [str(head) for head in found.party.heads], found.by
    rows, columns = _sides(found)
    column = load_measures([measure])[measure].column
    headers = tuple(replace(column, name=heads[place], untrusted=True) for place in columns)
    values = found.values[measure].values
    cells = tuple({"head": heads[a]} | {heads[b]: _number(values[a, b]) for b in columns} for a in rows)
    return Table(
        "matrix", (CLUSTER_COLUMNS[0], *headers), cells, "head", joint_provenance(found.party.studies), notes(found)
    )


def _sides(found: Likeness) -> tuple[range, range]:
    """The heads of the rows and of the columns of a matrix."""
    count, first = len(found.party.heads), found.party.first
    return (range(count), range(count)) if first == count else (range(first), range(first, count))


def tree(found: Likeness) -> clusters.Tree:
    """The tree of all heads of one model, by the measure that orders the pairs."""
    least = load_measures([found.by])[found.by].least
    return clusters.grow(found.values[found.by].values.numpy(), least)


def cluster_table(found: Likeness, count: int | None) -> Table:
    """One row per head with its cluster, of `count` clusters or as many as the silhouette favours.

    Raises:
        UsageError: there are fewer heads than clusters asked for.
    """
    heads, grown = [str(head) for head in found.party.heads], tree(found)
    if count is not None and count > len(heads):
        raise UsageError(f"--clusters {count}: the model has {len(heads)} heads")
    labels = clusters.cut(grown, clusters.best_count(grown) if count is None else count)
    centres = clusters.medoids(grown, labels)
    rows = tuple(
        {"head": head, "cluster": int(label), "medoid": heads[centre]}
        for head, label, centre in zip(heads, labels, centres, strict=True)
    )
    return Table("clusters", CLUSTER_COLUMNS, rows, "head", joint_provenance(found.party.studies), notes(found))


def matrix_picture(found: Likeness) -> MatrixPicture:
    """What a picture of the matrix needs: in cluster order with the tree, or of two models in their own order."""
    heads = [str(head) for head in found.party.heads]
    rows, columns = _sides(found)
    values = found.values[found.by].values
    grown = None
    if rows == columns:
        grown = tree(found)
        rows = columns = grown.order
    return MatrixPicture(
        [[float(values[a, b]) for b in columns] for a in rows],
        [heads[a] for a in rows],
        [heads[b] for b in columns],
        merges=None if grown is None else grown.merges.tolist(),
        least=load_measures([found.by])[found.by].least,
    )


def notes(found: Likeness) -> tuple[str, ...]:
    """What a reader of the report should know."""
    said = [note for study in found.party.studies for note in study_notes(study, Scores((), {}))]
    return tuple(dict.fromkeys([*said, *found.notes, *_zero_norms(found)]))


def _zero_norms(found: Likeness) -> list[str]:
    """Why cells of some heads are empty: what is compared is all zeros, which is like nothing, not even itself."""
    mute: dict[str, list[str]] = {}
    for name, one in found.values.items():
        own = one.values.diagonal()
        if name not in (ATTENTION, HELLINGER) and bool(own.isfinite().any()):
            for head, value in zip(found.party.heads, own.tolist(), strict=True):
                if not math.isfinite(value):
                    mute.setdefault(str(head), []).append(name)
    names = dict.fromkeys(name for measures in mute.values() for name in measures)
    return [f"zero norm: {listed(list(mute))}, so {', '.join(names)} cannot be compared there"] if mute else []


def summary(found: Likeness) -> list[str]:
    """Lines for stderr: how many heads and pairs, of how many examples, and what was compared exactly."""
    studies, total = found.party.studies, int(found.party.candidates().sum())
    lines = [
        f"{' and '.join(type(study.loaded.model).__name__ for study in studies)}: {len(found.party.heads)} heads, "
        f"{total:,} pairs, most alike by {found.by} first"
    ]
    if studies[0].examples is not None:
        lines.append(f"{len(studies[0].examples)} examples")
    if found.compared:
        lines.append(f"attention compared exactly for {found.compared:,} of {total:,} pairs")
    return lines


def _number(value: Tensor) -> float | None:
    """A cell; None where the measure is not defined or was not made."""
    found = float(value)
    return found if math.isfinite(found) else None
