"""CSV: one header row, full float precision, an empty cell where nothing was measured, UTF-8, `\\n` line ends."""

from __future__ import annotations

from headscope.reports._separated import separated
from headscope.tables import Table

SUFFIXES: tuple[str, ...] = (".csv",)


def render(table: Table) -> bytes:
    """The report as CSV; text that could do harm stands as a JSON string, which begins with a quote."""
    return separated(table, ",")
