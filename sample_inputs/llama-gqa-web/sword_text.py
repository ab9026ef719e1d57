"""Plain text verses of a SWORD zText Bible module (the Debian packages sword-text-*), read without any library.

Each testament is three files: `.bzs` lists the compressed blocks, `.bzz` holds them, `.bzv` says where each verse lies.
"""

import html
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

TESTAMENTS = ("ot", "nt")
BLOCK_ENTRY = struct.Struct("<III")  # offset in .bzz, compressed bytes, uncompressed bytes
VERSE_ENTRY = struct.Struct("<IIH")  # block number, offset in the uncompressed block, bytes


def read_verses(module_dir: Path) -> Iterator[str]:
    """The OSIS markup of every verse that has text, Old Testament first, in the order of the module."""
    for testament in TESTAMENTS:
        block_index, block_data, verse_index = (
            (module_dir / f"{testament}.{suffix}").read_bytes() for suffix in ("bzs", "bzz", "bzv")
        )
        blocks = [
            zlib.decompress(block_data[offset : offset + n_bytes]) if n_bytes else b""
            for offset, n_bytes, _ in BLOCK_ENTRY.iter_unpack(block_index)
        ]
        for block, offset, n_bytes in VERSE_ENTRY.iter_unpack(verse_index):
            if n_bytes:
                yield blocks[block][offset : offset + n_bytes].decode("utf-8", "replace")


def plain_text(markup: str) -> str:
    """The words of one verse: notes, titles and tags dropped, entities decoded, white space made single."""
    text = re.sub(r"<note\b.*?</note>", " ", markup, flags=re.DOTALL)
    text = re.sub(r"<title\b.*?</title>", "", text, flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    text = re.sub(r"\s+", " ", text)
    return re.sub(r" ([,.;:?!])", r"\1", text).strip()
