"""Samples for the report tests: hostile texts, one report that holds them, and how a strict reader takes its cells."""

import json
import math
from pathlib import Path

import pytest

from headscope.columns import Column
from headscope.provenance import Provenance
from headscope.tables import Table

HOSTILE = [
    "=1+1",
    "+1",
    "-1",
    "@x",
    "＝1",
    "\tx",
    "\rx",
    "x\ty",
    "x\ry",
    "x\ny",
    "\x1b]0;t\x07",
    "\x9b31m",
    "\x7f",
    "a\u202eb",
    "a\u200bb",
    "\ufeffa",
    "[/red]",
    "[red]x[/red]",
    "</script><script>alert(1)</script>",
    '"quoted"',
    'in "the" middle',
    "a,b;c",
    "\udc80",
    "a|b\\|c",
    "*a* _b_ `c` ~~d~~ $e$",
    "![x](http://example.org/x.png)",
    "&amp;",
    "日本語",
    "é",
    "\U000e0041tag",
]
COLUMNS = (
    Column("head", "", "its label"),
    Column("layer", "", "from 0"),
    Column("importance", "nats", "a < b & c"),
    Column("dead", "", "no output"),
    Column("token", "", "text from the data", untrusted=True),
)
FLOATS = [0.1, 1e-300, -2.5, 12345.678901234567, math.nan, math.inf, None, 3.0]


def report(tokens=HOSTILE, key="head"):
    rows = tuple(
        {
            "head": f"decoder.causal.0.{index}",
            "layer": None if index == 2 else index,
            "importance": FLOATS[index % len(FLOATS)],
            "dead": [True, False, None][index % 3],
            "token": token,
        }
        for index, token in enumerate(tokens)
    )
    provenance = Provenance("some/model", revision="abc", truncated=3, versions={"torch": "2.11"})
    return Table("inspect", COLUMNS, rows, key=key, provenance=provenance, notes=("one <b>note</b>\x1b[1m",))


def expected_rows(table):
    """The rows as a strict reader should see them: None for what was not measured."""
    return [
        {name: None if isinstance(cell, float) and not math.isfinite(cell) else cell for name, cell in row.items()}
        for row in table.rows
    ]


def parsed_cell(text, like):
    """What a CSV cell stands for, by the rule that a cell beginning with a quote is JSON."""
    if isinstance(like, str):
        return json.loads(text) if text.startswith('"') else text
    if text == "":
        return None
    if isinstance(like, bool):
        return {"true": True, "false": False}[text]
    return type(like)(text)


def lonely_free(text):
    return text.encode("utf-8", "backslashreplace").decode()


def unprintable(text):
    return {char for char in text if not char.isprintable() and char != "\n"}


def device(name):
    path = Path(name)
    if not path.exists():
        pytest.skip(f"no {name} here")
    return path
