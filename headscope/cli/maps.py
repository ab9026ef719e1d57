"""`headscope inspect MODEL --text TEXT --head LABEL`: the attention map of one head, as a picture or as rows."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from headscope.cli.settings import Settings
from headscope.cli.talk import Talk
from headscope.errors import UsageError
from headscope.reports import emit, use_color

if TYPE_CHECKING:
    from headscope.maps import Map
    from headscope.reports._picture import Picture

_OTHER = ("data", "measures", "check", "structure", "dry_run")
"""Options that ask for another report, or about one on data."""


def show_map(given: Settings, talk: Talk) -> None:
    """The map in the terminal as a picture, elsewhere (or sorted or cut) as rows; with --plot also as a file."""
    _consider(given)
    given.check_outputs()
    given.check_model()
    from headscope.maps import attention_map, map_table
    from headscope.study import Study

    raw = given.raw
    study = Study.open(given.model, None, given.study_options())
    found = attention_map(study, raw["text"], raw["head"], target=raw["target_text"])
    table = map_table(study, found)
    shaped = given.shaped(table)
    asked = raw["sort"] or raw["top"] or raw["columns"]
    shown = _picture(given, found) if given.format == "table" and not asked else None
    talk.notes(table)
    drawn = _drawn(given, found)
    emit(shaped, format=raw["format"], output=raw["output"], force=raw["force"], shown=shown, picture=drawn)
    if raw["plot"] is not None and drawn is not None:
        from headscope.reports._picture import save_picture

        save_picture(drawn, raw["plot"], raw["force"])


def _consider(given: Settings) -> None:
    """Refuse what cannot be meant, before anything slow."""
    from headscope.maps import MAP_COLUMNS

    raw = given.raw
    if raw["text"] is None or raw["head"] is None:
        here, missing = ("--head", "--text") if raw["text"] is None else ("--text", "--head")
        here = here if raw["text"] is not None or raw["head"] is not None else "--target-text"
        raise UsageError(f"{here} needs {missing}", hint='a map is asked for with --text "..." --head encoder.self.0.0')
    if not raw["text"].strip():
        raise UsageError("--text is empty")
    other = [f"--{name.replace('_', '-')}" for name in _OTHER if raw[name]]
    other += ["--by"] if raw["by"] != "head" else []
    if other:
        raise UsageError(f"--text and {other[0]} ask for two reports", hint="ask for one of them")
    given.require_columns([column.name for column in MAP_COLUMNS])


def _title(given: Settings, found: Map) -> str:
    return f"attention of {found.head}, {Path(given.model).name}"


def _rows(found: Map) -> list[list[float]]:
    """The map with NaN where a query may not see a key."""
    return found.rows.masked_fill(~found.visible, nan).tolist()


def _picture(given: Settings, found: Map) -> str:
    from headscope.reports._map import render_map

    on_screen = given.raw["output"] is None
    width = shutil.get_terminal_size().columns if on_screen else 80
    color = on_screen and use_color(sys.stdout)
    return render_map(_rows(found), found.queries, found.keys, title=_title(given, found), width=width, color=color)


def _drawn(given: Settings, found: Map) -> Picture | None:
    """The picture of the map; None for a page about a text that is too long for one, where no file is asked for."""
    from headscope.reports._map import MOST_DRAWN, map_figure

    if given.raw["plot"] is None and max(len(found.queries), len(found.keys)) > MOST_DRAWN:
        return None
    return partial(map_figure, _rows(found), found.queries, found.keys, title=_title(given, found))
