"""A picture of one value per head, as PNG or SVG: a panel per stack and kind, one colour scale for all."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.errors import UsageError
from headscope.reports._cells import safe_text
from headscope.reports._files import check_output, write_file
from headscope.reports._heatmap import Rows, finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

METADATA: dict[str, dict[str, None]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""What would make two pictures of the same values differ, switched off."""
SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "headscope",
    "svg.fonttype": "path",
    "text.parse_math": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}
COLORS = "viridis"
_MOST_NUMBERS = 400
"""With more heads than this no number is printed in the cells."""


def check_picture(path: Path | None, force: bool = False) -> None:
    """Refuse a picture that could not be written later, before anything is computed.

    Raises:
        UsageError: the suffix is neither .png nor .svg, or the file exists and `force` is not set.
        OutputError: its folder is missing or not writable.
    """
    if path is not None and path.suffix.lower() not in METADATA:
        raise UsageError(f"{path}: a picture is {' or '.join(METADATA)}")
    check_output(path, force)


def heatmap(values: Mapping[str, Rows], *, title: str, unit: str, path: Path, force: bool = False) -> None:
    """Write the picture; the same values give the same bytes. White is no such head, grey one not measured.

    Raises:
        UsageError: the suffix is neither .png nor .svg, or the file exists and `force` is not set.
        OutputError: the file cannot be written.
    """
    save_picture(lambda: _figure(values, safe_text(title), safe_text(unit)), path, force)


def save_picture(figure: Callable[[], Figure], path: Path, force: bool) -> None:
    """Write the figure that is made under fixed settings; the same values give the same bytes.

    Raises:
        UsageError: the suffix is neither .png nor .svg, or the file exists and `force` is not set.
        OutputError: the file cannot be written.
    """
    from matplotlib import rc_context, rcdefaults

    check_picture(path, force)
    suffix = path.suffix.lower()
    buffer = io.BytesIO()
    with rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        rcdefaults()
        with rc_context(SETTINGS):
            figure().savefig(buffer, format=suffix[1:], dpi=150, metadata=METADATA[suffix])
    write_file(path, buffer.getvalue(), force)


def _figure(values: Mapping[str, Rows], title: str, unit: str) -> Figure:
    """All panels in a row, heads of one size everywhere, numbers in the cells while they can be read."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    shapes = [(len(rows), max((len(row) for row in rows), default=0)) for rows in values.values()]
    layers = max((shape[0] for shape in shapes), default=1)
    columns = [max(1, shape[1]) for shape in shapes] or [1]
    numbers = sum(len(row) for rows in values.values() for row in rows) <= _MOST_NUMBERS
    wide, high = (0.5, 0.36) if numbers else (max(0.09, min(0.25, 8 / max(layers, *columns))),) * 2
    size = (max(4.5, wide * sum(columns) + 0.7 * len(columns) + 1.3), max(2.6, high * layers + 1.3))
    figure = Figure(figsize=size, layout="constrained")
    scale = Normalize(0.0, max(finite(values), default=0.0) or 1.0, clip=True)
    panels = figure.subplots(1, len(columns), squeeze=False, width_ratios=columns)[0]
    for axes, (name, rows) in zip(panels, values.items(), strict=False):
        _panel(axes, safe_text(name), rows, scale)
        axes.set_aspect(high / wide, anchor="N")
        if numbers:
            _write_numbers(axes, rows, scale)
    extend = "min" if min(finite(values), default=0.0) < 0 else "neither"
    place = {"ax": list(panels), "aspect": 30, "pad": 0.02, "panchor": False}
    bar = figure.colorbar(ScalarMappable(scale, COLORS), label=unit, extend=extend, **place)
    bar.outline.set_visible(False)
    if any(not math.isfinite(value) for rows in values.values() for row in rows for value in row):
        figure.supxlabel("grey: not measured", fontsize=8)
    figure.suptitle("\n".join(textwrap.wrap(title, int(size[0] * 11))), fontsize=11)
    return figure


def _panel(axes: Axes, name: str, rows: Rows, scale: Any) -> None:
    import numpy
    from matplotlib.colors import ListedColormap

    heads = max((len(row) for row in rows), default=0)
    axes.set_title(name)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    for spine in axes.spines.values():
        spine.set_color("0.7")
    if not heads:
        return
    grid = numpy.full((len(rows), heads), numpy.nan)
    absent = numpy.ones((len(rows), heads), dtype=bool)
    for layer, row in enumerate(rows):
        grid[layer, : len(row)] = [value if math.isfinite(value) else math.nan for value in row]
        absent[layer, : len(row)] = False
    grey = numpy.ma.masked_array(numpy.zeros_like(grid), absent)
    axes.imshow(grey, cmap=ListedColormap(["0.85"]), interpolation="nearest")
    _image(axes, numpy.ma.masked_invalid(grid), scale)
    axes.set_xticks(_ticks(heads))
    axes.set_yticks(_ticks(len(rows)))


def _image(axes: Axes, grid: Any, scale: Any) -> AxesImage:
    return axes.imshow(grid, cmap=COLORS, norm=scale, interpolation="nearest")


def _ticks(count: int) -> list[int]:
    """Every head or layer while there are few, then every second, fifth, tenth, …"""
    return list(range(0, count, step_of(count, 16)))


def step_of(count: int, most: int) -> int:
    """A round step that leaves at most so many of `count` marks."""
    return next((step for step in (1, 2, 5, 10, 20, 50) if count <= most * step), 100)


def _write_numbers(axes: Axes, rows: Rows, scale: Any) -> None:
    """Each value in its cell, dark on light and light on dark."""
    for layer, row in enumerate(rows):
        for head, value in enumerate(row):
            if math.isfinite(value):
                color = "black" if scale(value) > 0.6 else "white"
                axes.text(head, layer, f"{value:.2g}", ha="center", va="center", color=color, fontsize=7)
