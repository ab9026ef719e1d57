"""The picture of `evaluate`: quality, cost and speed of the models beside each other, from the rows of its report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import nan
from pathlib import Path

from headscope.reports._bars import Bars, bars_figure
from headscope.reports._picture import Picture
from headscope.tables import Cell, Table, empty

SHOWN = ("loss", "metric", "divergence", "parameters", "macs_per_token", "kv_bytes_per_token", "disk_bytes")
"""Columns that are the same at every batch size."""
_COUNTS = ("parameters", "macs_per_token", "kv_bytes_per_token", "disk_bytes")


def comparison_picture(table: Table) -> Picture:
    """Bars of every quantity that was measured, and of the time of each batch size."""
    units = {column.name: column.unit for column in table.columns}
    sizes = list(dict.fromkeys(row["batch_size"] for row in table.rows)) if "batch_size" in units else []
    first = _of_size(table, sizes[0]) if sizes else table.rows
    panels = [
        _bars(name, units[name], first)
        for name in SHOWN
        if any(not empty(row[name]) and row[name] != 0 for row in first)
    ]
    for size in sizes:
        panels.append(_times(size, _of_size(table, size)))
    models = [str(row["model"]) for row in first]
    data = "" if table.provenance is None else f" of {Path(table.provenance.data).name}"
    examples = first[0]["examples"] if first else 0
    return partial(bars_figure, models, panels, title=f"{examples} examples{data}; the first model is the baseline")


def _of_size(table: Table, size: Cell) -> tuple[dict[str, Cell], ...]:
    return tuple(row for row in table.rows if row["batch_size"] == size)


def _number(cell: Cell) -> float:
    return nan if empty(cell) or cell is None or isinstance(cell, str) else float(cell)


def _bars(name: str, unit: str, rows: Sequence[dict[str, Cell]]) -> Bars:
    values = tuple(_number(row[name]) for row in rows)
    title = str(rows[0]["metric_name"] or name) if name == "metric" else name
    if name not in _COUNTS or not values[0]:
        return Bars(title, unit if name not in _COUNTS else "", values)
    labels = [f"{values[0]:,.0f}", *(f"{value:,.0f} ({value / values[0] - 1:+.1%})" for value in values[1:])]
    return Bars(title, "", values, tuple(labels))


def _times(size: Cell, rows: Sequence[dict[str, Cell]]) -> Bars:
    """Median times, with half the distance of the quartiles, and the speed-up beside the one that was predicted."""
    labels: list[str] = []
    for place, row in enumerate(rows):
        time, speedup, predicted = (_number(row[name]) for name in ("latency_ms", "speedup", "speedup_predicted"))
        labels.append(f"{time:.3g}" if not place else f"{time:.3g} (×{speedup:.2f}, predicted ×{predicted:.2f})")
    spreads = tuple(_number(row["latency_iqr_ms"]) / 2 for row in rows)
    values = tuple(_number(row["latency_ms"]) for row in rows)
    return Bars(f"latency, batch size {size}", "ms", values, tuple(labels), spreads)
