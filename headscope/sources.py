"""DATA of the command line read as rows: a data file, a folder of images or sounds, stdin, or a Hub data set."""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import BinaryIO

from headscope.cells import separated
from headscope.errors import DataError, UsageError
from headscope.fields import VERBATIM
from headscope.folders import MEDIA, folder
from headscope.formats import Faults, Parsed, json_document, json_lines, lines_of_text, parquet
from headscope.hub_data import could_be_id, hub_rows
from headscope.rows import Rows
from headscope.unpack import check_encoding, decode, printable, split_suffix, unpack

TEXTS: dict[str, Callable[[str, Faults], Parsed]] = {
    "txt": lines_of_text,
    "csv": partial(separated, delimiter=",", verbatim=VERBATIM),
    "tsv": partial(separated, delimiter="\t", verbatim=VERBATIM),
    "jsonl": json_lines,
    "ndjson": json_lines,
    "json": json_document,
}
BINARIES: dict[str, Callable[[bytes, Faults], Parsed]] = {"parquet": parquet}
SUFFIXES = (*TEXTS, *BINARIES)
FOREIGN = ("zip", "bz2", "xz", "7z", "tar", "xlsx", "xls", "arrow", "feather", "pkl", "xml", "html", "md", "py")
"""Suffixes of files that cannot be read, but that no Hub data set has."""
SEARCHED = 10_000
"""Names of one folder that are looked at for a hint."""


def read(
    data: str,
    *,
    config: str | None = None,
    split: str | None = None,
    encoding: str = "utf-8",
    skip_bad: bool = False,
    stdin: BinaryIO | None = None,
) -> Rows:
    """All rows of DATA; only what is neither a path nor looks like one is asked of the Hub.

    Raises:
        DataError: it cannot be read, or has no rows.
        UsageError: an unknown encoding, config or split, or one that does not apply.
    """
    check_encoding(encoding)
    if not data:
        raise UsageError("--data is empty")
    faults = Faults(data, skip_bad)
    mode = None if data == "-" else _mode(data)
    if mode is None and data != "-" and not _looks_like_path(data):
        return _from_hub(faults, config=config, split=split)
    _refuse_hub_options(faults.label, config=config, split=split)
    if data == "-":
        raw = _stdin_bytes(stdin)
        parsed = _stdin_rows(raw, encoding, faults)
    elif mode is None:
        raise _missing(data)
    elif stat.S_ISDIR(mode):
        parsed, digest = folder(data, SUFFIXES)
        return _rows(parsed, digest, faults)
    else:
        _refuse_suffix(faults)  # before reading, as a device is endless
        raw = _file_bytes(data)
        parsed = _file_rows(raw, encoding, faults)
    return _rows(parsed, hashlib.sha256(raw).hexdigest(), faults)


def _rows(parsed: Parsed, digest: str, faults: Faults) -> Rows:
    if not parsed.rows:
        hint = f"all {faults.count} rows are bad; the first: {faults.first}" if faults.count else None
        raise DataError(f"no examples in {faults.label}", hint=hint)
    notes = list(parsed.notes)
    if faults.count:
        notes.append(f"{faults.count} bad rows skipped; the first: {faults.first}")
    return Rows(parsed.rows, parsed.columns, faults.name, digest, parsed.numbers, faults.count, notes)


def _refuse_suffix(faults: Faults) -> None:
    suffix, _ = split_suffix(faults.name)
    if suffix not in SUFFIXES:
        known = " ".join(f".{name}" for name in SUFFIXES)
        raise DataError(
            f"{faults.label}: {f'a .{printable(suffix)} file' if suffix else 'a file without suffix'} cannot be read",
            hint=f"known: {known}, each also with .gz or .zst behind; a folder of images or sounds; - for stdin",
        )


def _file_rows(raw: bytes, encoding: str, faults: Faults) -> Parsed:
    suffix, packing = split_suffix(faults.name)
    content = unpack(raw, packing, faults.name) if packing else raw
    if not content:
        return Parsed([], [], [])
    if suffix in BINARIES:
        return BINARIES[suffix](content, faults)
    return TEXTS[suffix](decode(content, encoding, faults.name), faults)


def _stdin_rows(raw: bytes, encoding: str, faults: Faults) -> Parsed:
    text = decode(raw, encoding, "stdin")
    reader = json_lines if text.lstrip().startswith("{") else lines_of_text
    return reader(text, faults)


def _stdin_bytes(stdin: BinaryIO | None) -> bytes:
    source = stdin if stdin is not None else getattr(sys.stdin, "buffer", None)
    if source is None:
        raise DataError("stdin is closed")
    try:
        return source.read()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read stdin: {error}") from error


def _file_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise _unreadable(path, error) from error


def _mode(path: str) -> int | None:
    """The kind of a path as in `stat`, or None if there is no such path."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(f"cannot read {printable(path)}: {error.strerror}")


def _looks_like_path(data: str) -> bool:
    suffix, packing = split_suffix(data)
    media = [name for names in MEDIA.values() for name in names]
    return not could_be_id(data) or bool(packing) or suffix in {*SUFFIXES, *FOREIGN, *media}


def _missing(path: str) -> DataError:
    parent = os.path.dirname(path.rstrip("/"))
    if parent and not os.path.isdir(parent):
        return DataError(f"no such file: {printable(path)}: there is no folder {printable(parent)}", hint=_near(parent))
    return DataError(f"no such file: {printable(path)}", hint=_near(path))


def _near(path: str) -> str | None:
    """A hint that names the sibling with the nearest name, else some data files beside it."""
    parent, name = os.path.split(path.rstrip("/"))
    try:
        with os.scandir(parent or ".") as entries:
            siblings = sorted(entry.name for entry in islice(entries, SEARCHED))
    except (OSError, ValueError):
        return None
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    if close:
        return f"did you mean {printable(os.path.join(parent, close[0]))}?"
    files = [sibling for sibling in siblings if split_suffix(sibling)[0] in SUFFIXES][:5]
    return f"data files there: {', '.join(map(printable, files))}" if files else None


def _refuse_hub_options(label: str, *, config: str | None, split: str | None) -> None:
    for option, value in (("--config", config), ("--split", split)):
        if value is not None:
            raise UsageError(f"{option} {value!r} is for Hub data sets, and {label} is none")


def _from_hub(faults: Faults, *, config: str | None, split: str | None) -> Rows:
    parsed, digest = hub_rows(faults.name, config=config, split=split, hint=_near(faults.name))
    return _rows(parsed, digest, faults)
