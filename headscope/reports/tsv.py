"""TSV: as CSV, with a tab between the cells; no cell holds a tab or a line end, quotes are doubled as in CSV."""

from __future__ import annotations

from headscope.reports._separated import separated
from headscope.tables import Table

SUFFIXES: tuple[str, ...] = (".tsv",)


def render(table: Table) -> bytes:
    """The report as TSV; text that could do harm stands as a JSON string, which begins with a quote."""
    return separated(table, "\t")
