"""Treebanks in CoNLL-U: sentences of words, each with its syntactic head and relation, and a place for every fault.

Words are the basic rows (universaldependencies.org/format.html): multiword ranges such as 1-2 and empty nodes such as
1.1 are passed over.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headscope.errors import DataError
from headscope.unpack import decode, printable, split_suffix, unpack

COLUMNS = 10
_PASSED_OVER = re.compile(r"[0-9]+[-.][0-9]+")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Word:
    """One word: its form, the number of its head (from 1; 0 for a root), its relation, and its line in the file."""

    form: str
    head: int
    relation: str
    line: int

    @property
    def attached(self) -> bool:
        """Whether it depends on another word by a named relation."""
        return self.head > 0 and self.relation not in ("root", "_")


@dataclass(frozen=True)
class Sentence:
    """The words of one sentence in order."""

    words: tuple[Word, ...]

    @property
    def line(self) -> int:
        """The line of its first word."""
        return self.words[0].line


@dataclass(frozen=True)
class Treebank:
    """The sentences of one file; `digest` is the SHA-256 of its bytes."""

    name: str
    digest: str
    sentences: tuple[Sentence, ...]


def read_treebank(path: str, *, encoding: str = "utf-8") -> Treebank:
    """All sentences of a CoNLL-U file, which may be packed (.gz, .zst).

    Raises:
        DataError: it cannot be read, has no sentence, or a line is broken; the message names the line.
        UsageError: there is no such encoding.
    """
    raw = _bytes(path)
    packing = split_suffix(path)[1]
    text = decode(unpack(raw, packing, path) if packing else raw, encoding, path)
    found = tuple(sentences(text, path))
    if not found:
        raise DataError(f"{printable(path)} line 1: no sentence in this file", hint="expected CoNLL-U")
    return Treebank(path, hashlib.sha256(raw).hexdigest(), found)


def sentences(text: str, name: str) -> Iterator[Sentence]:
    """The sentences of a CoNLL-U text; `name` is that of its file, for messages.

    Raises:
        DataError: a line is broken.
    """
    words: list[Word] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            if words:
                yield _whole(words, name)
            words = []
        elif not line.startswith("#"):
            word = _word(line.removesuffix("\r"), len(words) + 1, number, name)
            words += [] if word is None else [word]
    if words:
        yield _whole(words, name)


def _word(line: str, number: int, at: int, name: str) -> Word | None:
    """The word of a row, which must have this number; None for a row that is no word."""
    place, cells = f"{printable(name)} line {at}", line.split("\t")
    if len(cells) != COLUMNS:
        raise DataError(f"{place}: {len(cells)} columns, expected {COLUMNS} between tabs", hint="expected CoNLL-U")
    label, form, head, relation = cells[0], cells[1], cells[6], cells[7]
    if _PASSED_OVER.fullmatch(label):
        return None
    if label != str(number):
        raise DataError(f"{place}: word number {_quoted(label)}, expected {number}")
    if not _NUMBER.fullmatch(head):
        raise DataError(f"{place}: head {_quoted(head)} is not a number")
    if int(head) == number:
        raise DataError(f"{place}: word {number} is its own head")
    return Word(form, int(head), relation.partition(":")[0] or "_", at)


def _whole(words: list[Word], name: str) -> Sentence:
    """The sentence of these words, whose heads must be among them."""
    for word in words:
        if word.head > len(words):
            place = f"{printable(name)} line {word.line}"
            raise DataError(f"{place}: head {word.head} is outside its sentence, which has {len(words)} words")
    return Sentence(tuple(words))


def _quoted(cell: str) -> str:
    return repr(printable(cell[:40]))


def _bytes(path: str) -> bytes:
    file = Path(path)
    try:
        mode = file.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # a device may be endless
            raise DataError(f"{printable(path)} is a device, not a CoNLL-U file")
        return file.read_bytes()
    except FileNotFoundError:
        raise DataError(f"no such file: {printable(path)}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {printable(path)}: {getattr(error, 'strerror', None) or error}") from None
