"""A picture of the likeness of all heads, as PNG or SVG: a matrix in cluster order with its dendrogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headscope.reports._cells import safe_text
from headscope.reports._picture import COLORS, FRAME, headline, step_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED = 96
"""With more heads than this not every row is named."""
_LEFT_OUT = "0.85"


@dataclass(frozen=True)
class MatrixPicture:
    """`values[row][column]` from `least` to 1, NaN where not defined, with the names of rows and columns.

    `merges` is scipy's linkage of the heads, whose leaves are the rows; None without a tree.
    """

    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]
    merges: Sequence[Sequence[float]] | None
    least: float


def matrix_figure(shown: MatrixPicture, *, title: str) -> Figure:
    """The matrix, with its tree at the left where there is one; grey is not defined."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    rows, columns, merges = shown.rows, shown.columns, shown.merges
    cell = max(0.02, min(0.22, 9 / max(len(rows), len(columns), 1)))
    wide, high = max(2.5, cell * len(columns)), max(2.5, cell * len(rows))
    panels = [wide] if merges is None else [1.3, wide]
    size = (sum(panels) + 2.6, high + 1.7)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, width_ratios=panels)
    matrix = grid[0][-1]
    scale = Normalize(shown.least, 1.0)
    _image(matrix, shown.values, scale)
    _name(matrix, rows, columns, beside=merges is not None)
    if merges is not None:
        _dendrogram(grid[0][0], merges, len(rows))
    bar = figure.colorbar(ScalarMappable(scale, COLORS), ax=list(grid[0]), label="likeness", aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    if any(not math.isfinite(value) for row in shown.values for value in row):
        figure.supxlabel("grey: not defined (other queries or keys, or no output)", fontsize=8)
    headline(figure, title, width=size[0])
    return figure


def _image(axes: Axes, values: Sequence[Sequence[float]], scale: Any) -> None:
    import numpy

    grid = numpy.array([[value if math.isfinite(value) else math.nan for value in row] for row in values])
    axes.set_facecolor(_LEFT_OUT)
    axes.imshow(numpy.ma.masked_invalid(grid), cmap=COLORS, norm=scale, interpolation="nearest", aspect="auto")
    for spine in axes.spines.values():
        spine.set_color(FRAME)


def _name(axes: Axes, rows: Sequence[str], columns: Sequence[str], *, beside: bool) -> None:
    """Names at the right (a tree is at the left) and below, as many as can be read, without what all begin with."""
    shared = _shared([*rows, *columns])
    for axis, names in ((axes.yaxis, rows), (axes.xaxis, columns)):
        step = 1 if len(names) <= _NAMED else step_of(len(names), _NAMED)
        places = list(range(0, len(names), step))
        size = max(3.0, min(8.0, 560 / max(len(names) / step, 1) / 1.3))
        axis.set_ticks(places, labels=[safe_text(names[place].removeprefix(shared)) for place in places])
        axis.set_tick_params(labelsize=size, length=0 if step == 1 else 2)
    axes.tick_params(axis="x", rotation=90)
    axes.yaxis.set_ticks_position("right")
    if not beside:
        axes.set_ylabel("heads of the first model")
        axes.set_xlabel("heads of the second model")
    elif shared:
        axes.set_xlabel(f"heads {safe_text(shared)}layer.head")


def _shared(names: Sequence[str]) -> str:
    """The stack and kind that all names begin with, or nothing."""
    starts = {".".join(name.split(".")[:-2]) + "." for name in names}
    return starts.pop() if len(starts) == 1 else ""


def _dendrogram(axes: Axes, merges: Sequence[Sequence[float]], leaves: int) -> None:
    """The tree, its leaves at the rows of the matrix: a merge stands where its two parts differ by its distance."""
    from matplotlib.collections import LineCollection

    members = [[leaf] for leaf in range(leaves)]
    for left, right, *_ in merges:
        members.append(members[int(left)] + members[int(right)])
    row = {leaf: place for place, leaf in enumerate(members[-1])}
    place, depth = [float(row[leaf]) for leaf in range(leaves)], [0.0] * leaves
    lines: list[list[tuple[float, float]]] = []
    for left, right, distance, *_ in merges:
        a, b = int(left), int(right)
        lines.append([(depth[a], place[a]), (distance, place[a]), (distance, place[b]), (depth[b], place[b])])
        place.append((place[a] + place[b]) / 2)
        depth.append(float(distance))
    axes.add_collection(LineCollection(lines, colors="0.3", linewidths=0.8))
    axes.set_xlim(max(depth) * 1.03 or 1.0, 0.0)
    axes.set_ylim(leaves - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xlabel("distance (1 − likeness)")
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
