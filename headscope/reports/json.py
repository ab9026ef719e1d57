"""JSON: one strict object with the rows, the columns' units and meanings, notes and provenance."""

from __future__ import annotations

from headscope.reports._cells import plain
from headscope.reports._origin import document, origin
from headscope.tables import Table

SUFFIXES: tuple[str, ...] = (".json",)
HOLDS_ORIGIN = True


def render(table: Table) -> bytes:
    """The report as one JSON object; `null` where nothing was measured, with the reason, unprintables escaped."""
    rows = [{name: plain(row[name]) for name in table.names} for row in table.rows]
    return document(origin(table) | {"rows": rows})
