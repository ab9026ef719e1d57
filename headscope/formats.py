"""Readers of text, JSON and Parquet files: from the content of one file to rows with line numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headscope.errors import DataError
from headscope.unpack import MOST_BYTES, printable

SHOWN = 80
"""Characters of a broken line that an error shows."""
Example = dict[str, object]


@dataclass(frozen=True)
class Parsed:
    """The rows of one file, its column names, and the 1-based line or row number of each row."""

    rows: list[Example]
    columns: list[str]
    numbers: list[int]
    notes: list[str] = field(default_factory=list)


@dataclass
class Faults:
    """Rows that cannot be used: the first one is an error, or all are counted where bad rows may be skipped."""

    name: str
    skip: bool
    count: int = 0
    first: str = ""

    @property
    def label(self) -> str:
        """The name of the file as an error shows it."""
        return "stdin" if self.name == "-" else printable(self.name)

    def add(self, where: str, what: str) -> None:
        """Counts one bad row.

        Raises:
            DataError: bad rows may not be skipped.
        """
        message = f"{self.label} {where}: {what}"
        if not self.skip:
            raise DataError(message, hint="--skip-bad leaves such rows out")
        self.count += 1
        self.first = self.first or message


def lines_of_text(text: str, faults: Faults) -> Parsed:
    """One example per line that is not blank; only LF and CRLF end a line."""
    kept = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return Parsed([{"text": line} for _, line in kept], ["text"], [number for number, _ in kept])


def json_lines(text: str, faults: Faults) -> Parsed:
    """One JSON object per line; blank lines do not count."""

    def values() -> Iterator[tuple[int, object]]:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                faults.add(f"line {number}", f"not JSON ({_why(error)}): {printable(line.rstrip()[:SHOWN])}")
            else:
                yield number, value

    return _objects(values(), "line", faults, escapes="\\u" in text)


def json_document(text: str, faults: Faults) -> Parsed:
    """A JSON array of objects, an object with one such array in it, or an object of equally long lists."""
    if not text.strip():
        return Parsed([], [], [])
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1]
        hint = "if it holds one object a line, name it .jsonl" if error.msg == "Extra data" else None
        shown = printable(line.rstrip()[:SHOWN])
        raise DataError(f"{faults.label} line {error.lineno}: not JSON ({_why(error)}): {shown}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{faults.label}: not JSON ({_why(error)})") from error
    return _objects(enumerate(_examples(document, faults), 1), "row", faults, escapes="\\u" in text)


def parquet(raw: bytes, faults: Faults) -> Parsed:
    """Rows of a Parquet file; lists and structs become Python lists and dictionaries."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(pyarrow.BufferReader(raw))
        columns = list(file.schema_arrow.names)
        refuse_twins(columns, faults.label)
        size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups))
        if size > MOST_BYTES:
            raise DataError(f"{faults.label}: unpacks to {size >> 20} MiB", hint="split it")
        rows: list[Example] = file.read().to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{faults.label}: not a whole Parquet file: {_why(error)}") from error
    return Parsed(rows if columns else [], columns, list(range(1, len(rows) + 1)))


def refuse_twins(columns: list[str], where: str) -> None:
    """Nothing, if no two columns have one name.

    Raises:
        DataError: some have.
    """
    twins = sorted({name for name in columns if columns.count(name) > 1}) if len(set(columns)) < len(columns) else []
    if twins:
        raise DataError(f"{where}: more than one column named {', '.join(map(repr, twins))}")


def _why(error: Exception) -> str:
    """The first line of an error's own words, safe to print."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.colno}"
    return printable(str(error).strip().partition("\n")[0])


def _examples(document: object, faults: Faults) -> list[object]:
    if isinstance(document, list):
        return document
    if not isinstance(document, dict):
        raise DataError(f"{faults.label}: {_kind(document)}, but an array of objects is expected")
    lists = {key: value for key, value in document.items() if isinstance(value, list)}
    tables = [key for key, value in lists.items() if value and all(isinstance(item, dict) for item in value)]
    if len(tables) > 1 and len(tables) == len(lists):
        names = ", ".join(map(repr, tables))
        raise DataError(f"{faults.label}: several arrays of objects: {names}", hint="keep one in each file")
    if len(lists) == len(document) and (len(lists) > 1 or not tables):
        return _transposed(lists, faults)
    if len(tables) == 1:
        return lists[tables[0]]
    raise DataError(f"{faults.label}: one object, but an array of objects is expected")


def _transposed(lists: dict[str, list[object]], faults: Faults) -> list[object]:
    sizes = {key: len(value) for key, value in lists.items()}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{key!r} {size}" for key, size in sizes.items())
        raise DataError(f"{faults.label}: lists of different lengths: {found}")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _objects(values: Iterable[tuple[int, object]], unit: str, faults: Faults, *, escapes: bool) -> Parsed:
    """Rows out of JSON values: each must be an object, and a field must be of one kind throughout (null apart).

    Only text with `escapes` (backslash u) can hold what is no character, so only then is it looked for.
    """
    kinds: dict[str, tuple[str, int]] = {}
    columns: dict[str, None] = {}
    kept: list[tuple[int, Example]] = []
    for number, value in values:
        problem = _problem(value, kinds, unit)
        if not problem and escapes and not _encodable(value):
            problem = "half of a surrogate pair, which is not a character"
        if problem or not isinstance(value, dict):
            faults.add(f"{unit} {number}", problem or "not an object")
            continue
        for name, item in value.items():
            columns.setdefault(name)
            if item is not None:
                kinds.setdefault(name, (_kind(item), number))
        kept.append((number, value))
    if not columns:
        return Parsed([], [], [])
    rows = [{name: row.get(name) for name in columns} for _, row in kept]
    return Parsed(rows, list(columns), [number for number, _ in kept])


def _problem(value: object, kinds: dict[str, tuple[str, int]], unit: str) -> str | None:
    if not isinstance(value, dict):
        return f"{_kind(value)}, but an object is expected"
    for name, item in value.items():
        known = kinds.get(name)
        if known and item is not None and _kind(item) != known[0]:
            return f"field {name!r} is {_kind(item)} here, but {known[0]} in {unit} {known[1]}"
    return None


def _encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return {str: "text", list: "a list", dict: "an object"}.get(type(value), "something else")
