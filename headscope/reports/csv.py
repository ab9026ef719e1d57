"""CSV: one header row, full float precision, an empty cell where nothing was measured, UTF-8, `\\n` line ends."""

from __future__ import annotations

import csv
import io

from headscope.reports._cells import exact, safe_cell
from headscope.tables import Table

SUFFIXES: tuple[str, ...] = (".csv",)


def render(table: Table) -> bytes:
    """The report as CSV; text that could do harm stands as a JSON string, which begins with a quote."""
    return separated(table, ",")


def separated(table: Table, delimiter: str) -> bytes:
    """The report as lines of cells with this delimiter, quoted as CSV is."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow([safe_cell(name) for name in table.names])
    for row in table.rows:
        cells = (row[name] for name in table.names)
        writer.writerow([safe_cell(cell) if isinstance(cell, str) else exact(cell) for cell in cells])
    return text.getvalue().encode()
