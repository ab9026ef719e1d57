"""Markdown: a pipe table with full float precision, then notes and provenance, for an issue or a model card."""

from __future__ import annotations

import re

from headscope.reports._cells import exact, is_number, safe_text
from headscope.reports._origin import provenance_lines
from headscope.tables import Table

SUFFIXES: tuple[str, ...] = (".md", ".markdown")
HOLDS_ORIGIN = True

_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def render(table: Table) -> bytes:
    """The report as a pipe table; numbers to the right, text shown literally with no mark-up, link or tag."""
    numeric = [any(is_number(row[name]) for row in table.rows) for name in table.names]
    lines = [_line([_escape(name) for name in table.names]), _line(["---:" if number else "---" for number in numeric])]
    lines += [_line([_escape(exact(row[name])) for name in table.names]) for row in table.rows]
    lines += _listing("Notes", [_escape(note) for note in table.notes])
    lines += _listing("Provenance", [f"{name}: {_escape(value)}" for name, value in provenance_lines(table)])
    return "".join(lines).encode()


def _listing(title: str, items: list[str]) -> list[str]:
    """A titled list behind a blank line; nothing without items."""
    return [f"\n{title}\n\n", *(f"- {item}\n" for item in items)] if items else []


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", safe_text(text)).translate(_ENTITIES)
