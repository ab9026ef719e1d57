"""Report formats: every one gives the rows back, and nothing hostile gets through."""

import csv
import html
import io
import json
import math
import re
import sys
from html.parser import HTMLParser

import pandas
import pytest
from report_samples import (
    expected_rows,
    lonely_free,
    parsed_cell,
    report,
    unprintable,
)

from headscope.columns import Column
from headscope.reports import FORMATS, emit
from headscope.reports import csv as csv_format
from headscope.reports import html as html_format
from headscope.reports import json as json_format
from headscope.reports import jsonl as jsonl_format
from headscope.reports import markdown as markdown_format
from headscope.reports import parquet as parquet_format
from headscope.reports import tsv as tsv_format
from headscope.reports._cells import safe_text
from headscope.tables import Table


def test_formats_are_the_files():
    assert FORMATS == ["csv", "html", "json", "jsonl", "markdown", "parquet", "table", "tsv"]


@pytest.mark.parametrize(("module", "delimiter"), [(csv_format, ","), (tsv_format, "\t")])
def test_csv_and_tsv_give_the_rows_back(module, delimiter):
    table = report()
    data = module.render(table)
    text = data.decode("utf-8")
    assert b"\r" not in data
    assert text.count("\n") == len(table.rows) + 1
    lines = list(csv.reader(io.StringIO(text), delimiter=delimiter))
    assert lines[0] == table.names
    for cells, row in zip(lines[1:], expected_rows(table), strict=True):
        assert [parsed_cell(cell, like) for cell, like in zip(cells, row.values(), strict=True)] == list(row.values())


def test_csv_is_read_alike_by_pandas():
    frame = pandas.read_csv(io.BytesIO(csv_format.render(report())))
    assert frame["importance"][0] == 0.1
    assert frame["importance"][3] == pytest.approx(12345.678901234567, rel=1e-14)
    assert frame["importance"].isna().sum() == sum(value["importance"] is None for value in expected_rows(report()))


def test_csv_bytes():
    assert csv_format.render(report(["a,b", "=1"])).decode() == (
        "head,layer,importance,dead,token\n"
        'decoder.causal.0.0,0,0.1,true,"a,b"\n'
        'decoder.causal.0.1,1,1e-300,false,"""=1"""\n'
    )


def test_numpy_floats_are_written_as_numbers():
    import numpy

    table = Table("t", (Column("x", "", ""),), ({"x": numpy.float64(0.1)},))
    assert csv_format.render(table) == b"x\n0.1\n"
    assert markdown_format.render(table).splitlines()[-1] == b"| 0.1 |"
    assert pandas.read_parquet(io.BytesIO(parquet_format.render(table)))["x"].dtype.kind == "f"


def test_no_csv_cell_is_a_formula():
    for line in list(csv.reader(io.StringIO(csv_format.render(report()).decode())))[1:]:
        assert line[-1] == "" or line[-1][0] not in "=+-@\t\r＝＋－＠"


def test_json_gives_everything_back_strictly():
    def refuse(constant):
        raise AssertionError(constant)

    table = report()
    found = json.loads(json_format.render(table), parse_constant=refuse)
    assert list(found) == ["schema_version", "report", "provenance", "notes", "columns", "empty", "rows"]
    assert found["schema_version"] == 1
    assert found["report"] == "inspect"
    assert found["provenance"]["revision"] == "abc"
    assert found["notes"] == list(table.notes)
    assert found["columns"]["importance"] == {"unit": "nats", "meaning": "a < b & c"}
    assert found["rows"] == expected_rows(table)
    nulls = {name for row in found["rows"] for name, value in row.items() if value is None}
    assert found["empty"].keys() == nulls and all(found["empty"].values())


def test_jsonl_gives_the_rows_back():
    table = report()
    lines = jsonl_format.render(table).decode().removesuffix("\n").split("\n")
    assert [json.loads(line) for line in lines] == expected_rows(table)


def test_markdown_gives_the_rows_back():
    table = report()
    lines = markdown_format.render(table).decode().splitlines()
    assert lines[0] == "| head | layer | importance | dead | token |"
    assert lines[1] == "| --- | ---: | ---: | --- | --- |"
    end = 2 + len(table.rows)
    for line, row in zip(lines[2:end], expected_rows(table), strict=True):
        cells = re.findall(r" ((?:\\.|[^|\\])*?) \|", line)
        shown = [html.unescape(re.sub(r"\\([\\`*\[\]|~$_])", r"\1", cell)) for cell in cells]
        assert parsed_cell(shown[2], row["importance"]) == row["importance"]
        assert shown[-1] == safe_text(row["token"])
        assert "<" not in line
        assert not re.search(r"(?<!\\)\[", line)
    assert lines[end : end + 6] == ["", "Notes", "", "- one &lt;b&gt;note&lt;/b&gt;\\\\x1b\\[1m", "", "Provenance"]
    assert {"- model: some/model", "- revision: abc", "- truncated: 3", "- versions: torch 2.11"} <= set(lines[end:])


def test_parquet_gives_the_rows_back():
    table = report()
    frame = pandas.read_parquet(io.BytesIO(parquet_format.render(table)), dtype_backend="numpy_nullable")
    assert list(frame.columns) == table.names
    assert frame.attrs["provenance"]["model"] == "some/model"
    assert [str(kind) for kind in frame.dtypes] == ["string", "Int64", "Float64", "boolean", "string"]
    for found, row in zip(frame.to_dict("records"), expected_rows(table), strict=True):
        plain = {name: None if value is pandas.NA else value for name, value in found.items()}
        assert plain == {**row, "token": lonely_free(row["token"])}


@pytest.mark.parametrize(
    ("values", "back"),
    [
        (["a", 1, None], ["a", "1", None]),
        ([True, 2], ["true", "2"]),
        ([2**70, 1], [float(2**70), 1.0]),
        ([None, math.nan], [None, None]),
        ([1, 2.5], [1.0, 2.5]),
        ([], []),
    ],
)
def test_parquet_takes_any_column(values, back):
    table = Table("t", (Column("x", "", ""),), tuple({"x": value} for value in values))
    frame = pandas.read_parquet(io.BytesIO(parquet_format.render(table)))
    assert [None if pandas.isna(value) else value for value in frame["x"]] == back


class Page(HTMLParser):
    """The cells of the first table, and every tag and attribute."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.rows, self.tags, self.attributes, self.open = [], set(), [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        self.open = tag == "td"
        if self.open:
            self.rows[-1].append(["", dict(attrs).get("data-value")])

    def handle_endtag(self, tag):
        self.open = False

    def handle_data(self, data):
        if self.open:
            self.rows[-1][-1][0] += data


def test_html_gives_the_rows_back_and_runs_nothing():
    table = report()
    text = html_format.render(table).decode()
    page = Page(text)
    assert not page.tags & {"img", "link", "iframe", "b"}
    assert text.count("<script") == text.lower().count("</script") == 1, "ours"
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    rows = page.rows[1 : len(table.rows) + 1]
    for cells, row in zip(rows, expected_rows(table), strict=True):
        assert parsed_cell(cells[2][1] or "", row["importance"]) == row["importance"]
        assert cells[-1][0] == safe_text(row["token"])
    assert "some/model" in text
    assert "a &lt; b &amp; c" in text
    assert "torch 2.11" in text


def test_html_names_no_address():
    assert "://" not in html_format.render(report(["plain"])).decode()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "parquet"])
def test_no_unprintable_character_in_any_text_format(name, capsysbinary, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    emit(report(), format=name)
    text = capsysbinary.readouterr().out.decode("utf-8")
    assert unprintable(text) <= ({"\t"} if name == "tsv" else set())
    assert "日本語" in text


@pytest.mark.parametrize("name", FORMATS)
def test_empty_report(name):
    module = sys.modules[f"headscope.reports.{name}"]
    data = module.render(report([]))
    assert data == b"" if name == "jsonl" else data
