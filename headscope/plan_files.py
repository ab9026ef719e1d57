"""Files that say which heads to remove: a plan, a checkpoint's manifest, or the rows that `headscope prune` prints.

Each becomes a plan document, plain JSON values of unknown origin that `plan.Plan.from_dict` judges.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headscope import manifest
from headscope.cells import WHOLE, separated
from headscope.errors import DataError, InvalidPlan, ModelError
from headscope.formats import Faults
from headscope.jsonfiles import json_object, quote, read, unique
from headscope.plan_values import shown

MOST_BYTES = 64 * 1024**2
_ROW_COLUMNS = ("site", "heads_before", "heads_after", "kv_before", "kv_after", "removed")


def plan_document(path: Path) -> dict[str, Any]:
    """The plan document in a file, or in the manifest of a checkpoint folder.

    Raises:
        DataError: the file cannot be read.
        InvalidPlan: it holds neither a plan nor rows of `headscope prune`.
    """
    try:
        file = path / manifest.NAME if path.is_dir() else path
        raw, _ = read(file, MOST_BYTES)
        if raw.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
            return _from_json(json_object(raw.removeprefix(b"\xef\xbb\xbf"), file, unique), file)
        return _from_rows(_separated(raw, file), file)
    except ModelError as error:
        raise DataError(str(error), hint=error.hint) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _from_json(document: dict[str, Any], file: Path) -> dict[str, Any]:
    plan = document.get("plan")
    if isinstance(plan, dict):
        return plan
    if "removed" in document:
        return document
    rows = document.get("rows")
    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        return _from_rows(rows, file)
    raise InvalidPlan(f"{file}: neither a plan nor a report of `headscope prune`", hint='a plan has a list "removed"')


def _separated(raw: bytes, file: Path) -> Sequence[dict[str, object]]:
    """The rows of a CSV or TSV file, every cell as text."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text at byte {error.start}") from None
    delimiter = "\t" if "\t" in text.partition("\n")[0] else ","
    try:
        return separated(text, Faults(str(file), skip=False), delimiter=delimiter, verbatim=_ROW_COLUMNS).rows
    except DataError as error:
        raise DataError(str(error)) from None  # its hint is about examples


def _from_rows(rows: Sequence[dict[str, object]], file: Path) -> dict[str, Any]:
    """A plan document out of one row for each site."""
    if not rows:
        raise InvalidPlan(f"{file}: empty")
    for name in ("site", "removed"):
        if name not in rows[0]:
            raise InvalidPlan(
                f"{file}: no column {name!r}", hint="the rows of `headscope prune` start with " + ",".join(_ROW_COLUMNS)
            )
    sites: list[dict[str, Any]] = []
    removed: list[str] = []
    for row in rows:
        label = row.get("site")
        if not isinstance(label, str):
            raise InvalidPlan(f"{file}: a site must be a text, not {shown(label)}")
        where = f"{file}: {quote(label)}"
        numbers = _numbers(row.get("removed"), where)
        removed += [f"{label}.{number}" for number in numbers]
        before, after = _count(row, "heads_before", where), _count(row, "heads_after", where)
        lost = {0, len(numbers)}  # masked heads are still there
        if before is not None and after is not None and before - after not in lost:
            raise InvalidPlan(f"{where} goes from {before} to {after} heads, but lists {len(numbers)} as removed")
        known = {"site": label, "heads": before, "kv_heads": _count(row, "kv_before", where)}
        sites.append({name: value for name, value in known.items() if value is not None})
    return {"sites": sites, "removed": removed}


def _numbers(cell: object, where: str) -> list[int]:
    """Head numbers in a cell: parted by blanks, commas or semicolons; in JSON also a list, or one number."""
    if isinstance(cell, str):
        return [_natural(part, f"{where}: removed") for part in re.split(r"[\s,;]+", cell) if part]
    if cell is None:
        return []
    return [_natural(part, f"{where}: removed") for part in (cell if isinstance(cell, list) else [cell])]


def _count(row: dict[str, object], name: str, where: str) -> int | None:
    """A count that the row may have."""
    cell = row.get(name)
    return None if cell is None else _natural(cell, f"{where}: {name}")


def _natural(cell: object, what: str) -> int:
    if type(cell) is int and cell >= 0:
        return cell
    if isinstance(cell, str) and WHOLE.fullmatch(cell) and cell.isdigit():
        return int(cell)
    raise InvalidPlan(f"{what} holds {shown(cell)}, not a whole number")
