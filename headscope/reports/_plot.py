"""A picture of heads: a heat map of one value, a panel per stack and kind, and below it how layers differ."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headscope.reports._cells import safe_text
from headscope.reports._heatmap import Rows, finite
from headscope.reports._picture import COLORS, FRAME, headline, short, sized, step_of
from headscope.reports._profiles import Profile, Roles, draw_profiles, profile_height

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SIGNED = "PuOr_r"
"""Orange over white to violet, for values of both signs."""
_MOST_NUMBERS = 400
"""With more heads than this no number is printed in the cells."""
_GREY = "0.85"


@dataclass(frozen=True)
class HeatMap:
    """One value per head: `values` hold a panel per stack and kind, `meaning` says what the value is."""

    values: Mapping[str, Rows]
    name: str
    unit: str = ""
    meaning: str = ""


@dataclass(frozen=True)
class HeadPicture:
    """What a picture of heads shows, from top to bottom; any part may be missing."""

    title: str
    map: HeatMap | None = None
    profiles: tuple[Profile, ...] = ()
    roles: tuple[Roles, ...] = ()


def head_figure(shown: HeadPicture) -> Figure:
    """The figure; heads are of one size everywhere, white is no such head, grey one that was not measured."""
    more = bool(shown.profiles or shown.roles)
    wide = max(6.4 if more else 4.5, 0.0 if shown.map is None else _map_width(shown.map))
    heights = [] if shown.map is None else [_map_height(shown.map)]
    heights += [profile_height(shown.profiles, shown.roles, wide)] if more else []
    figure = sized(wide, sum(heights) + 0.5)
    parts = list(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    if shown.map is not None:
        _draw_map(parts[0], shown.map, wide)
    if more:
        draw_profiles(parts[-1], shown.profiles, shown.roles, wide)
    headline(figure, shown.title, width=wide)
    return figure


@dataclass(frozen=True)
class _Cells:
    """How large a head is drawn, in inches, and whether its number is printed in it."""

    wide: float
    high: float
    numbers: bool


def _cells(values: Mapping[str, Rows]) -> _Cells:
    if sum(len(row) for rows in values.values() for row in rows) <= _MOST_NUMBERS:
        return _Cells(0.5, 0.36, True)
    side = max(0.09, min(0.25, 8 / max(_layers(values), *_columns(values))))
    return _Cells(side, side, False)


def _layers(values: Mapping[str, Rows]) -> int:
    return max((len(rows) for rows in values.values()), default=1)


def _columns(values: Mapping[str, Rows]) -> list[int]:
    return [max((len(row) for row in rows), default=0) or 1 for rows in values.values()] or [1]


def _map_width(map: HeatMap) -> float:
    """Inches."""
    columns = _columns(map.values)
    return _cells(map.values).wide * sum(columns) + _beside(columns)


def _beside(columns: Sequence[int]) -> float:
    """Inches at the sides of all panels: layer numbers and the colour bar."""
    return 0.7 * len(columns) + 1.3


def _map_height(map: HeatMap) -> float:
    """Inches."""
    return max(2.1, _cells(map.values).high * _layers(map.values) + 1.2)


def _draw_map(figure: SubFigure, map: HeatMap, wide: float) -> None:
    """All panels in a row, numbers in the cells while they can be read."""
    from matplotlib.cm import ScalarMappable

    cells, columns = _cells(map.values), _columns(map.values)
    stretched = max(cells.wide, min(1.0, (wide - _beside(columns)) / sum(columns))) if cells.numbers else cells.wide
    scale, colors = _scale(map.values)
    panels = figure.subplots(1, len(columns), squeeze=False, width_ratios=columns)[0]
    for axes, (name, rows) in zip(panels, map.values.items(), strict=False):
        _panel(axes, short(name), rows, scale, colors)
        axes.set_aspect(cells.high / stretched, anchor="N")
        if cells.numbers:
            _write_numbers(axes, rows, scale, colors)
    place = {"ax": list(panels), "aspect": 30, "pad": 0.02, "panchor": False}
    bar = figure.colorbar(ScalarMappable(scale, colors), label=short(map.unit), **place)
    bar.outline.set_visible(False)
    remarks = textwrap.wrap(safe_text(map.meaning), int(wide * 15), max_lines=3)
    if any(not math.isfinite(value) for rows in map.values.values() for row in rows for value in row):
        remarks.append("grey: removed, or not measured")
    figure.supxlabel("\n".join(remarks), fontsize=8)


def _scale(values: Mapping[str, Rows]) -> tuple[Any, str]:
    """From 0 to the largest value; where some are negative, as far below 0 as above it."""
    from matplotlib.colors import Normalize

    known = finite(values)
    if min(known, default=0.0) < 0:
        furthest = max(map(abs, known))
        return Normalize(-furthest, furthest, clip=True), SIGNED
    return Normalize(0.0, max(known, default=0.0) or 1.0, clip=True), COLORS


def _panel(axes: Axes, name: str, rows: Rows, scale: Any, colors: str) -> None:
    import numpy
    from matplotlib.colors import ListedColormap

    heads = max((len(row) for row in rows), default=0)
    axes.set_title(name)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    for spine in axes.spines.values():
        spine.set_color(FRAME)
    if not heads:
        return
    grid = numpy.full((len(rows), heads), numpy.nan)
    absent = numpy.ones((len(rows), heads), dtype=bool)
    for layer, row in enumerate(rows):
        grid[layer, : len(row)] = [value if math.isfinite(value) else math.nan for value in row]
        absent[layer, : len(row)] = False
    grey = numpy.ma.masked_array(numpy.zeros_like(grid), absent)
    axes.imshow(grey, cmap=ListedColormap([_GREY]), interpolation="nearest")
    axes.imshow(numpy.ma.masked_invalid(grid), cmap=colors, norm=scale, interpolation="nearest")
    axes.set_xticks(_ticks(heads))
    axes.set_yticks(_ticks(len(rows)))


def _ticks(count: int) -> list[int]:
    """Every head or layer while there are few, then every second, fifth, tenth, …"""
    return list(range(0, count, step_of(count, 16)))


def _write_numbers(axes: Axes, rows: Rows, scale: Any, colors: str) -> None:
    """Each value in its cell, dark on light and light on dark."""
    from matplotlib import colormaps

    paint = colormaps[colors]
    for layer, row in enumerate(rows):
        for head, value in enumerate(row):
            if math.isfinite(value):
                color = "black" if _lightness(paint(scale(value))) > 0.5 else "white"
                axes.text(head, layer, f"{value:.2g}", ha="center", va="center", color=color, fontsize=7)


def _lightness(color: Sequence[float]) -> float:
    """Perceived lightness of red, green and blue from 0 to 1, by the weights of Rec. 601."""
    red, green, blue = color[:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue
