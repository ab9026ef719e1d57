"""What a report rests on, beside its rows: provenance, notes and what the columns mean, inside JSON or in a side file.

The side file of `report.csv` is `report.csv.json`. It names the report and its digest, so that the two stay together.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from headscope.reports._cells import safe_json
from headscope.tables import Table, empty

SCHEMA_VERSION = 1


def side_file(output: Path) -> Path:
    """Where the side file of a report lies."""
    return output.with_name(f"{output.name}.json")


def side_document(table: Table, output: Path, data: bytes) -> bytes:
    """The side file of the report `output`, whose bytes are `data`."""
    file = {"file": output.name, "sha256": hashlib.sha256(data).hexdigest()}
    return document(origin(table) | file)


def origin(table: Table) -> dict[str, Any]:
    """Everything about a report but its rows, as values that JSON can hold."""
    return {
        "schema_version": SCHEMA_VERSION,
        "report": table.name,
        "provenance": table.provenance.as_dict() if table.provenance else {},
        "notes": list(table.notes),
        "columns": {column.name: {"unit": column.unit, "meaning": column.meaning} for column in table.columns},
        "empty": _reasons(table),
    }


def _reasons(table: Table) -> dict[str, str]:
    """Why cells of a column are null, for each column that has such cells."""
    found: dict[str, str] = {}
    for name in table.names:
        cells = {repr(row[name]) for row in table.rows if empty(row[name])}
        if cells:
            words = {"None": "not measured, or not defined there", "nan": "not a number"}
            found[name] = "; ".join(sorted(words.get(cell, "not finite") for cell in cells))
    return found


def document(value: dict[str, Any]) -> bytes:
    """One strict JSON object with every unprintable character escaped."""
    return (safe_json(json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2)) + "\n").encode()


def provenance_lines(table: Table) -> list[tuple[str, str]]:
    """Names and values of the provenance for people to read, without those that do not apply; not yet escaped."""
    if table.provenance is None:
        return []
    items: list[tuple[str, str]] = []
    for name, value in table.provenance.as_dict().items():
        if isinstance(value, dict):
            value = ", ".join(f"{package} {version}" for package, version in value.items())
        if value != "":
            items.append((name.replace("_", " "), str(value)))
    return items
