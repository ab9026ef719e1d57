"""JSON lines: one strict JSON object for each row."""

from __future__ import annotations

import json

from headscope.reports._cells import plain, safe_json
from headscope.tables import Table

SUFFIXES: tuple[str, ...] = (".jsonl",)


def render(table: Table) -> bytes:
    """The report's rows as JSON lines; `null` where nothing was measured, unprintable characters escaped."""
    rows = ({name: plain(row[name]) for name in table.names} for row in table.rows)
    lines = [safe_json(json.dumps(row, allow_nan=False, ensure_ascii=False)) + "\n" for row in rows]
    return "".join(lines).encode()
