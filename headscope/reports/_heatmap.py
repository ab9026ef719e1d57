"""A heat map in the terminal: one value per head, a block per stack and kind, layers down, heads across.

Colours and densities are linear from 0 to the largest value of the whole map; smaller values are drawn as 0.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from headscope.reports._cells import safe_text

Rows = Sequence[Sequence[float]]
"""Row `l` holds the values of layer `l`'s heads; rows may differ in length, NaN is a head that was not measured."""

_DENSITY = " .:-=+*#%@"
_ANCHORS = ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))
"""Dark violet over green to yellow: lightness rises evenly, so that it reads without colour vision too."""
RESET = "\x1b[0m"


def render(values: Mapping[str, Rows], *, title: str, width: int, color: bool) -> str:
    """The map as lines no wider than `width`: half blocks in colour, two layers a line, else ten densities."""
    top = _top(values)
    lines = fold(safe_text(title), width)
    for name, rows in values.items():
        lines += ["", *_block(safe_text(name), rows, top, width, color)]
    return "\n".join([*lines, "", *_legend(values, top, width, color)]) + "\n"


def finite(values: Mapping[str, Rows]) -> list[float]:
    """Every value that was measured."""
    return [value for rows in values.values() for row in rows for value in row if math.isfinite(value)]


def _top(values: Mapping[str, Rows]) -> float:
    return max(finite(values), default=0.0)


def _level(row: Sequence[float], head: int, top: float) -> float | None:
    """Where the value lies between 0 and 1, or None where there is none."""
    if head >= len(row) or not math.isfinite(row[head]):
        return None
    return min(1.0, max(0.0, row[head] / top)) if top > 0 else 0.0


def _block(name: str, rows: Rows, top: float, width: int, color: bool) -> Iterator[str]:
    """One stack and kind, cut into as many column blocks as the width demands."""
    heads = max((len(row) for row in rows), default=0)
    last = max(0, len(rows) - 1)
    gutter = len(f"{last}/{last}" if color and last else f"{last}") + 1
    cell = 1 if color and gutter + 2 * heads > width else 2
    fitting = max(1, (width - gutter) // cell)
    if 4 <= fitting < heads:
        fitting -= fitting % (8 if fitting > 16 else 4)
    for start in range(0, heads, fitting):
        part = range(start, min(heads, start + fitting))
        where = f", heads {part[0]}-{part[-1]}" if fitting < heads else ""
        if start:
            yield ""
        yield from fold(f"{name}{where}", width)
        yield " " * gutter + _ticks(part, cell)
        painted = _colored(rows, part, top, cell) if color else _dense(rows, part, top)
        for label, line in painted:
            yield f"{label:>{gutter - 1}} {line}".rstrip()


def _ticks(heads: range, cell: int) -> str:
    """Head numbers above their columns, as many as leave a blank between them; none where no number fits."""
    longest = len(str(heads[-1]))
    step = next(step for step in (1, 2, 4, 8, 16, 32) if step * cell > longest)
    line = ""
    for head in heads[::step]:
        line += " " * ((head - heads[0]) * cell - len(line)) + str(head)
    return line if len(line) <= len(heads) * cell else line[: len(heads) * cell].rpartition(" ")[0]


def _dense(rows: Rows, heads: range, top: float) -> Iterator[tuple[str, str]]:
    for layer, row in enumerate(rows):
        levels = (_level(row, head, top) for head in heads)
        yield str(layer), "".join("  " if level is None else _DENSITY[min(9, int(level * 10))] * 2 for level in levels)


def _colored(rows: Rows, heads: range, top: float, cell: int) -> Iterator[tuple[str, str]]:
    for layer in range(0, len(rows), 2):
        upper = rows[layer]
        lower = rows[layer + 1] if layer + 1 < len(rows) else ()
        pairs = ((_level(upper, head, top), _level(lower, head, top)) for head in heads)
        label = f"{layer}/{layer + 1}" if layer + 1 < len(rows) else str(layer)
        yield label, "".join(_half_block(above, below, cell) for above, below in pairs).rstrip()


def _half_block(above: float | None, below: float | None, cell: int) -> str:
    if above is None and below is None:
        return " " * cell
    if above is None:
        return f"\x1b[38;{paint(below or 0.0)}m{'▄' * cell}{RESET}"
    background = "" if below is None else f";48;{paint(below)}"
    return f"\x1b[38;{paint(above)}{background}m{'▀' * cell}{RESET}"


def paint(level: float) -> str:
    """The ramp's colour at `level` of 0 to 1, as the numbers behind `38;` or `48;` in an escape sequence.

    A terminal that does not promise true colour by COLORTERM gets the nearest of 256 colours.
    """
    from rich.color import Color, ColorSystem

    place = level * (len(_ANCHORS) - 1)
    index = min(int(place), len(_ANCHORS) - 2)
    mixed = (a + (b - a) * (place - index) for a, b in zip(_ANCHORS[index], _ANCHORS[index + 1], strict=True))
    color = Color.from_rgb(*map(round, mixed))
    exact = os.environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit")
    return ";".join((color if exact else color.downgrade(ColorSystem.EIGHT_BIT)).get_ansi_codes()[1:])


def _legend(values: Mapping[str, Rows], top: float, width: int, color: bool) -> list[str]:
    """The scale, the least and largest value, the directions, and what a blank means."""
    known = finite(values)
    if not known:
        return fold("no head was measured", width)
    missing = sum(len(row) for rows in values.values() for row in rows) - len(known)
    if color:
        steps = max(2, min(20, width - len(f"0  {top:.4g}")))
        bar = "".join(f"\x1b[38;{paint(step / (steps - 1))}m█" for step in range(steps)) + RESET
        lines = [f"0 {bar} {top:.4g}"]
        blank = f"blank: not measured: {missing}" if missing else ""
    else:
        lines = fold(f"0 [{_DENSITY}] {top:.4g}", width)
        blank = f"blank: under {top / 10:.3g}" + (f", or not measured: {missing}" if missing else "")
    lines += fold(f"values {min(known):.4g} to {max(known):.4g}", width)
    lines += fold(f"layers down{', two a line' if color else ''}, heads across", width)
    return lines + (fold(blank, width) if blank else [])


def fold(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` terminal cells."""
    from rich.cells import cell_len, chop_cells

    if cell_len(text) <= width:
        return [text]
    return textwrap.wrap(text, width) if text.isascii() else [line.strip() for line in chop_cells(text, width)]
