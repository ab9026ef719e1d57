import csv
import gzip
import hashlib
import io
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headscope import sources
from headscope.errors import DataError, HeadscopeError, UsageError
from headscope.sources import read

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def zstd(content):
    return pa.compress(content, "zstd", asbytes=True)


def test_text_lines_end_at_lf_and_crlf_only(write):
    path = write("a.txt", "\ufeffone\u2028still one\r\n\r\n two \x85\x0c two\rtwo\n  \nlast")
    rows = read(path)
    assert rows.rows == [{"text": "one\u2028still one"}, {"text": " two \x85\x0c two\rtwo"}, {"text": "last"}]
    assert rows.numbers == [1, 3, 5]
    assert rows.columns == ["text"] and rows.name == path and rows.skipped == 0
    with open(path, "rb") as file:
        assert rows.digest == hashlib.sha256(file.read()).hexdigest()


def test_csv_numbers_text_columns_and_quoted_newlines(write):
    path = write(
        "a.csv",
        'text,label,score,code,empty,tens\n12,1,0.5,007,,1_0\n"a\nb, ""c""",-3,,010,,20\n\n"\u2028",0,nan,1,,30\n',
    )
    rows = read(path)
    assert [row["text"] for row in rows.rows] == ["12", 'a\nb, "c"', "\u2028"]
    assert [row["label"] for row in rows.rows] == [1, -3, 0]
    assert str([row["score"] for row in rows.rows]) == "[0.5, None, nan]"
    assert [row["code"] for row in rows.rows] == ["007", "010", "1"]
    assert [row["empty"] for row in rows.rows] == [None, None, None]
    assert [row["tens"] for row in rows.rows] == ["1_0", "20", "30"]
    assert rows.numbers == [2, 3, 6]
    assert all(type(row["label"]) is int for row in rows.rows)


def test_a_line_below_a_quoted_newline_keeps_its_number(write):
    with pytest.raises(DataError, match=r"a\.tsv line 4: 3 cells, but the header has 2$"):
        read(write("a.tsv", 'text\tlabel\n"a\nb"\t1\nc\t2\t3\n'))


def test_long_cells_are_read_and_the_limit_is_put_back(write):
    before = csv.field_size_limit()
    assert len(read(write("a.csv", "text,label\n" + "x" * (before + 1) + ",1\n")).rows[0]["text"]) == before + 1
    assert csv.field_size_limit() == before


def test_short_csv_rows_are_filled_up_with_a_note(write):
    rows = read(write("a.csv", "text,label\na\nb,1\n"))
    assert rows.rows == [{"text": "a", "label": None}, {"text": "b", "label": 1}]
    assert rows.notes == ["1 rows have fewer cells than the header; the rest of each is empty"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text;label\na;1\n", "line 1: one column named 'text;label': is the separator ;?"),
        ("a.csv", "text\tlabel\na\t1\n", r"line 1: one column named 'text\tlabel': is the separator TAB?"),
        ("a.tsv", "text,label\na,1\n", "line 1: one column named 'text,label': is the separator ,?"),
        ("a.csv", "a,b, a\n1,2,3\n", "line 1: more than one column named 'a'"),
        ("a.csv", 'a,b\n1,"2\n3,4\n', "line 2: the cells cannot be told apart: unexpected end of data"),
        ("a.csv", 'a,b\n"1\r2",3\n4\r5,6\n', "line 3: the cells cannot be told apart: new-line character"),
        ("a.csv", '"a\n', "line 1: the header cannot be read: unexpected end of data"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "line 2: a list, but an object is expected"),
        ("a.jsonl", '\n{"a": null}\n{"a": "x"}\n{"a": 1}\n', "line 4: field 'a' is a number here, but text in line 3"),
        ("a.jsonl", '{"a": 1}\n{"a": true}', "line 2: field 'a' is true or false here, but a number in line 1"),
        ("a.jsonl", '{"a": "\\ud800"}', "line 1: half of a surrogate pair, which is not a character"),
        ("a.json", '[{"a": 1}, {"a": "x"}]', "row 2: field 'a' is text here, but a number in row 1"),
        ("a.json", '[\n{"a": 1},\nx', "line 3: not JSON (Expecting value at character 1): x"),
        ("a.json", '{"a": 1}\n{"a": 2}', 'line 2: not JSON (Extra data at character 1): {"a": 2}'),
        ("a.json", "3", ": a number, but an array of objects is expected"),
        ("a.json", '{"a": 3}', ": one object, but an array of objects is expected"),
        ("a.json", '{"a": [1], "b": [1, 2]}', ": lists of different lengths: 'a' 1, 'b' 2"),
        ("a.json", '{"train": [{}], "test": [{}]}', ": several arrays of objects: 'train', 'test'"),
        ("a.json", "[" * 100_000, ": not JSON (nested too deep)"),
        ("a.txt", "a\nb\0\n", "line 2: a NUL character, so this is not a text file"),
        ("a.txt", b"abc\xe9\n", ": not utf-8 at byte 3, use --encoding"),
        ("a.csv", "text\nä".encode("utf-16"), ": not utf-8 at byte 0, use --encoding utf-16"),
        ("a.txt", "ä".encode("utf-32"), ": not utf-8 at byte 0, use --encoding utf-32"),
        ("a.xlsx", "x", ": a .xlsx file cannot be read"),
        ("a", "x", ": a file without suffix cannot be read"),
        ("a.gz", b"x", ": a file without suffix cannot be read"),
        ("a.txt.gz", b"x", ": not a whole .gz file: Not a gzipped file (b'x')"),
        ("a.txt.gz", gzip.compress(b"abc" * 99, mtime=0)[:-9], ": not a whole .gz file: Compressed file ended before"),
        ("a.txt.zst", zstd(b"abc" * 99)[:-3], ": not a whole .zst file: "),
        ("a.parquet", b"PAR1 and no more", ": not a whole Parquet file: "),
    ],
)
def test_faults_are_told_with_their_place(write, name, content, message):
    path = write(name, content)
    with pytest.raises(DataError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path} {message}" if message.startswith(("line", "row")) else path + message)
    assert "\n" not in text


BLANKS = [
    (name, blank) for name in ("a.txt", "a.csv", "a.tsv", "a.jsonl", "a.json") for blank in ("", "\n \r\n\n", "\ufeff")
]
HOLLOW = [("a.csv", "text,label\n"), ("a.tsv", "text\n\n"), ("a.json", "[]"), ("a.json", "{}"), ("a.json", '{"a": []}')]


@pytest.mark.parametrize(("name", "content"), [*BLANKS, *HOLLOW, ("a.jsonl", "{}"), ("a.parquet", "")])
def test_nothing_inside_is_no_examples(write, name, content):
    with pytest.raises(DataError, match=r"^no examples in .*/" + name.replace(".", r"\.") + "$"):
        read(write(name, content))


def test_parquet_without_rows_is_no_examples(write):
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), sink)
    with pytest.raises(DataError, match="^no examples in"):
        read(write("a.parquet", sink.getvalue()))


def test_broken_json_line_shows_80_characters_escaped(write):
    path = write("a.jsonl", '{"a": 1}\n{"a": \x1b[31m\u202e' + "x" * 100 + "\n")
    with pytest.raises(DataError) as caught:
        read(path)
    text = str(caught.value)
    assert text == (rf'{path} line 2: not JSON (Expecting value at character 7): {{"a": \x1b[31m\u202e' + "x" * 68)
    assert caught.value.hint == "--skip-bad leaves such rows out"


def test_skip_bad_counts_and_notes(write):
    path = write("a.jsonl", '{"a": 1}\nx\n[]\n{"a": "s"}\n{"b": 2}\n')
    rows = read(path, skip_bad=True)
    assert rows.rows == [{"a": 1, "b": None}, {"a": None, "b": 2}]
    assert (rows.columns, rows.numbers, rows.skipped) == (["a", "b"], [1, 5], 3)
    assert rows.notes == [f"3 bad rows skipped; the first: {path} line 2: not JSON (Expecting value at character 1): x"]
    assert read(write("a.csv", 'a,b\n1,2\n1,2,3\n1,"2"x\n3,4'), skip_bad=True).numbers == [2, 5]
    with pytest.raises(DataError, match="no examples in") as caught:
        read(write("b.jsonl", "x\ny\n"), skip_bad=True)
    assert caught.value.hint.startswith("all 2 rows are bad; the first: ")


def test_encodings(write):
    assert read(write("a.txt", "ä".encode("latin-1")), encoding="latin-1").rows == [{"text": "ä"}]
    assert read(write("b.txt", "ä\r\nö".encode("utf-16")), encoding="UTF-16").rows == [{"text": "ä"}, {"text": "ö"}]
    assert read(write("c.txt", "\ufeffä".encode("utf-16-le")), encoding="utf-16-le").rows == [{"text": "ä"}]
    with pytest.raises(UsageError, match="--encoding 'utf8-16' is not known") as caught:
        read(write("d.txt", "a"), encoding="utf8-16")
    assert caught.value.hint.startswith("did you mean 'utf-16'?")
    with pytest.raises(UsageError, match="--encoding 'hex' is not for text"):
        read(write("d.txt", "a"), encoding="hex")


def test_json_documents(write):
    expected = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    texts = [expected, {"version": "1", "data": expected}, {"data": expected}, {"a": [1, 2], "b": ["x", "y"]}]
    for text in texts:
        rows = read(write("a.json", json.dumps(text)))
        assert (rows.rows, rows.columns, rows.numbers) == (expected, ["a", "b"], [1, 2])


def test_parquet_keeps_lists_structs_and_image_bytes(write):
    rows = [{"tokens": ["a", "b"], "image": {"bytes": b"\x89PNG", "path": None}, "n": {"x": [1.5]}, "label": 1}]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    for name, content in (("a.parquet", sink.getvalue()), ("A.PARQUET.GZ", gzip.compress(sink.getvalue()))):
        found = read(write(name, content))
        assert (found.rows, found.columns, found.numbers) == (rows, list(rows[0]), [1])
    with pytest.raises(DataError, match="not a whole Parquet file"):
        read(write("b.parquet", sink.getvalue()[:-20]))


def test_missing_files_and_what_is_near(write, tmp_path):
    write("train.csv", "x")
    with pytest.raises(DataError, match=r"^no such file: .*/tran\.csv$") as caught:
        read(str(tmp_path / "tran.csv"))
    assert caught.value.hint == f"did you mean {tmp_path}/train.csv?"
    with pytest.raises(DataError) as caught:
        read(str(tmp_path / "zzzzzzzz.jsonl.gz"))
    assert caught.value.hint == "data files there: train.csv"
    with pytest.raises(DataError, match=r"\\x0a.*: there is no folder .*/no\\x0a$"):
        read(str(tmp_path / "no\n" / "a.csv"))
    with pytest.raises(DataError, match="no such file"):
        read(str(tmp_path / "train.csv" / "x"))


@pytest.mark.parametrize(
    "data",
    [
        "./imdb",
        "/imdb",
        "a/b/c",
        "x.csv",
        "owner/x.parquet",
        "x.txt.gz",
        "x.zip",
        "a\\b",
        "~/x",
        "../x",
        "a/",
        "a\0b",
        "é",
    ]
    + ["https://host/x"],
)
def test_what_looks_like_a_path_is_never_sent_to_the_hub(monkeypatch, tmp_path, data):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "hub_rows", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(DataError, match="^no such file"):
        read(data)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files(write, tmp_path):
    path = write("a.txt", "x")
    os.chmod(path, 0)
    with pytest.raises(DataError, match="^cannot read .*: Permission denied"):
        read(path)


def test_open_failures_are_told(write, monkeypatch):
    path = write("a.txt", "x")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match="^cannot read .*/a.txt: Permission denied$"):
        read(path)
    with pytest.raises(DataError, match="File name too long"):
        read("/" + "a" * 5000 + ".csv")


def test_stdin(monkeypatch):
    rows = read("-", stdin=io.BytesIO(b'\r\n {"a": 1}\n{"a": 2}\n'))
    assert (rows.rows, rows.numbers, rows.name) == ([{"a": 1}, {"a": 2}], [2, 3], "-")
    assert read("-", stdin=io.BytesIO(b"a\n{\n")).rows == [{"text": "a"}, {"text": "{"}]
    with pytest.raises(DataError, match="^stdin line 1: not JSON"):
        read("-", stdin=io.BytesIO(b"{"))
    with pytest.raises(DataError, match="^no examples in stdin$"):
        read("-", stdin=io.BytesIO(b"\n"))
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(DataError, match="stdin is closed"):
        read("-")


@SHARED
@given(
    content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode),
    name=st.sampled_from([f"a.{one}{end}" for one in sources.SUFFIXES for end in ("", ".gz", ".zst")]),
    skip_bad=st.booleans(),
    packed=st.booleans(),
)
def test_any_bytes_give_rows_or_our_own_error(write, content, name, skip_bad, packed):
    if packed:
        content = (
            gzip.compress(content) if name.endswith(".gz") else zstd(content) if name.endswith(".zst") else content
        )
    try:
        rows = read(write(name, content), skip_bad=skip_bad)
    except HeadscopeError as error:
        assert str(error).isprintable()
    else:
        assert len(rows.rows) == len(rows.numbers) > 0
        assert all(list(row) == rows.columns for row in rows.rows)


@SHARED
@given(st.lists(st.tuples(st.text(st.characters(exclude_characters="\0", codec="utf-8")), st.integers()), min_size=1))
def test_rows_come_back_as_written(write, pairs):
    rows = [{"text": text or None, "label": label} for text, label in pairs]
    assert read(write("a.jsonl", "\n".join(map(json.dumps, rows)))).rows == rows
    assert read(write("b.jsonl", "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows))).rows == rows
    for name, dialect in (("a.csv", "excel"), ("a.tsv", "excel-tab")):
        sink = io.StringIO(newline="")
        writer = csv.writer(sink, dialect)
        writer.writerows([("text", "label"), *pairs])
        assert read(write(name, sink.getvalue())).rows == rows
