"""Pictures: a figure made under fixed settings, as PNG or SVG for a file or as SVG inside a page.

The same values give the same bytes. Colours are those of Okabe and Ito, which read without colour vision too.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope.errors import UsageError
from headscope.reports._cells import safe_text
from headscope.reports._files import check_output, write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Picture = Callable[[], "Figure"]
"""What makes a figure when it is called, under the settings of `encoded`."""
COLORS = "viridis"
"""Dark violet over green to yellow: lightness rises evenly, so that it reads without colour vision too."""
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
FRAME = "0.7"

_METADATA: dict[str, dict[str, None]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""What would make two pictures of the same values differ, switched off."""
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "headscope",
    "svg.fonttype": "path",
    "text.parse_math": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}
_OUTSIDE = re.compile(
    r'<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>| xmlns(?::\w+)?="[^"]*"', re.DOTALL
)
"""What an SVG file has and an SVG inside a page does not need: its addresses, and comments that repeat its texts."""
_CLIP = re.compile(rb'(?<=id=")p[0-9a-f]{10}(?=")|(?<=url\(#)p[0-9a-f]{10}(?=\))')


def check_picture(path: Path | None, force: bool = False) -> None:
    """Refuse a picture that could not be written later, before anything is computed.

    Raises:
        UsageError: the suffix is neither .png nor .svg, or the file exists and `force` is not set.
        OutputError: its folder is missing or not writable.
    """
    if path is not None and path.suffix.lower() not in _METADATA:
        raise UsageError(f"{path}: a picture is {' or '.join(_METADATA)}")
    check_output(path, force)


def save_picture(picture: Picture, path: Path, force: bool = False) -> None:
    """Write the picture as PNG or SVG, by the suffix.

    Raises:
        UsageError: the suffix is neither .png nor .svg, or the file exists and `force` is not set.
        OutputError: the file cannot be written.
    """
    check_picture(path, force)
    write_file(path, encoded(picture, path.suffix.lower()), force)


def encoded(picture: Picture, suffix: str) -> bytes:
    """The bytes of the picture's file, `.png` or `.svg`, whatever settings the caller of matplotlib has."""
    from matplotlib import rc_context, rcdefaults

    buffer = io.BytesIO()
    with rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        warnings.filterwarnings("ignore", message="constrained_layout not applied", category=UserWarning)
        rcdefaults()
        with rc_context(_SETTINGS):
            picture().savefig(buffer, format=suffix[1:], dpi=150, metadata=_METADATA[suffix])
    return buffer.getvalue() if suffix == ".png" else _renamed(buffer.getvalue())


def _renamed(svg: bytes) -> bytes:
    """The picture with its clip paths numbered: their own names hash positions, whose last bits are not repeatable."""
    names: dict[bytes, bytes] = {}
    return _CLIP.sub(lambda found: names.setdefault(found[0], f"clip{len(names)}".encode()), svg)


def inline_svg(picture: Picture) -> str:
    """The picture as an `<svg>` element for an HTML page; it names no address and holds no text as characters."""
    return _OUTSIDE.sub("", encoded(picture, ".svg").decode()).strip()


def sized(wide: float, high: float) -> Figure:
    """An empty figure of this size in inches, which lays its parts out by itself."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(wide, high), layout=ConstrainedLayoutEngine(h_pad=0.07))


def headline(figure: Figure, title: str, *, width: float) -> None:
    """The title over a figure of `width` inches, in as many lines as it needs."""
    line = max(30, int(width * 11))
    lines = textwrap.wrap(safe_text(title), line, break_on_hyphens=False, max_lines=4, placeholder=" …")
    figure.suptitle("\n".join(lines), fontsize=11)


def short(text: str, most: int = 48) -> str:
    """The text safe to show, its end alone where it is longer than `most`: names differ there."""
    shown = safe_text(text)
    return shown if len(shown) <= most else f"…{shown[1 - most :]}"


def bare(axes: Axes, *sides: str) -> None:
    """Leave the frame only on these sides."""
    for side, spine in axes.spines.items():
        spine.set_color(FRAME)
        spine.set_visible(side in sides)


def step_of(count: int, most: int) -> int:
    """A round step that leaves at most so many of `count` marks."""
    return next((step for step in (1, 2, 5, 10, 20, 50) if count <= most * step), 100)
