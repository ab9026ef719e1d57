"""Pictures of the reports of `inspect`: a heat map of the heads' first score, and what changes over the layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import nan
from pathlib import Path

from headscope.columns import Column
from headscope.inspection import heat_map
from headscope.reports._picture import Picture
from headscope.reports._plot import HeadPicture, HeatMap, head_figure
from headscope.reports._profiles import Profile, Roles
from headscope.tables import Cell, Table, empty

DRAWN = ("importance", "sensitivity", "effect", "ablation", "only")
"""Columns that a heat map may show, the first that a report has."""
PROFILED = ("entropy", "distance", "qk_rank", "ov_rank")
"""Columns whose course over the layers is shown."""
COSTS = ("parameters", "macs_per_token", "kv_bytes_per_token")
"""Columns of a report by layer that are shown besides."""
ROLE = "role"


def drawn(names: Collection[str]) -> str | None:
    """The column that the heat map of a report with these columns shows; None where it has none."""
    return next((name for name in DRAWN if name in names), None)


def drawable(names: Collection[str]) -> bool:
    """Whether a report with these columns has anything to draw."""
    return "layer" in names and not set(names).isdisjoint({*DRAWN, *PROFILED, *(COSTS if "site" in names else ())})


def head_picture(table: Table) -> Picture | None:
    """The picture of a report by head or by layer; None where it has nothing to draw."""
    if not drawable(table.names):
        return None
    by_layer = "site" in table.names
    shown = drawn(table.names)
    columns = {column.name: column for column in table.columns}
    map = None
    if shown is not None and not by_layer:
        map = HeatMap(heat_map(table, shown), shown, columns[shown].unit, f"{shown}: {columns[shown].meaning}")
    profiled = (*COSTS, *DRAWN, *PROFILED) if by_layer else PROFILED
    profiles = [_profile(table, columns[name]) for name in profiled if name in columns and _varied(table, name)]
    known = columns[ROLE].labels if ROLE in columns else ()
    roles = _roles(table, known) if known and not by_layer else ()
    what = "layers" if by_layer else "heads" if map is None else f"{shown} of the {len(table.rows)} heads"
    picture = HeadPicture(_title(table, what), map, tuple(profiles), roles)
    return partial(head_figure, picture)


def _title(table: Table, what: str) -> str:
    """What is shown, of which model, and on how much data."""
    origin = table.provenance
    named = f"{what} of {Path(origin.model).name}" if origin is not None else what
    if origin is None or not origin.examples:
        return named
    return f"{named}, on {origin.examples:,} examples of {Path(origin.data).name}"


def _profile(table: Table, column: Column) -> Profile:
    return Profile(column.name, column.unit, _by_layer(table, column.name), column.meaning)


def _varied(table: Table, name: str) -> bool:
    """Whether a column was measured, and is not 0 throughout (as the KV cache of an encoder)."""
    return any(not empty(row[name]) and row[name] != 0 for row in table.rows)


def _by_layer(table: Table, name: str) -> dict[str, list[list[float]]]:
    """The values of a column by stack and kind, and by layer."""
    found = _cells(table, name)
    return {kind: [[_number(cell) for cell in row] for row in rows] for kind, rows in found.items()}


def _cells(table: Table, name: str) -> dict[str, list[list[Cell]]]:
    blocks: dict[str, list[list[Cell]]] = {}
    for row in table.rows:
        layers, layer = blocks.setdefault(f"{row['stack']}.{row['kind']}", []), int(row["layer"] or 0)
        layers += [[] for _ in range(layer + 1 - len(layers))]
        layers[layer].append(row[name])
    return blocks


def _number(cell: Cell) -> float:
    return nan if empty(cell) or isinstance(cell, str) or cell is None else float(cell)


def _roles(table: Table, known: Sequence[str]) -> tuple[Roles, ...]:
    found = {kind: [[str(cell) for cell in row if not empty(cell)] for row in rows]
             for kind, rows in _cells(table, ROLE).items()}  # fmt: skip
    named = "heads of each role" if len(found) == 1 else "heads of each role, {}"
    return tuple(Roles(named.format(kind), rows, tuple(known)) for kind, rows in found.items() if any(rows))
