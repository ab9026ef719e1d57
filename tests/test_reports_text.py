"""Report text: the terminal table at any width, and the escaping of hostile text."""

import csv
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import HOSTILE, report, unprintable
from rich.cells import cell_len

from headscope.columns import Column
from headscope.reports import table as table_format
from headscope.reports._cells import safe_cell, safe_text
from headscope.reports._separated import separated
from headscope.tables import Table


def test_table_text():
    assert table_format.render(report(["x", "[/red]"]), width=80).decode() == (
        "head                layer  importance  dead   token\n"
        "──────────────────  ─────  ──────────  ─────  ──────\n"
        "decoder.causal.0.0      0         0.1  true   x\n"
        "decoder.causal.0.1      1      1e-300  false  [/red]\n"
    )


@pytest.mark.parametrize("width", range(32, 90))
def test_table_fits_and_keeps_every_number_whole(width):
    table = report()
    text = table_format.render(table, width=width).decode()
    assert max(cell_len(line) for line in text.splitlines()) <= width
    words = text.split()
    assert "-2.5" in words
    assert "1e-300" in words
    assert "1.235e+04" in words


def test_table_repeats_the_key_in_every_block():
    blocks = table_format.render(report(["x", "y"]), width=40).decode().split("\n\n")
    assert len(blocks) == 2
    for block in blocks:
        assert [line.split()[0] for line in block.splitlines()][::2] == ["head", "decoder.causal.0.0"]


def test_table_without_key_repeats_the_pair():
    names = ("a", "b", "attention", "hellinger", "output", "verdict")
    row = {"a": "0.1", "b": "3.2", "attention": 0.5, "hellinger": 0.25, "output": 0.125, "verdict": "similar"}
    table = Table("similarity", tuple(Column(name, "", "") for name in names), (row,))
    blocks = table_format.render(table, width=24).decode().split("\n\n")
    assert len(blocks) > 1
    assert all(block.splitlines()[0].split()[:2] == ["a", "b"] for block in blocks)
    assert all(block.splitlines()[2].split()[:2] == ["0.1", "3.2"] for block in blocks)


def test_table_never_cuts_a_number_on_the_narrowest_terminal():
    text = table_format.render(report(["x"] * 4), width=5).decode()
    assert "1.235e+04" in text.split()


def test_table_folds_long_text_without_loss():
    sentence = "".join(chr(ord("a") + index % 26) for index in range(300))
    text = table_format.render(report([sentence]), width=80).decode()
    token = "".join(line[text.index("token") :].strip() for line in text.splitlines()[2:])
    assert token == sentence


def test_table_color_only_when_asked():
    table = report(["x"])
    colored = table_format.render(table, width=80, color=True).decode()
    assert "\x1b[1m" in colored
    assert re.sub(r"\x1b\[\d+m", "", colored) == table_format.render(table, width=80).decode()


def test_safe_text():
    assert safe_text("plain é 日本") == "plain é 日本"
    assert safe_text("\x1b\x9b\u202e\udc80\U000e0041") == r"\x1b\x9b\u202e\udc80\U000e0041"


@pytest.mark.parametrize(
    "code",
    [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x61C]
    + [0x200B, 0x200C, 0x200D, 0x2028, 0x2029, 0xFEFF, 0xD800, 0xDFFF],
)
def test_every_control_is_escaped(code):
    char = chr(code)
    assert char not in safe_text(f"a{char}b")
    cell = safe_cell(f"a{char}b")
    assert char not in cell
    assert json.loads(cell) == f"a{char}b"


@pytest.mark.parametrize("text", HOSTILE)
def test_safe_cell_loses_nothing(text):
    cell = safe_cell(text)
    assert (json.loads(cell) if cell.startswith('"') else cell) == text
    assert not unprintable(cell)


def test_safe_cell_leaves_labels_bare():
    assert safe_cell("encoder.self.3.7") == "encoder.self.3.7"
    assert safe_cell("a=b-c") == "a=b-c"


@pytest.mark.parametrize("text", ["a;=1+1", 'x,"=1', "a|+1", "a; @x", "a;;-2", "b ;'=1", "x;＝1"])
def test_a_formula_behind_a_separator_is_neutralised(text):
    """A spreadsheet that splits at semicolons must not find a formula in the middle of a cell."""
    assert json.loads(safe_cell(text)) == text
    assert safe_cell("encoder.self.1.0;encoder.self.2.0") == "encoder.self.1.0;encoder.self.2.0"


@given(st.text(alphabet=st.sampled_from("=+-@;,|\t\r\n \"'a1\x1b\u202e\u200b＝é") | st.characters(), max_size=12))
def test_no_spreadsheet_finds_a_formula(text):
    """Whatever the text, nothing is lost, and a reader that splits at any separator finds no cell that it would run."""
    cell = safe_cell(text)
    assert (json.loads(cell) if cell.startswith('"') else cell) == text
    assert not unprintable(cell)
    line = separated(Table("x", (Column("a", "", ""),), ({"a": text},)), ",").decode().splitlines()[1]
    for delimiter in ",;\t|":
        for found in next(csv.reader([line], delimiter=delimiter), []):
            assert not found.strip().startswith(tuple("=+-@＝＋－＠")), (line, delimiter)


def test_negative_numbers_stay_numbers():
    """The guard is for text: a cell that is a number is bare, also a negative one."""
    table = Table("x", (Column("a", "", ""), Column("b", "", "")), ({"a": -0.5, "b": "-0.5"}, {"a": -3, "b": "-3"}))
    assert separated(table, ",").decode().splitlines()[1:] == ['-0.5,"""-0.5"""', '-3,"""-3"""']
