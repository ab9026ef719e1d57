"""Writing a report: the format's choice, standard output or a file, and whether colour is wanted.

Each file of this folder without a leading underscore is one format: `SUFFIXES`, the file endings that choose it, and
`render(table)`, the bytes. A format that no terminal can show also sets `BINARY = True`, one that holds the table's
notes and provenance `HOLDS_ORIGIN = True` (beside others a side file does), and one that shows a picture
`ILLUSTRATED = True`: it takes `render(table, picture)`.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from headscope import registry
from headscope.errors import OutputError, UsageError, nearest
from headscope.reports._files import check_output, is_device, write_file, write_files
from headscope.reports._origin import side_document, side_file
from headscope.tables import Table

if TYPE_CHECKING:
    from headscope.reports._picture import Picture

__all__ = ["FORMATS", "check_output", "check_report", "choose_format", "emit", "use_color", "write_file"]

FORMATS: list[str] = registry.names("reports")
"""The formats as typed on the command line."""


def choose_format(requested: str, output: Path | None, stdout_is_terminal: bool) -> str:
    """The format's name: as requested, or for `auto` by the output's suffix, a terminal gets a table, a pipe CSV.

    Raises:
        UsageError: there is no such format, or the suffix belongs to none.
    """
    if requested in FORMATS:
        return requested
    if requested != "auto":
        raise UsageError(f"unknown format {requested!r}", hint=nearest(requested, ["auto", *FORMATS]))
    if output is None:
        return "table" if stdout_is_terminal else "csv"
    by_suffix = _by_suffix()
    suffix = output.suffix.lower()
    if suffix not in by_suffix:
        what = f"suffix {suffix!r}" if suffix else "a name without suffix"
        raise UsageError(f"{output}: no format has {what}", hint=f"known: {', '.join(by_suffix)}; or pass --format")
    return by_suffix[suffix]


def check_report(format: str, output: Path | None, force: bool = False) -> None:
    """Refuse a report that could not be written later, before anything is computed.

    Raises:
        UsageError: no such format, or the file or its side file exists and `force` is not set.
        OutputError: the folder is missing or not writable.
    """
    module = _module(choose_format(format, output, False))
    for file in [] if output is None else _files(module, output):
        check_output(file, force)


def emit(
    table: Table,
    *,
    format: str = "auto",
    output: Path | None = None,
    force: bool = False,
    shown: str | None = None,
    picture: Picture | None = None,
) -> None:
    """Write the report to standard output, or whole or not at all to a file; `shown` stands in for a text table.

    Beside a file of a format that cannot hold it, a side file says what the report rests on. Formats with room for it
    show the `picture`.

    Raises:
        UsageError: no such format, a binary format on a terminal, or a file exists and `force` is not set.
        OutputError: standard output or a file cannot be written.
        BrokenPipeError: the reader of standard output has gone.
    """
    terminal = _is_terminal(sys.stdout)
    name = choose_format(format, output, terminal)
    module = _module(name)
    if output is not None:
        files = _files(module, output)
        for file in files:
            check_output(file, force)
        data = shown.encode() if shown is not None and name == "table" else _rendered(module, table, picture)
        write_files(dict(zip(files, (data, side_document(table, output, data)), strict=False)), force)
        return
    if getattr(module, "BINARY", False) and (terminal or not hasattr(sys.stdout, "buffer")):
        raise UsageError(f"{name} is binary: a terminal cannot show it", hint=f"pass -o FILE{module.SUFFIXES[0]}")
    if name == "table":
        _to_stdout(module.render(table, color=use_color(sys.stdout)) if shown is None else shown.encode())
    else:
        _to_stdout(_rendered(module, table, picture))


def _files(module: Any, output: Path) -> tuple[Path, ...]:
    """The report's file, and its side file where it has one."""
    alone = getattr(module, "HOLDS_ORIGIN", False) or is_device(output)
    return (output,) if alone else (output, side_file(output))


def _rendered(module: Any, table: Table, picture: Picture | None) -> bytes:
    return module.render(table, picture) if getattr(module, "ILLUSTRATED", False) else module.render(table)


def use_color(stream: TextIO | None) -> bool:
    """Whether to colour what goes to `stream`: NO_COLOR forbids, FORCE_COLOR demands, else a terminal that can."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and _is_terminal(stream)


def _module(name: str) -> Any:
    return importlib.import_module(f"headscope.reports.{name.replace('-', '_')}")


def _by_suffix() -> dict[str, str]:
    return {suffix: name for name in FORMATS for suffix in _module(name).SUFFIXES}


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _to_stdout(data: bytes) -> None:
    stream = sys.stdout
    if stream is None or stream.closed:
        raise OutputError("cannot write to standard output: it is closed")
    try:
        stream.flush()
        _write(stream, data)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _give_up(stream)
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error


def _write(stream: TextIO, data: bytes) -> None:
    if not hasattr(stream, "buffer"):
        stream.write(data.decode())
        return
    rest = memoryview(data)
    while rest:  # unbuffered (python -u), a write may take only a part
        rest = rest[stream.buffer.write(rest) :]


def _give_up(stream: TextIO) -> None:
    """Send what is still buffered nowhere: Python would try again at exit and complain a second time."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
