"""Table: aligned columns for a terminal, floats with 4 significant digits, blank where nothing was measured.

Numbers are never cut or wrapped. Columns that do not fit the width follow in further blocks below, each of which
repeats the key column (or, without one, the leading text columns, at most two). Only long text is folded within its
column. It is laid out by hand: rich's own tables take seconds for a thousand rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headscope.reports._cells import exact, is_number, safe_text
from headscope.tables import Cell, Table, empty

SUFFIXES: tuple[str, ...] = (".txt",)

_GAP = 2
_NARROWEST = 8
"""The least width, in terminal cells, that a folded text column keeps."""


@dataclass(frozen=True)
class _Column:
    """One column as text: `width` terminal cells, of which its longest number needs `least`."""

    name: str
    cells: tuple[str, ...]
    numeric: bool
    least: int
    width: int


def render(table: Table, *, width: int | None = None, color: bool = False) -> bytes:
    """The report as text for `width` terminal cells (the terminal's own by default); no ESC byte without `color`."""
    limit = width or shutil.get_terminal_size().columns
    columns = [_measured(table, name) for name in table.names]
    blocks = [_block(block, color) for block in _blocks(table, columns, limit)]
    return "\n".join(blocks).encode()


def _measured(table: Table, name: str) -> _Column:
    values = [row[name] for row in table.rows]
    known = [value for value in values if not empty(value)]
    cells = tuple(_shown(value) for value in values)
    numeric = bool(known) and all(is_number(value) for value in known)
    longest = max((_width(cell) for cell in cells), default=0)
    header = safe_text(name)
    return _Column(header, cells, numeric, longest if numeric else 1, max(longest, _width(header)))


def _shown(cell: Cell) -> str:
    if isinstance(cell, float) and not empty(cell):
        return f"{cell:.4g}"
    return safe_text(exact(cell))


def _blocks(table: Table, columns: list[_Column], limit: int) -> Iterator[list[_Column]]:
    """The columns in groups that fit `limit`, each group led by the columns that identify a row."""
    leading = _leading(table, columns)
    share = limit * 2 // (3 * max(1, len(leading))) - _GAP
    lead = [_narrowed(column, share) for column in columns if column.name in leading]
    rest = [column for column in columns if column.name not in leading]
    room = limit - sum(column.width + _GAP for column in lead)
    block: list[_Column] = []
    left = room
    for column in rest:
        foldable = not column.numeric and left >= min(room, 2 * _NARROWEST)
        if block and column.width > left and not foldable:
            yield [*lead, *block]
            block, left = [], room
        fitted = _narrowed(column, left)
        block.append(fitted)
        left -= fitted.width + _GAP
    if block or lead:
        yield [*lead, *block]


def _leading(table: Table, columns: list[_Column]) -> list[str]:
    if table.key:
        return [safe_text(table.key)]
    text = [column.name for column in columns[:2] if not column.numeric]
    return text or [column.name for column in columns[:1]]


def _narrowed(column: _Column, room: int) -> _Column:
    """The column no wider than `room`, but never narrower than its longest number or a few letters."""
    least = max(column.least, min(column.width, _NARROWEST))
    return replace(column, width=max(least, min(column.width, room)))


def _block(columns: Sequence[_Column], color: bool) -> str:
    """One header, a rule and the rows, each line ended by a newline."""
    bold, dim, plain = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if color else ("", "", "")
    lines = [f"{bold}{line}{plain}" for line in _row(columns, lambda column: column.name)]
    lines.append(dim + (" " * _GAP).join("─" * column.width for column in columns) + plain)
    for index in range(len(columns[0].cells)):
        lines += _row(columns, lambda column, index=index: column.cells[index])
    return "".join(f"{line}\n" for line in lines)


def _row(columns: Sequence[_Column], cell: Callable[[_Column], str]) -> list[str]:
    """The lines of one row: more than one where a cell is folded."""
    folded = [_folded(cell(column), column.width) for column in columns]
    lines = []
    for number in range(max(len(parts) for parts in folded)):
        line = ""
        for column, parts in zip(columns, folded, strict=True):
            part = parts[number] if number < len(parts) else ""
            space = " " * (column.width - _width(part))
            line += (space + part if column.numeric else part + space) + " " * _GAP
        lines.append(line.rstrip())
    return lines


def _folded(text: str, width: int) -> list[str]:
    from rich.cells import chop_cells

    return [text] if _width(text) <= width else chop_cells(text, width)


def _width(text: str) -> int:
    """How many terminal cells the text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
