"""Parquet: typed columns, null where nothing was measured, provenance and notes in the frame's `attrs`."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

from headscope.reports._cells import exact, plain
from headscope.tables import Cell, Table

if TYPE_CHECKING:
    import pandas

SUFFIXES: tuple[str, ...] = (".parquet",)
BINARY = True


def render(table: Table) -> bytes:
    """The report as one Parquet file; `pandas.read_parquet` gives back the rows and `attrs`."""
    rows = tuple({name: _encodable(row[name]) for name in table.names} for row in table.rows)
    frame = replace(table, rows=rows).frame().reset_index(drop=True)
    for name in table.names:
        frame[name] = _column([row[name] for row in rows])
    buffer = io.BytesIO()
    frame.to_parquet(buffer, engine="pyarrow", index=False)
    return buffer.getvalue()


def _column(values: list[Cell]) -> pandas.Series:
    """One column of one type: what is mixed, or too large for 64 bits, becomes text or a float."""
    import pandas

    ints = [value for value in values if isinstance(value, int)]
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pandas.Series(values, dtype="boolean")
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in ints):
        return pandas.Series(values, dtype="Int64")
    if kinds <= {int, float}:
        return pandas.Series([None if value is None else float(value) for value in values], dtype="Float64")
    texts = [None if value is None else exact(value) for value in values]
    return pandas.Series(texts, dtype="object")


def _encodable(cell: Cell) -> Cell:
    """The cell as a builtin value, with lone surrogates, which UTF-8 cannot hold, written as escapes."""
    value = plain(cell)
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
