"""Bars of several models beside each other: a panel for each quantity, every bar with its number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope.reports._picture import BLUE, SKY, bare, headline, short, sized

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = 3.4
_ACROSS = 4
_LONGEST = 28


@dataclass(frozen=True)
class Bars:
    """One quantity: a value for each model, NaN where it was not measured.

    `labels` are the numbers as they are printed, `spreads` how far a value goes to either side; both may be missing.
    """

    title: str
    unit: str
    values: tuple[float, ...]
    labels: tuple[str, ...] = ()
    spreads: tuple[float, ...] = ()


def bars_figure(models: Sequence[str], panels: Sequence[Bars], *, title: str) -> Figure:
    """The panels in rows of at most four; the first model is light, since the others are compared with it."""
    rows = math.ceil(len(panels) / _ACROSS) or 1
    across = max(2, math.ceil(len(panels) / rows))
    names = [short(name, _LONGEST) for name in models]
    margin = 0.085 * max((len(name) for name in names), default=0)
    wide = _WIDE * across + margin
    figure = sized(wide, rows * (0.34 * len(models) + 0.7) + 0.5)
    grid = figure.subplots(rows, across, squeeze=False)
    for place, axes in enumerate(grid.ravel()):
        if place < len(panels):
            _panel(axes, panels[place], names if place % across == 0 else [""] * len(names))
        else:
            axes.set_visible(False)
    headline(figure, title, width=wide)
    return figure


def _panel(axes: Axes, panel: Bars, names: Sequence[str]) -> None:
    places = range(len(panel.values))
    known = [value if math.isfinite(value) else 0.0 for value in panel.values]
    colors = [SKY if place == 0 else BLUE for place in places]
    axes.barh(places, known, color=colors, height=0.68, xerr=panel.spreads or None, ecolor="0.3", capsize=2)
    ends = [value + (panel.spreads[place] if panel.spreads else 0.0) for place, value in enumerate(known)]
    least, most = min(0.0, *known), max(0.0, *ends)
    reach = (most - least) or 1.0
    for place, value in enumerate(panel.values):
        said = panel.labels[place] if panel.labels else f"{value:.4g}"
        shown = said if math.isfinite(value) else "not measured"
        axes.text(max(0.0, ends[place]) + 0.02 * reach, place, shown, va="center", fontsize=8)
    axes.set_xlim(least * 1.05, most + 0.55 * reach)
    axes.set_ylim(len(panel.values) - 0.5, -0.5)
    axes.set_yticks(places, labels=names)
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    unit = f" ({panel.unit})" if panel.unit else ""
    axes.set_title(short(f"{panel.title}{unit}", 40), loc="left")
    bare(axes, "left")
