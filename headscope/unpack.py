"""Raw bytes of a data file, unpacked with a bound on their size and decoded to text with a place for every fault."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import zlib
from typing import Protocol

from headscope.errors import DataError, UsageError, nearest

PACKED = ("gz", "zst")
MOST_BYTES = 4 * 1024**3
"""Largest unpacked size in bytes."""
MOST_RATIO = 1000
"""Largest unpacked size per packed byte, where the unpacked size is beyond `FREE_BYTES`."""
FREE_BYTES = 64 * 1024**2
CHUNK = 1024**2

ENCODINGS = ("utf-8", "utf-16", "utf-32", "latin-1", "cp1252", "cp1251", "gb18030", "big5", "shift_jis", "euc-kr")
MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
MAGIC = ((b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst"), (b"PAR1", ".parquet"), (b"PK\x03\x04", ".zip or .xlsx"))


class Stream(Protocol):
    """Unpacked bytes, some at a time; none left at the end."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes."""
        ...


def printable(text: str) -> str:
    r"""The text on one line that a terminal can show: control and other unprintable characters as \xNN or \uNNNN."""
    return "".join(char if char.isprintable() else _escape(ord(char)) for char in text)


def split_suffix(name: str) -> tuple[str, str]:
    """The lower-case suffix of a file name and that of the packing behind it, each "" where there is none."""
    base = os.path.basename(name).lower()
    stem, dot, packing = base.rpartition(".")
    if not dot or packing not in PACKED:
        stem, packing = base, ""
    return stem.rpartition(".")[2] if "." in stem else "", packing


def unpack(raw: bytes, packing: str, name: str) -> bytes:
    """The bytes inside a `gz` or `zst` file; the size is counted first, so that a bomb is refused in little memory.

    Raises:
        DataError: broken, cut short, or unpacks to too much.
    """
    if not raw:
        return b""
    size = 0
    stream = _stream(raw, packing)
    while count := len(_chunk(stream, packing, name)):
        size += count
        if size > MOST_BYTES or size > max(FREE_BYTES, MOST_RATIO * len(raw)):
            raise DataError(
                f"{printable(name)}: unpacks to more than {size - count >> 20} MiB from {len(raw)} bytes",
                hint="unpack it yourself if it is not a decompression bomb, and split it",
            )
    stream = _stream(raw, packing)
    return b"".join(iter(lambda: _chunk(stream, packing, name), b""))


def check_encoding(encoding: str) -> None:
    """Nothing, if there is an encoding of that name.

    Raises:
        UsageError: there is none.
    """
    try:
        codecs.lookup(encoding)
    except (LookupError, ValueError) as error:
        raise UsageError(f"--encoding {encoding!r} is not known", hint=nearest(encoding, ENCODINGS)) from error


def decode(raw: bytes, encoding: str, name: str) -> str:
    """The text of a data file, without its byte order mark.

    Raises:
        DataError: the bytes are not in that encoding (the byte is counted from 0), or hold a NUL character.
        UsageError: the encoding is not one for text.
    """
    check_encoding(encoding)
    label = printable(name)
    _refuse_marked(raw, encoding, label)
    try:
        text = raw.decode(encoding)
    except UnicodeError as error:
        place = error.start if isinstance(error, UnicodeDecodeError) else 0
        raise DataError(f"{label}: not {encoding} at byte {place}, use --encoding", hint=_looks_like(raw)) from error
    except LookupError as error:
        raise UsageError(f"--encoding {encoding!r} is not for text", hint=nearest(encoding, ENCODINGS)) from error
    text = text.removeprefix("\ufeff")
    place = text.find("\0")
    if place >= 0:
        line = text.count("\n", 0, place) + 1
        hint = _looks_like(raw) or "if it is UTF-16, use --encoding utf-16-le or utf-16-be"
        raise DataError(f"{label} line {line}: a NUL character, so this is not a text file", hint=hint)
    return text


def _escape(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _stream(raw: bytes, packing: str) -> Stream:
    if packing == "gz":
        return gzip.GzipFile(fileobj=io.BytesIO(raw))
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.BufferReader(raw), "zstd")


def _chunk(stream: Stream, packing: str, name: str) -> bytes:
    try:
        return stream.read(CHUNK)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{printable(name)}: not a whole .{packing} file: {printable(str(error))}") from error


def _refuse_marked(raw: bytes, encoding: str, label: str) -> None:
    if not codecs.lookup(encoding).name.startswith("utf-8"):
        return
    for mark, right in MARKS:
        if raw.startswith(mark):
            raise DataError(
                f"{label}: not {encoding} at byte 0, use --encoding {right}", hint=f"it starts with a {right} mark"
            )


def _looks_like(raw: bytes) -> str | None:
    for magic, suffix in MAGIC:
        if raw.startswith(magic):
            return f"it looks like a {suffix} file with another name"
    return None
