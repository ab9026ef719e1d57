"""A picture of what a model loses as heads go: a panel for each quantity, over the share of heads gone.

Every line has a colour and a mark of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headscope.reports._cells import safe_text
from headscope.reports._picture import BLUE, GREEN, ORANGE, PURPLE, SKY, bare, headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG = 100.0
"""A quantity that ranges further than this many times its least positive value is drawn on a log axis."""
_RANDOM = "random"
_GREY, _DARK = "0.82", "0.45"
_STYLES: dict[str, dict[str, Any]] = {
    "repaired": {"color": BLUE, "marker": "o", "linewidth": 2.2, "zorder": 6},
    "asked": {"color": SKY, "marker": "o", "markerfacecolor": "white", "zorder": 5},
    "importance": {"color": ORANGE, "marker": "s", "zorder": 4},
    "importance-layer-norm": {"color": GREEN, "marker": "^", "zorder": 3},
    "sensitivity": {"color": PURPLE, "marker": "D", "zorder": 4},
}
"""How a line is drawn, by its role."""


@dataclass(frozen=True)
class Panel:
    """One quantity: its `name` among the values of the lines, the title of its panel, and what it is measured in."""

    name: str
    title: str
    unit: str = ""


@dataclass(frozen=True)
class Line:
    """One series: its values by quantity over the `shares` (0 to 1) of heads that are gone, NaN where not measured.

    `role` decides how it is drawn; those of the role `random` make one band from the least to the largest.
    """

    label: str
    role: str
    shares: tuple[float, ...]
    values: Mapping[str, tuple[float, ...]]


def curve_figure(lines: Sequence[Line], panels: Sequence[Panel], *, title: str) -> Figure:
    """The figure; a line's first value is that of the whole model."""
    from matplotlib.figure import Figure

    size = (max(6.0, 4.1 * len(panels)), 4.6)
    figure = Figure(figsize=size, layout="constrained")
    every: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(axes, panel, lines)
        handles, labels = axes.get_legend_handles_labels()
        every |= dict(zip(labels, handles, strict=True))
    figure.legend(
        every.values(), every.keys(), loc="outside lower center", ncols=2 if len(panels) < 2 else 3, fontsize=8.5,
        frameon=False,
    )  # fmt: skip
    headline(figure, title, width=size[0])
    return figure


def _panel(axes: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    name = panel.name
    known = [value for line in lines for value in line.values[name] if math.isfinite(value)]
    positive = [value for value in known if value > 0]
    log = bool(positive) and min(known) >= 0 and max(positive) > _LOG * min(positive)
    for line in lines:
        if line.role != _RANDOM:
            style = {"markersize": 5, "linewidth": 1.6} | _STYLES[line.role]
            axes.plot([100 * share for share in line.shares], line.values[name], label=safe_text(line.label), **style)
    if band := [line for line in lines if line.role == _RANDOM]:
        _band(axes, name, band)
    if log:
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    whole = lines[0].values[name][0]
    if math.isfinite(whole) and (whole > 0 or not log):
        axes.axhline(whole, color="black", linestyle=(0, (5, 3)), linewidth=1.0, zorder=2, label="whole model")
    remarks = [panel.unit, "log axis" if log else "", f"whole model: {whole:.4g}" if whole else ""]
    axes.set_title("\n".join([safe_text(panel.title), ", ".join(filter(None, remarks))]))
    axes.set_xlabel("heads removed (%)")
    axes.set_xticks(range(0, 101, 10))
    axes.set_xlim(-3, 3 + 100 * max(line.shares[-1] for line in lines))
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    bare(axes, "left", "bottom")


def _band(axes: Axes, name: str, band: Sequence[Line]) -> None:
    """From the least to the largest of several lines, and their mean; between points they are straight."""
    import numpy

    last = min(line.shares[-1] for line in band)
    shares = numpy.array(sorted({share for line in band for share in line.shares if share <= last}))
    values = numpy.stack([numpy.interp(shares, line.shares, line.values[name]) for line in band])
    axes.fill_between(
        100 * shares, values.min(axis=0), values.max(axis=0), color=_GREY, linewidth=0, zorder=0,
        label=f"random, {len(band)} orders: range",
    )  # fmt: skip
    axes.plot(100 * shares, values.mean(axis=0), color=_DARK, linewidth=1.4, zorder=1, label="random: mean")
