"""HTML: one self-contained page with the rows, their picture, what the columns mean and where the numbers come from.

It asks for no address. The only script is headscope's own, which sorts and filters; the page's policy forbids any
other, whatever stands in the data.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from headscope.reports._cells import exact, is_number, safe_text
from headscope.reports._origin import provenance_lines
from headscope.reports._page import PAGE, SCRIPT, STYLE
from headscope.tables import Cell, Table, empty

if TYPE_CHECKING:
    from headscope.reports._picture import Picture

SUFFIXES: tuple[str, ...] = (".html", ".htm")
HOLDS_ORIGIN = True
ILLUSTRATED = True


def render(table: Table, picture: Picture | None = None) -> bytes:
    """The report as one page; floats show 4 significant digits, the exact value stands in `data-value`."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    columns = _columns(table)
    page = environment.from_string(PAGE).render(
        title=safe_text(f"headscope {table.name}"),
        about=safe_text(_about(table)),
        notes=[safe_text(note) for note in table.notes],
        picture=Markup(_drawn(picture)) if picture is not None else "",
        columns=columns,
        rows=(
            [(column, _cell(row[name])) for column, name in zip(columns, table.names, strict=True)]
            for row in table.rows
        ),
        example=_example(columns),
        provenance=[(name, safe_text(value)) for name, value in provenance_lines(table)],
        policy=policy(),
        style=Markup(STYLE),
        script=Markup(SCRIPT),
    )
    return page.encode()


def policy() -> str:
    """What the page may do: run the one script of this digest, be styled, and show pictures that are part of it."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    parts = ("default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'", "img-src data:")
    return "; ".join((*parts, "base-uri 'none'", "form-action 'none'"))


def _drawn(picture: Picture) -> str:
    from headscope.reports._picture import inline_svg

    return inline_svg(picture)


def _about(table: Table) -> str:
    """The model, and what it was measured on."""
    origin = table.provenance
    if origin is None:
        return ""
    if not origin.examples:
        return origin.model
    count = "one example" if origin.examples == 1 else f"{origin.examples:,} examples"
    return f"{origin.model} on {count}" + (f" of {origin.data}" if origin.data else "")


def _example(columns: list[dict[str, str]]) -> str:
    """A filter that this table understands."""
    number = next((column["name"] for column in columns if column["kind"] == "number"), None)
    return f"or {number}>0" if number is not None else "or column=value"


def _columns(table: Table) -> list[dict[str, str]]:
    described = []
    for column in table.columns:
        known = [row[column.name] for row in table.rows if not empty(row[column.name])]
        kind = "number" if known and all(map(is_number, known)) else "text"
        unit = f" [{column.unit}]" if column.unit else ""
        source = f" ({column.source})" if column.source else ""
        words = {
            "name": column.name,
            "hover": f"{column.meaning}{unit}",
            "explained": f"{column.meaning}{unit}{source}",
        }
        described.append({"kind": kind} | {key: safe_text(word) for key, word in words.items()})
    return described


def _cell(cell: Cell) -> dict[str, str | None]:
    text = safe_text(exact(cell))
    if not isinstance(cell, float) or not text:
        return {"shown": text, "exact": None}
    return {"shown": f"{cell:.4g}", "exact": text}
