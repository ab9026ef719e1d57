"""Reader of comma- or TAB-separated files: cells to rows with line numbers, columns of numbers to numbers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from headscope.errors import DataError
from headscope.formats import Example, Faults, Parsed, refuse_twins

LONGEST_CELL = 2**31 - 1
WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,3999})", re.ASCII)
REAL = re.compile(
    r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(inf|infinity)|nan", re.ASCII | re.IGNORECASE
)


def separated(text: str, faults: Faults, *, delimiter: str, verbatim: Collection[str]) -> Parsed:
    """Rows of a file with a header and separated cells; an empty cell is None.

    A column of numbers becomes int or float, unless its lower-case name is in `verbatim` or a number has leading zeros.
    """
    with _long_cells():
        lines = _cells(text, delimiter, faults)
        header = next(((number, cells) for number, cells in lines if any(map(str.strip, cells))), None)
        if header is None:
            return Parsed([], [], [])
        columns = _header(*header, delimiter=delimiter, faults=faults)
        numbers, rows, notes = _body(lines, len(columns), faults)
    if not rows:
        return Parsed([], columns, [])
    values = [
        list(cells) if column.lower() in verbatim else _numeric(cells)
        for column, cells in zip(columns, zip(*rows, strict=True), strict=True)
    ]
    examples: list[Example] = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
    return Parsed(examples, columns, numbers, notes)


def _cells(text: str, delimiter: str, faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, with the number of the line it starts on."""
    reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter, strict=True)
    header = True
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if header:  # skipping it would take an example for the header
                raise DataError(f"{faults.label} line {start}: the header cannot be read: {error}") from error
            faults.add(f"line {start}", f"the cells cannot be told apart: {error}")
            continue
        if cells:
            header = False
            yield start, cells


def _header(number: int, cells: list[str], *, delimiter: str, faults: Faults) -> list[str]:
    if len(cells) == 1:
        for other in {",": ";\t", "\t": ";,"}[delimiter]:
            if other in cells[0]:
                guess = "TAB" if other == "\t" else other
                raise DataError(
                    f"{faults.label} line {number}: one column named {cells[0]!r}: is the separator {guess}?",
                    hint="a .csv file has commas, a .tsv file has TABs",
                )
    columns = [cell.strip() or f"Unnamed: {place}" for place, cell in enumerate(cells)]
    refuse_twins(columns, f"{faults.label} line {number}")
    return columns


def _body(
    lines: Iterable[tuple[int, list[str]]], width: int, faults: Faults
) -> tuple[list[int], list[list[str | None]], list[str]]:
    """Line numbers and cells of the rows below the header, each filled up to the header's width, and notes."""
    numbers: list[int] = []
    rows: list[list[str | None]] = []
    short = 0
    for number, cells in lines:
        if len(cells) == 1 < width and not cells[0].strip():
            continue
        if len(cells) > width:
            faults.add(f"line {number}", f"{len(cells)} cells, but the header has {width}")
            continue
        short += len(cells) < width
        numbers.append(number)
        rows.append([cell or None for cell in cells] + [None] * (width - len(cells)))
    notes = [f"{short} rows have fewer cells than the header; the rest of each is empty"] if short else []
    return numbers, rows, notes


def _numeric(cells: Collection[str | None]) -> list[object]:
    """The cells as int if all that are not empty look so, else as float, else unchanged."""
    kinds: tuple[tuple[re.Pattern[str], Callable[[str], object]], ...] = ((WHOLE, int), (REAL, float))
    for pattern, convert in kinds:
        if all(cell is None or pattern.fullmatch(cell.strip(" \t")) for cell in cells):
            return [None if cell is None else convert(cell) for cell in cells]
    return list(cells)


@contextmanager
def _long_cells() -> Iterator[None]:
    """Cells of any length in this block; the limit belongs to the whole process, so it is put back."""
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)
