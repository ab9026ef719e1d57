"""JSON: one strict object with the rows, the columns' units and meanings, notes and provenance."""

from __future__ import annotations

import json

from headscope.reports._cells import plain, safe_json
from headscope.tables import Table, empty

SUFFIXES: tuple[str, ...] = (".json",)
SCHEMA_VERSION = 1


def render(table: Table) -> bytes:
    """The report as one JSON object; `null` where nothing was measured, with the reason, unprintables escaped."""
    report = {
        "schema_version": SCHEMA_VERSION,
        "report": table.name,
        "provenance": table.provenance.as_dict() if table.provenance else {},
        "notes": list(table.notes),
        "columns": {column.name: {"unit": column.unit, "meaning": column.meaning} for column in table.columns},
        "empty": _reasons(table),
        "rows": [{name: plain(row[name]) for name in table.names} for row in table.rows],
    }
    return (safe_json(json.dumps(report, allow_nan=False, ensure_ascii=False, indent=2)) + "\n").encode()


def _reasons(table: Table) -> dict[str, str]:
    """Why cells of a column are null, for each column that has such cells."""
    found: dict[str, str] = {}
    for name in table.names:
        cells = {repr(row[name]) for row in table.rows if empty(row[name])}
        if cells:
            words = {"None": "not measured, or not defined there", "nan": "not a number"}
            found[name] = "; ".join(sorted(words.get(cell, "not finite") for cell in cells))
    return found
