"""One head's attention as a picture of tokens by tokens: query tokens down, key tokens across, cells from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headscope.errors import UsageError
from headscope.reports._cells import safe_text
from headscope.reports._heatmap import RESET, Rows, fold, paint
from headscope.reports._picture import COLORS, FRAME, headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TOKENS = 40
"""Tokens on a side that the picture in the terminal has room for."""
MOST_DRAWN = 512
"""Tokens on a side of a picture in a file."""
_LABELLED = 100
"""With more tokens than this a picture in a file numbers positions instead of naming tokens."""
_STEPS = ((0.9, "@"), (0.7, "%"), (0.5, "#"), (0.4, "*"), (0.3, "+"), (0.2, "="), (0.1, "-"), (0.05, ":"), (0.02, "."))
"""From how much attention on a cell has which density: finer below, since attention is thin among many tokens."""
_TALLEST, _WIDEST, _LONGEST = 10, 16, 24


def render_map(rows: Rows, queries: Sequence[str], keys: Sequence[str], *, title: str, width: int, color: bool) -> str:
    """The map as lines no wider than `width`; NaN is a key that its query may not see.

    Raises:
        UsageError: there are more than 40 tokens on a side.
    """
    if max(len(queries), len(keys)) > MOST_TOKENS:
        raise UsageError(
            f"{max(len(queries), len(keys))} tokens, and a picture in the terminal shows {MOST_TOKENS}",
            hint=f"--max-length {MOST_TOKENS} cuts the text; --format csv and --plot FILE show more",
        )
    digits = len(str(max(0, len(queries) - 1)))
    names = [_cut(_label(query), max(1, min(_WIDEST, width // 2 - digits - 2))) for query in queries]
    gutter = digits + 2 + max(map(_width, names), default=0)
    cell = 2 if gutter + 2 * len(keys) <= width else 1
    fitting = max(1, (width - gutter) // cell)
    lines = fold(safe_text(title), width)
    for start in range(0, len(keys), fitting):
        part = range(start, min(len(keys), start + fitting))
        lines += ["", *(" " * gutter + line for line in _header(keys, part, cell))]
        for number, (name, row) in enumerate(zip(names, rows, strict=True)):
            cells = "".join(_cell(row[key], color) * cell for key in part)
            space = " " * (gutter - digits - 1 - _width(name))
            lines.append(f"{number:>{digits}} {name}{space}{cells}".rstrip())
    return "\n".join([*lines, "", *_legend(width, color)]) + "\n"


def _label(token: str) -> str:
    """The token safe to show, its blanks as ▁ so that they can be seen."""
    return safe_text(token).replace(" ", "▁")


def _cut(label: str, width: int) -> str:
    """The label in at most `width` terminal cells."""
    if _width(label) <= width:
        return label
    kept = ""
    for char in label:
        if _width(kept + char) >= width:
            break
        kept += char
    return f"{kept}…"


def _width(text: str) -> int:
    """How many terminal cells the text takes."""
    from rich.cells import cell_len

    return cell_len(text)


def _header(keys: Sequence[str], part: range, cell: int) -> Iterator[str]:
    """Key tokens written downwards, each standing on its column; letters too wide for it are shown as ?."""
    columns = [_letters(_label(keys[key]), cell) for key in part]
    height = max((len(column) for column in columns), default=0)
    for line in range(height):
        marks = (column[line - height + len(column)] if line >= height - len(column) else "" for column in columns)
        yield "".join(mark + " " * (cell - _width(mark)) for mark in marks).rstrip()


def _letters(label: str, cell: int) -> list[str]:
    letters = [char if _width(char) <= cell else "?" for char in label if _width(char)]
    return letters if len(letters) <= _TALLEST else [*letters[: _TALLEST - 1], "…"]


def _cell(value: float, color: bool) -> str:
    if not math.isfinite(value):
        return " "
    if color:
        return f"\x1b[38;{paint(min(1.0, max(0.0, value)))}m█{RESET}"
    return next((density for least, density in _STEPS if value >= least), " ")


def _legend(width: int, color: bool) -> list[str]:
    directions = fold("query tokens down, key tokens across", width)
    if color:
        steps = max(2, min(20, width - len("0  1")))
        bar = "".join(f"\x1b[38;{paint(step / (steps - 1))}m█" for step in range(steps)) + RESET
        return [f"0 {bar} 1", *directions, *fold("blank: a key that the query may not see", width)]
    scale = "  ".join(f"{density} {least:g}" for least, density in reversed(_STEPS))
    return [*fold(f"from  {scale}", width), *directions, *fold(f"blank: under {_STEPS[-1][0]:g}, or not seen", width)]


def map_figure(rows: Rows, queries: Sequence[str], keys: Sequence[str], *, title: str) -> Figure:
    """Square cells, as large as token labels need while there are few tokens; grey is a key that its query may not see.

    Raises:
        UsageError: there are more than 512 tokens on a side.
    """
    import numpy
    from matplotlib.figure import Figure

    most = max(len(queries), len(keys), 1)
    if most > MOST_DRAWN:
        raise UsageError(f"{most} tokens, and a picture shows {MOST_DRAWN}", hint="--max-length")
    cell = max(0.2, min(0.5, 3 / most)) if most <= _LABELLED else 20 / most
    labels = [_cut(_label(token), _LONGEST) for token in (*queries, *keys)] if most <= _LABELLED else []
    margin = 0.6 + 0.075 * max((_width(label) for label in labels), default=0)
    size = (max(3.4, cell * len(keys) + margin + 1.2), max(2.6, cell * len(queries) + margin + 0.6))
    figure = Figure(figsize=size, layout="compressed")
    axes = figure.subplots()
    axes.set_facecolor("0.9")
    axes.set_anchor("W")
    grid = numpy.ma.masked_invalid(numpy.array(rows, dtype=float).reshape(len(queries), len(keys)))
    image = axes.imshow(grid, cmap=COLORS, vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set_xlabel("key token")
    axes.set_ylabel("query token")
    if labels:
        _name(axes, labels[: len(queries)], labels[len(queries) :])
    for spine in axes.spines.values():
        spine.set_color(FRAME)
    bar = figure.colorbar(image, ax=axes, label="attention", aspect=30, pad=0.02, panchor=False)
    bar.outline.set_visible(False)  # type: ignore[operator]
    if grid.mask.any():
        figure.supxlabel("grey: a key that the query may not see", fontsize=8)
    headline(figure, title, width=size[0])
    return figure


def _name(axes: Axes, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Token labels on both axes, keys above the map and read upwards."""
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(keys)), keys, rotation=90)
    axes.set_yticks(range(len(queries)), queries)
    axes.tick_params(length=2, color=FRAME, pad=2)
