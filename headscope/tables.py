"""Report tables: rows of plain values under described columns, and the same as a pandas DataFrame keyed by head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headscope.columns import Column
from headscope.errors import UsageError, nearest
from headscope.provenance import Provenance

if TYPE_CHECKING:
    import pandas

Cell = str | int | float | bool | None
"""`None` and a non-finite float both mean: not measured. They are written as an empty cell or null."""


@dataclass(frozen=True)
class Table:
    """One report. Every row has a value under every column; `key` names the column that identifies a row."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[dict[str, Cell], ...]
    key: str = ""
    provenance: Provenance | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def names(self) -> list[str]:
        """The column names in order."""
        return [column.name for column in self.columns]

    def frame(self) -> pandas.DataFrame:
        """The table as a DataFrame indexed by `key` (all columns are kept; provenance stands in `attrs`)."""
        import pandas

        frame = pandas.DataFrame([[_clean(row[name]) for name in self.names] for row in self.rows], columns=self.names)
        frame.attrs = {"provenance": self.provenance.as_dict() if self.provenance else {}, "notes": list(self.notes)}
        return frame.set_index(self.key, drop=False) if self.key else frame

    def sorted(self, column: str) -> Table:
        """Rows ordered by a column, largest first, empty cells last; `-name` orders smallest first.

        Raises:
            UsageError: there is no such column.
        """
        name = column.removeprefix("-")
        self._require([name])
        known = [row for row in self.rows if not empty(row[name])]
        missing = [row for row in self.rows if empty(row[name])]
        text = any(isinstance(row[name], str) for row in known)
        descending = not column.startswith("-")
        if text:
            known.sort(key=lambda row: str(row[name]), reverse=not descending)
        else:
            known.sort(key=lambda row: float(row[name] or 0), reverse=descending)
        return replace(self, rows=(*known, *missing))

    def top(self, count: int) -> Table:
        """The first `count` rows."""
        return replace(self, rows=self.rows[:count])

    def select(self, names: Sequence[str]) -> Table:
        """Only these columns, in this order.

        Raises:
            UsageError: there is no such column.
        """
        self._require(names)
        by_name = {column.name: column for column in self.columns}
        rows = tuple({name: row[name] for name in names} for row in self.rows)
        key = self.key if self.key in names else ""
        return replace(self, columns=tuple(by_name[name] for name in names), rows=rows, key=key)

    def _require(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                raise UsageError(f"no column {name!r} in this report", hint=nearest(name, self.names))


def _clean(cell: Cell) -> Cell:
    """Half a surrogate pair as an escape: pandas cannot store it."""
    return cell.encode("utf-8", "backslashreplace").decode() if isinstance(cell, str) else cell


def empty(cell: Cell) -> bool:
    """Whether a cell stands for: not measured."""
    return cell is None or (isinstance(cell, float) and not math.isfinite(cell))
