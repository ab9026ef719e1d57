"""JSON: one strict object with the rows, the columns' units and meanings, notes and provenance."""

from __future__ import annotations

from headscope.reports._cells import plain
from headscope.reports._origin import document, origin
from headscope.tables import Table, empty

SUFFIXES: tuple[str, ...] = (".json",)
HOLDS_ORIGIN = True


def render(table: Table) -> bytes:
    """The report as one JSON object; `null` where nothing was measured, with the reason, unprintables escaped."""
    rows = [{name: plain(row[name]) for name in table.names} for row in table.rows]
    return document(origin(table) | {"empty": _reasons(table), "rows": rows})


def _reasons(table: Table) -> dict[str, str]:
    """Why cells of a column are null, for each column that has such cells."""
    found: dict[str, str] = {}
    for name in table.names:
        cells = {repr(row[name]) for row in table.rows if empty(row[name])}
        if cells:
            words = {"None": "not measured, or not defined there", "nan": "not a number"}
            found[name] = "; ".join(sorted(words.get(cell, "not finite") for cell in cells))
    return found
