"""Heat maps: in the terminal never wider than it, as pictures the same bytes every time."""

import math
import re

import pytest
from rich.cells import cell_len

from headscope.errors import UsageError
from headscope.reports import _heatmap
from headscope.reports._picture import save_picture
from headscope.reports._plot import HeadPicture, HeatMap, head_figure


def grid(layers, heads, scale=1.0):
    return [
        [scale * ((layer * 7 + head * 5) % 11) / 10 for head in range(heads - layer % 2)] for layer in range(layers)
    ]


MAPS = {
    "small": {"decoder.causal": grid(4, 8)},
    "pair": {"encoder.self": grid(6, 8), "decoder.cross": grid(5, 12, 1e-5)},
    "large": {"decoder.causal": grid(80, 64)},
    "zero": {"encoder.self": [[0.0, 0.0], [0.0]]},
    "equal": {"encoder.self": [[0.5, 0.5], [0.5, 0.5]]},
    "holes": {"encoder.self": [[1.0, math.nan, -0.5], [], [math.inf, 0.3]]},
    "none": {"encoder.self": [[math.nan]]},
    "absent": {},
}


def draw(name, path, *, title="t", unit="nats", force=False):
    """One of the maps as a file."""
    shown = HeadPicture(title, HeatMap(MAPS[name], "importance", unit))
    save_picture(lambda: head_figure(shown), path, force)


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("width", [12, 33, 80, 200])
@pytest.mark.parametrize("name", MAPS)
def test_terminal_map_is_never_wider_than_the_terminal(name, width, color):
    text = _heatmap.render(MAPS[name], title="importance of 日本\x1b[2J, a model", width=width, color=color)
    assert "\x1b[2J" not in text
    if not color:
        assert "\x1b" not in text
    visible = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(cell_len(line) for line in visible.splitlines()) <= width


def test_terminal_map_by_hand():
    values = {"encoder.self": [[0.0, 0.25, 0.5], [1.0, math.nan]]}
    assert _heatmap.render(values, title="importance", width=40, color=False).splitlines() == [
        "importance",
        "",
        "encoder.self",
        "  0 1 2",
        "0   ::++",
        "1 @@",
        "",
        "0 [ .:-=+*#%@] 1",
        "values 0 to 1",
        "layers down, heads across",
        "blank: under 0.1, or not measured: 1",
    ]


def test_terminal_map_in_colour_by_hand(monkeypatch):
    monkeypatch.setenv("COLORTERM", "truecolor")
    values = {"encoder.self": [[0.0, 1.0], [1.0], [math.nan, 1.0], [1.0, math.nan]]}
    lines = _heatmap.render(values, title="importance", width=40, color=True).splitlines()
    dark, light = "2;68;1;84", "2;253;231;37"
    assert lines[4] == f"0/1 \x1b[38;{dark};48;{light}m▀▀\x1b[0m\x1b[38;{light}m▀▀\x1b[0m"
    assert lines[5] == f"2/3 \x1b[38;{light}m▄▄\x1b[0m\x1b[38;{light}m▀▀\x1b[0m"


def test_a_terminal_without_true_colour_gets_the_nearest_of_256(monkeypatch):
    monkeypatch.delenv("COLORTERM", raising=False)
    text = _heatmap.render({"encoder.self": [[0.0, 1.0]]}, title="importance", width=40, color=True)
    assert "\x1b[38;5;53m▀▀\x1b[0m\x1b[38;5;220m▀▀\x1b[0m" in text, "dark violet and yellow"
    assert "38;2;" not in text


def test_terminal_map_is_split_and_says_so():
    text = _heatmap.render(MAPS["large"], title="importance", width=80, color=False)
    assert re.findall(r"heads \d+-\d+", text) == ["heads 0-31", "heads 32-63"]
    ticks = [line.split() for line in text.splitlines() if re.fullmatch(r"[ \d]*\d", line) and len(line.split()) > 3]
    assert [int(tick) for line in ticks for tick in line] == list(range(0, 64, 2))


def test_equal_values_are_full_and_zeros_are_blank():
    assert "0 @@@@" in _heatmap.render(MAPS["equal"], title="", width=80, color=False)
    assert "@@" not in _heatmap.render(MAPS["zero"], title="", width=80, color=False)


@pytest.mark.parametrize("name", ["holes", "absent"])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_is_the_same_bytes_every_time(name, suffix, tmp_path):
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        draw(name, path, title="$\\frac$ importance \x1b 日本")
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert not re.search(rb"<dc:date>|dc:creator|Software|tEXt", first.read_bytes())


def test_picture_ignores_the_settings_of_the_caller_and_keeps_them(tmp_path):
    import matplotlib

    draw("small", tmp_path / "a.svg")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red"}):
        draw("small", tmp_path / "b.svg")
        assert matplotlib.rcParams["font.size"] == 20
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_picture_prints_numbers_only_while_they_can_be_read(tmp_path):
    for name in ("small", "large"):
        draw(name, tmp_path / f"{name}.svg")
    assert "<!-- 0.7 -->" in (tmp_path / "small.svg").read_text()
    assert "<!-- 0.7 -->" not in (tmp_path / "large.svg").read_text()


def test_picture_shows_every_panel(tmp_path):
    draw("pair", tmp_path / "a.svg", title="importance", unit="nats per gate")
    comments = re.findall(r"<!-- (.*?) -->", (tmp_path / "a.svg").read_text())
    assert {"importance", "nats per gate", "encoder.self", "decoder.cross", "head", "layer"} <= set(comments)


def test_picture_suffix_and_force(tmp_path):
    with pytest.raises(UsageError, match=r"a picture is \.png or \.svg"):
        draw("small", tmp_path / "a.pdf")
    (tmp_path / "a.png").write_text("old")
    with pytest.raises(UsageError, match="exists already"):
        draw("small", tmp_path / "a.png")
    draw("small", tmp_path / "a.png", force=True)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
