"""Text safety: text from data or model files, escaped so that no terminal sequence or spreadsheet formula survives.

"Unprintable" means control characters (C0, DEL, C1), bidirectional controls, zero-width and other format characters,
blanks other than the plain space, unassigned code points and lone surrogates: all that `str.isprintable` denies.
"""

from __future__ import annotations

import json
import re

from headscope.tables import Cell, empty

_FORMULA = tuple('=+-@\t\r"＝＋－＠')
"""Beginnings that spreadsheets take for a formula (the full-width ones too), and the quote that marks JSON."""
_LATER = re.compile(r"[;,|]\s*['\"]*[=+\-@＝＋－＠]")
"""A formula behind what may part cells: a spreadsheet of another country splits at semicolons, unless quotes forbid."""


def safe_text(text: str) -> str:
    r"""The text with every unprintable character written as `\xNN`, `\uNNNN` or `\UNNNNNNNN`; for people to read.

    >>> safe_text("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _python_escape(char) for char in text)


def safe_line(text: str, longest: int = 500) -> str:
    """The text as one line for a terminal, where a value of any length may stand in it: its middle is cut out then.

    Both ends stay, since what is wrong is said behind the value that is wrong.
    """
    line = safe_text(text)
    if len(line) <= longest:
        return line
    tail = longest // 3
    return f"{line[: longest - tail]} [...] {line[-tail:]}"


def safe_cell(text: str) -> str:
    r"""The text for a CSV or TSV cell: a JSON string where it could do harm, bare otherwise; nothing is lost.

    A cell that begins with a double quote is JSON, any other cell is the text itself.

    >>> safe_cell("=1+1"), safe_cell("encoder.self.3.7")
    ('"=1+1"', 'encoder.self.3.7')
    """
    if text.isprintable() and not text.startswith(_FORMULA) and not _LATER.search(text):
        return text
    return safe_json(json.dumps(text, ensure_ascii=False))


def safe_json(document: str) -> str:
    r"""A JSON document, its line ends kept, with every other unprintable character written as `\uNNNN`."""
    lines = document.split("\n")
    return "\n".join(line if line.isprintable() else "".join(map(_json_escape, line)) for line in lines)


def plain(cell: Cell) -> str | int | float | bool | None:
    """The cell as a builtin value that JSON can hold: None for what was not measured, never a non-finite float."""
    if empty(cell):
        return None
    return float(cell) if isinstance(cell, float) else cell


def exact(cell: Cell) -> str:
    """The cell as text without loss: floats as `repr`, `true` or `false`, nothing for what was not measured."""
    value = plain(cell)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def is_number(cell: Cell) -> bool:
    """Whether the cell is an int or a float, measured or not."""
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _python_escape(char: str) -> str:
    code = ord(char)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _json_escape(char: str) -> str:
    if char.isprintable():
        return char
    code = ord(char)
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
