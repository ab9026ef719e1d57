"""How the layers of a model differ: a panel for each quantity with its heads and their mean, and roles by layer."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headscope.reports._cells import safe_text
from headscope.reports._heatmap import Rows
from headscope.reports._picture import BLUE, FRAME, GREEN, ORANGE, PURPLE, SKY, bare, short, step_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

_STYLES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PURPLE, "D"), (SKY, "v"))
"""Colour and mark of each stack and kind, in turns."""
_MOST_DOTS = 500
"""With more heads than this a band stands for the dots."""
_MARKED = 32
"""With more layers than this lines have no marks."""
_PANEL_WIDE, _PANEL_HIGH = 3.2, 2.5


@dataclass(frozen=True)
class Profile:
    """One quantity: `values[stack and kind][layer]` are those of its heads, or the one of the layer; NaN is unknown."""

    title: str
    unit: str
    values: Mapping[str, Rows]
    meaning: str = ""


@dataclass(frozen=True)
class Roles:
    """Roles of one stack and kind: `names[layer]` are those of its heads, of `known` ones."""

    title: str
    names: Sequence[Sequence[str]]
    known: tuple[str, ...]


def profile_height(profiles: Sequence[Profile], roles: Sequence[Roles], wide: float) -> float:
    """Inches that all panels within `wide` take."""
    return sum(_heights(profiles, roles, wide))


def _heights(profiles: Sequence[Profile], roles: Sequence[Roles], wide: float) -> list[float]:
    """Of the part with the quantities, and of that with the roles."""
    heights = [_PANEL_HIGH * math.ceil(len(profiles) / _across(len(profiles), wide)) + 0.3] if profiles else []
    most = max((len(_present(one)) for one in roles), default=0)
    return heights + ([0.24 * most + 0.9] if roles else [])


def _across(count: int, wide: float) -> int:
    """Panels side by side: as many as fit, in rows of about one length."""
    rows = math.ceil(count / max(1, int(wide / _PANEL_WIDE + 0.1)))
    return math.ceil(count / rows)


def draw_profiles(figure: SubFigure, profiles: Sequence[Profile], roles: Sequence[Roles], wide: float) -> None:
    """Quantities in rows of panels with one legend, and below them the roles."""
    heights = _heights(profiles, roles, wide)
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    if profiles:
        _draw_quantities(parts[0], profiles, _across(len(profiles), wide))
    for axes, one in zip(parts[-1].subplots(1, len(roles), squeeze=False)[0] if roles else [], roles, strict=True):
        _roles(axes, one)


def _draw_quantities(figure: SubFigure, profiles: Sequence[Profile], across: int) -> None:
    grid = figure.subplots(math.ceil(len(profiles) / across), across, squeeze=False).ravel()
    every: dict[str, Any] = {}
    for axes, profile in zip(grid, profiles, strict=False):
        _profile(axes, profile)
        handles, labels = axes.get_legend_handles_labels()
        every |= dict(zip(labels, handles, strict=True))
    for axes in grid[len(profiles) :]:
        axes.set_visible(False)
    figure.legend(
        every.values(), every.keys(), loc="outside lower center", ncols=min(4, len(every)), fontsize=8, frameon=False
    )


def _profile(axes: Axes, profile: Profile) -> None:
    """The mean of each layer as a line; its heads as dots, or where they are many the range of four in five of them."""
    dots = sum(len(row) for rows in profile.values.values() for row in rows)
    single = all(len(row) <= 1 for rows in profile.values.values() for row in rows)
    layers = max((len(rows) for rows in profile.values.values()), default=1)
    for place, (name, rows) in enumerate(profile.values.items()):
        color, mark = _STYLES[place % len(_STYLES)]
        known = [[value for value in row if math.isfinite(value)] for row in rows]
        if not any(known):
            continue
        means = [sum(row) / len(row) if row else math.nan for row in known]
        label = short(name) if single else f"{short(name)}: mean of a layer"
        size = 4 if layers <= _MARKED else 0
        axes.plot(
            range(len(rows)), means, color=color, marker=mark, markersize=size, linewidth=1.6, zorder=3, label=label
        )
        if single:
            continue
        if dots <= _MOST_DOTS:
            points = [(layer, value) for layer, row in enumerate(known) for value in row]
            axes.scatter(
                *zip(*points, strict=True), s=9, marker=mark, color=color, alpha=0.35, linewidths=0, zorder=2,
                label="each head",
            )  # fmt: skip
        else:
            _band(axes, known, color)
    meaning = textwrap.wrap(safe_text(profile.meaning), 50, max_lines=2, placeholder=" …")
    axes.set_title(safe_text(profile.title), pad=5 + 10 * len(meaning))
    axes.text(0.5, 1.03, "\n".join(meaning), transform=axes.transAxes, ha="center", fontsize=7, color="0.3")
    axes.set_ylabel(safe_text(profile.unit))
    _layer_axis(axes, layers)
    _value_axis(axes, [value for rows in profile.values.values() for row in rows for value in row if value == value])
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    bare(axes, "left", "bottom")


def _band(axes: Axes, known: Sequence[Sequence[float]], color: str) -> None:
    import numpy

    ends = [numpy.quantile(row, (0.1, 0.9)) if row else (math.nan, math.nan) for row in known]
    low, high = zip(*ends, strict=True)
    axes.fill_between(range(len(known)), low, high, color=color, alpha=0.25, linewidth=0, label="four in five heads")


def _value_axis(axes: Axes, known: Sequence[float]) -> None:
    """From 0, so that heights can be compared, with room for the marks; large numbers as 20k or 3M."""
    from matplotlib.ticker import EngFormatter

    least, most = min(0.0, *known), max(0.0, *known)
    room = 0.06 * ((most - least) or 1.0)
    axes.set_ylim(least - (room if least < 0 else 0.0), most + room)
    if most >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _layer_axis(axes: Axes, layers: int) -> None:
    axes.set_xlabel("layer")
    axes.set_xticks(range(0, layers, step_of(layers, 12)))
    axes.set_xlim(-0.5, layers - 0.5)


def _present(roles: Roles) -> list[str]:
    """The roles that some head has."""
    return [role for role in roles.known if any(role in names for names in roles.names)]


def _roles(axes: Axes, roles: Roles) -> None:
    """How many heads of each layer have which role: darker is more; numbers in the cells, else a bar, say how many."""
    import numpy

    counts, known = [Counter(names) for names in roles.names], _present(roles)
    grid = numpy.array([[count[role] for count in counts] for role in known], dtype=float)
    most = max(1.0, float(grid.max(initial=0)))
    image = axes.imshow(numpy.ma.masked_equal(grid, 0), cmap="Blues", vmin=-0.3 * most, vmax=most, aspect="auto")
    if len(counts) <= _MARKED:
        for (row, layer), count in numpy.ndenumerate(grid):
            if count:
                color = "white" if count > 0.55 * most else "black"
                axes.text(layer, row, f"{count:g}", ha="center", va="center", fontsize=7, color=color)
    else:
        bar = axes.figure.colorbar(image, ax=axes, label="heads", pad=0.02, boundaries=numpy.linspace(0, most, 64))
        bar.set_ticks(sorted({1, int(most / 2) or 1, int(most)}))
        bar.outline.set_visible(False)
    axes.set_title(short(roles.title, 64))
    axes.set_yticks(range(len(known)), labels=known)
    axes.tick_params(axis="y", length=0)
    _layer_axis(axes, len(counts))
    axes.set_xticks(numpy.arange(len(counts) + 1) - 0.5, minor=True)
    axes.set_yticks(numpy.arange(len(known) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.92", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_color(FRAME)
