"""Scores come back from every report that `inspect` writes, bit for bit, and only for exactly the model's heads."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headscope import registry
from headscope.columns import Column
from headscope.errors import DataError, HeadscopeError, UsageError
from headscope.heads import AttentionKind, HeadId, SiteId
from headscope.inspection import HEAD_COLUMNS
from headscope.score_files import read_scores
from headscope.tables import Cell, Table

HEADS = [HeadId(SiteId("encoder", AttentionKind.SELF, layer), number) for layer in range(2) for number in (0, 2, 3)]
VALUES = [0.1, -1e-300, 5e-324, 1.7976931348623157e308, 1 / 3, 0.0]
MEASURES = (
    Column("importance", "loss", "made up"),
    Column("effect", "nats", "made up"),
    Column("role", "name", "made up"),
    Column("entropy", "nats", "measured for some heads only"),
)


def report(heads: list[HeadId] = HEADS) -> Table:
    rows: list[dict[str, Cell]] = []
    for head, value in zip(heads, VALUES, strict=False):
        row: dict[str, Cell] = {column.name: None for column in HEAD_COLUMNS}
        row |= {"head": str(head), "stack": "encoder", "kind": "self", "layer": head.site.layer, "index": head.index}
        row |= {"parameters": 7, "flags": "dead" if value == 0 else ""}
        row |= {"importance": value, "effect": -value, "role": "previous", "entropy": 1.5 if head.index else None}
        rows.append(row)
    return Table("inspect", (*HEAD_COLUMNS, *MEASURES), tuple(rows), "head")


def written(folder: Path, suffix: str, table: Table | None = None) -> Path:
    path = folder / f"scores.{suffix}"
    path.write_bytes(registry.load("reports", suffix, "render")(table or report()))
    return path


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_every_report_gives_its_scores_back(suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path, suffix)
    assert read_scores(path, "importance", HEADS) == dict(zip(HEADS, VALUES, strict=True))
    assert read_scores(path, "effect", list(reversed(HEADS))) == {
        head: -value for head, value in zip(HEADS, VALUES, strict=True)
    }
    assert read_scores(path, "parameters", HEADS) == dict.fromkeys(HEADS, 7.0)


def test_packed_and_marked_files(tmp_path: Path) -> None:
    raw = written(tmp_path, "csv").read_bytes()
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "marked.csv").write_bytes(b"\xef\xbb\xbf" + raw.replace(b"\n", b"\r\n"))
    for name in ("packed.csv.gz", "marked.csv"):
        assert read_scores(tmp_path / name, "importance", HEADS) == dict(zip(HEADS, VALUES, strict=True))


def test_rows_in_another_order_with_other_columns(tmp_path: Path) -> None:
    table = report().sorted("importance").select(["importance", "head"])
    for suffix in ("csv", "json", "parquet"):
        path = written(tmp_path, suffix, table)
        assert read_scores(path, "importance", HEADS) == dict(zip(HEADS, VALUES, strict=True))


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_a_wrong_column_names_the_nearest(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no column 'importence' in ") as caught:
        read_scores(written(tmp_path, suffix), "importence", HEADS)
    assert caught.value.hint is not None and caught.value.hint.startswith("did you mean 'importance'?")


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("column", "message"),
    [("role", "role of encoder.self.0.0 is 'previous', not a finite number"),
     ("entropy", "entropy of encoder.self.0.0 is empty")],
)  # fmt: skip
def test_a_column_without_numbers(suffix: str, column: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_scores(written(tmp_path, suffix), column, HEADS)
    assert message in str(caught.value)


def test_other_heads_than_the_models(tmp_path: Path) -> None:
    path = written(tmp_path, "csv")
    with pytest.raises(DataError, match=r"line 4: this model has no head 'encoder\.self\.0\.3'") as caught:
        read_scores(path, "importance", HEADS[:2])
    assert caught.value.hint is not None and "of this model" in caught.value.hint
    more = [*HEADS, *(HeadId(SiteId("encoder", AttentionKind.SELF, 2), number) for number in range(5))]
    with pytest.raises(DataError, match=r"no row for encoder.self.2.0, encoder.self.2.1, encoder.self.2.2 and 2 more"):
        read_scores(path, "importance", more)
    with pytest.raises(DataError, match=r"no row for encoder\.self\.1\.3$"):
        read_scores(written(tmp_path, "json", report(HEADS[:-1])), "importance", HEADS)
    with pytest.raises(DataError, match=r"row 6: encoder\.self\.0\.0 for the second time"):
        read_scores(written(tmp_path, "json", report([*HEADS[:-1], HEADS[0]])), "importance", HEADS)


def lines(*cells: str) -> bytes:
    rows = [f"{head},{cell}\n" for head, cell in zip(HEADS, (*cells, *["1"] * 6), strict=False)]
    return ("head,importance\n" + "".join(rows)).encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", lines("nan"), "line 2: importance of encoder.self.0.0 is nan, not a finite number"),
        ("a.csv", lines("1", "-inf"), "line 3: importance of encoder.self.0.2 is -inf, not a finite number"),
        ("a.csv", lines("1", "1e999"), "is inf, not a finite number"),
        ("a.csv", lines("1", "9" * 400), "999, not a finite number"),
        ("a.csv", lines("1", "1_0"), "importance of encoder.self.0.2 is '1_0', not a finite number"),
        ("a.csv", lines("1", "٣"), "is '٣', not a finite number"),
        ("a.csv", lines("1", "true"), "is 'true', not a finite number"),
        ("a.csv", lines("1", "\x1b[31m"), "is '\\x1b[31m', not a finite number"),
        ("a.csv", lines("1", ""), "line 3: importance of encoder.self.0.2 is empty"),
        ("a.json", b'[{"head": "encoder.self.0.0", "importance": true}]', "is True, not a finite number"),
        ("a.json", b'[{"head": "encoder.self.0.0", "importance": NaN}]', "is nan, not a finite number"),
        ("a.json", b'[{"head": "encoder.self.0.0", "importance": [1]}]', "is [1], not a finite number"),
        ("a.json", b'[{"head": 3, "importance": 1}]', "this model has no head 3"),
        ("a.json", b'[{"head": null, "importance": 1}]', "this model has no head None"),
        ("a.json", b'{"head": 1}', "one object, but an array of objects is expected"),
        ("a.jsonl", b'{"head": "x"\n', "line 1: not JSON"),
        ("a.csv", b"site,importance\nencoder.self.0,1\n", "no column 'head', so these are no scores of heads"),
        ("a.csv", b"head,importance\n", "no rows"),
        ("a.csv", b"", "no rows"),
        ("a.json", b"", "no rows"),
        ("a.csv", b"head,head\nx,y\n", "more than one column named 'head'"),
        ("a.csv", b"head;importance\nx;1\n", "is the separator ;?"),
        ("a.csv", b"head,importance\nx,1,2\n", "line 2: 3 cells, but the header has 2"),
        ("a.csv", b"head,importance\n\xff,1\n", "not UTF-8 text at byte 16"),
        ("a.csv.gz", b"head", "not a whole .gz file"),
        ("a.parquet", b"PAR1", "not a whole Parquet file"),
        ("a.html", b"<p>", "not a report that can be read back"),
        ("a.txt", b"words", "not a report that can be read back"),
        ("scores", b"head,importance\n", "not a report that can be read back"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_scores(tmp_path / name, "importance", HEADS)
    assert message in str(caught.value)
    assert str(caught.value).isprintable() and str(tmp_path) in str(caught.value)
    assert "--skip-bad" not in (caught.value.hint or "")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    for path, message in (
        (tmp_path / "absent.csv", "No such file"),
        (tmp_path / "folder.csv", "not a regular file"),
        (tmp_path / ("x" * 300 + ".csv"), "File name too long"),
    ):
        with pytest.raises(DataError, match=message):
            read_scores(path, "importance", HEADS)


@given(content=st.binary(max_size=80), start=st.sampled_from([b"", b"head,importance\n", b'[{"head":', b"PAR1"]))
def test_no_bytes_get_through(content: bytes, start: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    for suffix in ("csv", "tsv", "json", "jsonl", "parquet", "csv.gz", "csv.zst"):
        path = tmp_path_factory.getbasetemp() / f"scores.{suffix}"
        path.write_bytes(start + content)
        with pytest.raises(HeadscopeError) as caught:
            read_scores(path, "importance", HEADS)
        assert "\n" not in str(caught.value)
