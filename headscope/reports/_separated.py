"""Lines of separated cells, as CSV and TSV have them."""

from __future__ import annotations

import csv
import io

from headscope.reports._cells import exact, safe_cell
from headscope.tables import Table


def separated(table: Table, delimiter: str) -> bytes:
    """The report as lines of cells with this delimiter, quoted as CSV is."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow([safe_cell(name) for name in table.names])
    for row in table.rows:
        cells = (row[name] for name in table.names)
        writer.writerow([safe_cell(cell) if isinstance(cell, str) else exact(cell) for cell in cells])
    return text.getvalue().encode()
