"""Scores of heads out of a file that `headscope inspect` wrote, for `prune --scores FILE --by COLUMN`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from headscope.cells import REAL
from headscope.errors import DataError, ModelError, UsageError, nearest
from headscope.formats import Faults, Parsed
from headscope.heads import HeadId
from headscope.jsonfiles import read
from headscope.sources import BINARIES, SUFFIXES, TEXTS
from headscope.unpack import printable, split_suffix, unpack

MOST_BYTES = 256 * 1024**2
_FEW = 3
"""Heads that an error names."""


def read_scores(path: Path, column: str, heads: Sequence[HeadId]) -> dict[HeadId, float]:
    """One column of a report of heads (CSV, TSV, JSON, JSON lines or Parquet), for exactly these heads of the model.

    Raises:
        DataError: the file cannot be read, has other heads than the model, or no finite number for one of them.
        UsageError: it has no such column.
    """
    label = printable(str(path))
    parsed = _rows(path, label)
    if "head" not in parsed.columns:
        raise DataError(f"{label}: no column 'head', so these are no scores of heads", hint=_listing(parsed.columns))
    if column not in parsed.columns:
        raise UsageError(f"no column {column!r} in {label}", hint=nearest(column, parsed.columns))
    known = {str(head): head for head in heads}
    found: dict[HeadId, float] = {}
    for number, row in zip(parsed.numbers, parsed.rows, strict=True):
        where = f"{label} {_unit(path)} {number}"
        head = _head(row, known, where)
        if head in found:
            raise DataError(f"{where}: {head} for the second time")
        found[head] = _number(row.get(column), f"{where}: {column} of {head}")
    missing = [str(head) for head in heads if head not in found]
    if missing:
        more = f" and {len(missing) - _FEW} more" if len(missing) > _FEW else ""
        raise DataError(
            f"{label}: no row for {', '.join(missing[:_FEW])}{more}",
            hint="every head of the model needs a score: write the report without --top",
        )
    return found


def _rows(path: Path, label: str) -> Parsed:
    """The rows of the file; the hints of its readers are left out, as they are about examples."""
    suffix, packing = split_suffix(path.name)
    if suffix not in SUFFIXES or suffix == "txt":
        known = " ".join(f".{name}" for name in SUFFIXES if name != "txt")
        raise DataError(f"{label}: not a report that can be read back", hint=f"known: {known}")
    faults = Faults(str(path), skip=False)
    try:
        raw, _ = read(path, MOST_BYTES)
        content = unpack(raw, packing, str(path)) if packing else raw
        if suffix in BINARIES:
            parsed = BINARIES[suffix](content, faults)
        else:
            parsed = TEXTS[suffix](_text(content, label), faults)
    except (DataError, ModelError) as error:
        raise DataError(str(error)) from None
    if not parsed.rows:
        raise DataError(f"{label}: no rows")
    return parsed


def _text(content: bytes, label: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{label}: not UTF-8 text at byte {error.start}") from None


def _unit(path: Path) -> str:
    """What the reader counts in a file of this kind."""
    return "row" if split_suffix(path.name)[0] in ("json", "parquet") else "line"


def _head(row: Mapping[str, object], known: Mapping[str, HeadId], where: str) -> HeadId:
    label = row["head"]
    if not isinstance(label, str) or label not in known:
        raise DataError(
            f"{where}: this model has no head {printable(repr(label)[:80])}",
            hint="the report must be of this model, with one row for each head",
        )
    return known[label]


def _number(cell: object, what: str) -> float:
    """A finite number; a column in which any cell is no number arrives as text, so each text is looked at by itself."""
    if cell is None or cell == "":
        raise DataError(f"{what} is empty", hint="choose a column that is measured for every head")
    value = _value(cell)
    if not math.isfinite(value):
        raise DataError(f"{what} is {printable(repr(cell)[:80])}, not a finite number")
    return value


def _value(cell: object) -> float:
    """The number in a cell, NaN if there is none."""
    if isinstance(cell, bool) or (isinstance(cell, str) and not REAL.fullmatch(cell.strip())):
        return math.nan
    with contextlib.suppress(OverflowError):
        return float(cell) if isinstance(cell, int | float | str) else math.nan
    return math.nan


def _listing(columns: Sequence[str]) -> str:
    return "columns: " + ", ".join(printable(name[:80]) for name in columns[:20])
