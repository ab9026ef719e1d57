"""Hostile inputs by hypothesis: valid files with a few places changed, so that what is wrong lies deep inside."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

NUMBERS = (0, 1, -1, 2, 3, 5, 7, 64, 1000, 2**31, 2**63, 10**9, 10**12, -(2**31), 10**400)
REALS = (0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), -float("inf"))
STRINGS = (
    *("", " ", "0", "-1", "a", "null", "../x", "/etc/passwd", "\0", "\x1b]0;t\x07\x1b[2J", "\u202e", "\ud800", "\r\n"),
    *("=1+1", "é" * 50, "x" * 5000, "model.safetensors", "F32", "BF16", "F4", "I64", "encoder.self.0"),
    "encoder.self.0.0",
    *("bert", "llama", "gpt2", "t5", "vit", "gelu", "eager", "float16", "auto", "rope", "linear", "yarn", "dynamic"),
    *("[CLS]", "w1 w2", "1e999", "9" * 5000, "١", "²", "LABEL_0", "BertModel", "LlamaForCausalLM", "json", "True"),
)  # fmt: skip
WORDS = st.sampled_from(STRINGS) | st.text(max_size=6)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(-300, 300),
    st.sampled_from(REALS),
    WORDS,
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
"""Any JSON value, the awkward ones first."""
SIGNS = ('"', "{", "}", "[", "]", ",", ":", ";", "\n", "\r", "\t", "\\", "\\u")
STARTS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\n", b"PAR1", b"\x1f\x8b")

Path = tuple[Any, ...]


def places(document: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every value inside a JSON document."""
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield (*path, key)
            yield from places(value, (*path, key))


def at(document: Any, path: Path) -> Any:
    """The value at a path."""
    for key in path:
        document = document[key]
    return document


@st.composite
def changed(draw: st.DrawFn, document: Any, most: int = 3) -> Any:
    """A copy of a JSON document in which some values are replaced, dropped, renamed, doubled or swapped."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        found = list(places(document))
        if not found:
            return draw(JSON)
        path = draw(st.sampled_from(found))
        holder, key, what = at(document, path[:-1]), path[-1], draw(st.integers(0, 9))
        if what <= 5:
            holder[key] = draw(JSON)
        elif what == 6:
            del holder[key]
        elif what == 7 and isinstance(holder, dict):
            name = draw(WORDS | st.sampled_from(sorted(holder)))
            holder[name] = holder.pop(key)
        elif what == 8 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        else:
            holder[key] = copy.deepcopy(at(document, draw(st.sampled_from(found))))
    return document


def written(document: Any) -> bytes:
    """The document as JSON with whatever Python's own writer lets through."""
    return json.dumps(document).encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn, content: bytes, most: int = 2) -> bytes:
    """Bytes with a few of them cut, changed, put in, or doubled; now and then with the mark of another kind of file."""
    data = bytearray(content)
    for _ in range(draw(st.integers(0, most))):
        place = draw(st.integers(0, len(data)))
        what = draw(st.integers(0, 6))
        if what == 0:
            del data[place:]
        elif what == 1:
            del data[place : place + draw(st.integers(1, 20))]
        elif what == 2:
            data[place:place] = draw(WORDS).encode("utf-8", "surrogatepass")
        elif what == 3:
            data[place : place + 1] = draw(st.binary(min_size=1, max_size=3))
        elif what == 4:
            data[place:place] = data[max(0, place - draw(st.integers(1, 60))) : place]
        elif what == 5:
            data[place:place] = draw(st.sampled_from(SIGNS)).encode()
        else:
            data[:0] = draw(st.sampled_from(STARTS))
    return bytes(data)


@st.composite
def json_files(draw: st.DrawFn, documents: Sequence[Any]) -> bytes:
    """The bytes of a JSON file: a valid document changed, the text of it damaged now and then."""
    content = written(draw(changed(draw(st.sampled_from(documents)))))
    return draw(damaged(content)) if draw(st.integers(0, 3)) == 0 else content


@st.composite
def safetensors_files(draw: st.DrawFn, header: dict[str, Any]) -> bytes:
    """A safetensors file with a changed header; its length and the bytes behind it are sometimes wrong."""
    size = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    text = draw(json_files([header]))
    length = len(text) + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 2**63, 10**8, 10**10]))
    behind = max(0, size + draw(st.sampled_from([0, 0, 0, 1, -1, -size])))
    return struct.pack("<Q", length % 2**64) + text + bytes(behind)


def header(content: bytes) -> dict[str, Any]:
    """The header of the bytes of a safetensors file."""
    return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])


@st.composite
def lines(draw: st.DrawFn, rows: Sequence[Any]) -> bytes:
    """JSON lines: one of the rows changed, some of the text damaged."""
    kept = draw(st.lists(st.sampled_from(rows), min_size=1, max_size=4))
    place = draw(st.integers(0, len(kept) - 1))
    kept[place] = draw(changed(kept[place]))
    content = b"\n".join(map(written, kept)) + b"\n"
    return draw(damaged(content)) if draw(st.booleans()) else content


@st.composite
def cells(draw: st.DrawFn, texts: Sequence[str], separators: str = ",;\t") -> bytes:
    """A file of separated cells: rows of a valid one with cells replaced, quoted or not, and damaged text."""
    rows = [line.split(",") for line in draw(st.sampled_from(texts)).splitlines()]
    cell = WORDS | st.sampled_from(['"', '""', '"a\n', "1.5", "-100", "01"])
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        row[draw(st.integers(0, len(row) - 1))] = draw(cell)
    if draw(st.booleans()):
        rows[draw(st.integers(0, len(rows) - 1))].append("more")
    text = "\n".join(draw(st.sampled_from(separators)).join(row) for row in rows)
    return draw(damaged(text.encode("utf-8", "surrogatepass")))
