"""A picture of what a pruning did: which heads went or became one, and what the model costs before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headscope.reports._picture import BLUE, FRAME, bare, headline, short, sized, step_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_GONE = "0.88"
_COUNTED = 40
"""With more layers than this the counts beside them are left out."""


@dataclass(frozen=True)
class Block:
    """So many heads side by side from number `first` that are one thing, and whether it stays."""

    first: int
    width: int = 1
    stays: bool = True


@dataclass(frozen=True)
class Change:
    """One cost before and after."""

    name: str
    before: int
    after: int

    @property
    def share(self) -> float:
        """What is left, from 0."""
        return self.after / self.before


@dataclass(frozen=True)
class Removal:
    """What the picture shows: `layers[stack and kind][layer]` are blocks of heads in their original numbering.

    `things` says what the blocks are, `remarks` what else changed.
    """

    title: str
    things: str
    layers: Mapping[str, Sequence[Sequence[Block]]]
    changes: tuple[Change, ...]
    remarks: tuple[str, ...] = ()


def removal_figure(shown: Removal) -> Figure:
    """Heads at the left, costs below, each bar a share of what it was before."""
    layers = max((len(rows) for rows in shown.layers.values()), default=1)
    columns = [_heads(rows) for rows in shown.layers.values()] or [1]
    cell = max(0.09, min(0.3, 9 / max(layers, *columns)))
    wide = max(6.4, cell * sum(columns) + 1.2 * len(columns) + 0.3)
    heights = [cell * layers + 1.2, 0.34 * len(shown.changes) + 0.6]
    figure = sized(wide, sum(heights) + 0.5 + 0.18 * len(shown.remarks))
    parts: Any = figure.subfigures(2, 1, height_ratios=heights)
    top, below = parts
    _draw_heads(top, shown, columns, cell)
    _draw_costs(below.subplots(), shown.changes)
    below.supxlabel("\n".join(short(remark, 120) for remark in shown.remarks), fontsize=8.5)
    headline(figure, shown.title, width=wide)
    return figure


def _heads(rows: Sequence[Sequence[Block]]) -> int:
    return max((block.first + block.width for row in rows for block in row), default=1)


def _draw_heads(figure: SubFigure, shown: Removal, columns: Sequence[int], cell: float) -> None:
    from matplotlib.patches import Patch

    panels = figure.subplots(1, len(columns), squeeze=False, width_ratios=columns)[0]
    for axes, (name, rows) in zip(panels, shown.layers.items(), strict=False):
        _panel(axes, rows, cell)
        axes.set_title(short(name))
        axes.set_xlabel(shown.things)
    blocks = [block for rows in shown.layers.values() for row in rows for block in row]
    merged = any(block.width > 1 for block in blocks)
    handles = [Patch(facecolor=BLUE, label="what a bar spans became one" if merged else "stays")]
    if not all(block.stays for block in blocks):
        handles.append(Patch(facecolor=_GONE, edgecolor=FRAME, label="gone"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _panel(axes: Axes, rows: Sequence[Sequence[Block]], cell: float) -> None:
    """A row of blocks for each layer, and beside it how many of them stay."""
    from matplotlib.collections import PolyCollection

    kept = [_corners(block, layer) for layer, row in enumerate(rows) for block in row if block.stays]
    gone = [_corners(block, layer) for layer, row in enumerate(rows) for block in row if not block.stays]
    axes.add_collection(PolyCollection(kept, facecolors=BLUE, edgecolors="none"))
    axes.add_collection(PolyCollection(gone, facecolors=_GONE, edgecolors=FRAME, linewidths=0.4))
    heads = _heads(rows)
    axes.set_xlim(-0.6, heads - 0.4)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_aspect("equal", anchor="N")
    axes.set_xticks(range(0, heads, step_of(heads, 16)))
    axes.set_yticks(range(0, len(rows), step_of(len(rows), 16)))
    axes.set_ylabel("layer")
    bare(axes)
    axes.tick_params(length=2, color=FRAME)
    if len(rows) > _COUNTED:
        return
    for layer, row in enumerate(rows):
        if row:
            before, after = sum(block.width for block in row), sum(block.stays for block in row)
            size = min(8.0, 72 * cell * 0.75)
            axes.text(heads - 0.2, layer, f"{after} of {before}", va="center", fontsize=size, clip_on=False)


def _corners(block: Block, layer: int) -> list[tuple[float, float]]:
    left, right, top, bottom = block.first - 0.44, block.first + block.width - 0.56, layer - 0.44, layer + 0.44
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _draw_costs(axes: Axes, changes: Sequence[Change]) -> None:
    places = range(len(changes))
    axes.barh(places, [100] * len(changes), color="white", edgecolor=FRAME, height=0.68, linewidth=0.8)
    axes.barh(places, [100 * change.share for change in changes], color=BLUE, height=0.68)
    for place, change in enumerate(changes):
        said = f"{change.before:,} → {change.after:,} ({change.share - 1:+.1%})"
        axes.text(max(100.0, 100 * change.share) + 1.5, place, said, va="center", fontsize=8)
    axes.set_yticks(places, labels=[change.name for change in changes])
    axes.set_ylim(len(changes) - 0.5, -0.5)
    most = max((100 * change.share for change in changes), default=100.0)
    axes.set_xlim(0, math.ceil(max(100.0, most) * 1.75))
    axes.set_xticks(range(0, 101, 25))
    axes.set_xlabel("% of the whole model", loc="left")
    axes.tick_params(axis="y", length=0)
    bare(axes)
