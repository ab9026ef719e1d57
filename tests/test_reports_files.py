"""Report output: the format's choice, colour, standard output, and files that are whole or absent."""

import hashlib
import io
import json
import os
import stat
import subprocess
import sys

import pytest
from report_samples import device, report

from headscope.errors import OutputError, UsageError
from headscope.reports import FORMATS, check_output, check_report, choose_format, emit, use_color, write_file
from headscope.reports import csv as csv_format
from headscope.reports import json as json_format
from headscope.reports import parquet as parquet_format


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("a.csv", "csv"),
        ("a.TSV", "tsv"),
        ("a.json", "json"),
        ("a.jsonl", "jsonl"),
        ("a.md", "markdown"),
        ("a.markdown", "markdown"),
        ("a.parquet", "parquet"),
        ("a.html", "html"),
        ("a.htm", "html"),
        ("a.txt", "table"),
    ],
)
def test_format_by_suffix(tmp_path, name, chosen):
    assert choose_format("auto", tmp_path / name, True) == chosen
    assert choose_format("json", tmp_path / name, True) == "json"


def test_format_by_terminal():
    assert choose_format("auto", None, True) == "table"
    assert choose_format("auto", None, False) == "csv"


@pytest.mark.parametrize("name", ["a.xlsx", "a"])
def test_unknown_suffix(tmp_path, name):
    with pytest.raises(UsageError) as caught:
        choose_format("auto", tmp_path / name, True)
    assert ".parquet" in caught.value.hint


def test_unknown_format():
    with pytest.raises(UsageError, match="unknown format 'jsn'") as caught:
        choose_format("jsn", None, True)
    assert "did you mean 'json'?" in caught.value.hint


class Terminal(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8")

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environment", "terminal", "pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
    ],
)
def test_use_color(environment, terminal, pipe, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert use_color(Terminal()) is terminal
    assert use_color(io.StringIO()) is pipe


def test_terminal_gets_a_coloured_table_and_no_parquet(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    emit(report(["x"]))
    assert stream.buffer.getvalue().startswith(b"\x1b[1mhead")
    with pytest.raises(UsageError, match="binary"):
        emit(report(["x"]), format="parquet")


def test_parquet_goes_through_a_pipe(capsysbinary):
    emit(report(["x"]), format="parquet")
    assert capsysbinary.readouterr().out == parquet_format.render(report(["x"]))


def test_pipe_gets_csv_and_a_stream_without_buffer_too(monkeypatch, capsysbinary):
    emit(report(["x"]))
    assert capsysbinary.readouterr().out == csv_format.render(report(["x"]))
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    emit(report(["é"]))
    assert text.getvalue().encode() == csv_format.render(report(["é"]))


@pytest.mark.parametrize("name", FORMATS)
def test_file_holds_what_the_format_renders(name, tmp_path):
    path = tmp_path / "out"
    emit(report(["x"]), format=name, output=path)
    assert path.read_bytes() == sys.modules[f"headscope.reports.{name}"].render(report(["x"]))
    if name in ("html", "json", "markdown"):
        assert os.listdir(tmp_path) == ["out"], "these hold what they rest on themselves"
        return
    assert sorted(os.listdir(tmp_path)) == ["out", "out.json"]
    side = json.loads((tmp_path / "out.json").read_text())
    whole = json.loads(json_format.render(report(["x"])))
    whole.pop("rows")
    assert side == whole | {"file": "out", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert side["provenance"]["revision"] == "abc" and side["provenance"]["truncated"] == 3


def test_a_report_and_its_side_file_are_written_together(tmp_path, monkeypatch):
    """An old side file is only replaced with force, and where the disk fills up both files stay as they were."""
    path, side = tmp_path / "a.csv", tmp_path / "a.csv.json"
    side.write_text("old")
    for attempt in (lambda: emit(report(), output=path), lambda: check_report("auto", path)):
        with pytest.raises(UsageError, match=r"a\.csv\.json exists already") as caught:
            attempt()
        assert "--force" in caught.value.hint
    assert os.listdir(tmp_path) == ["a.csv.json"]
    path.write_text("old")
    real, synced = os.fsync, []

    def full(descriptor):
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"cannot write .*a\.csv\.json: No space left on device$"):
        emit(report(), output=path, force=True)
    assert {name: (tmp_path / name).read_text() for name in os.listdir(tmp_path)} == {"a.csv": "old", side.name: "old"}
    monkeypatch.undo()
    emit(report(["x"]), output=path, force=True)
    assert path.read_bytes() == csv_format.render(report(["x"]))
    assert json.loads(side.read_text())["file"] == "a.csv"


def test_existing_file_only_with_force(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")
    for attempt in (lambda: emit(report(), output=path), lambda: check_output(path, False)):
        with pytest.raises(UsageError, match="exists already") as caught:
            attempt()
        assert "--force" in caught.value.hint
    assert path.read_text() == "old"
    emit(report(["x"]), output=path, force=True)
    assert path.read_bytes() == csv_format.render(report(["x"]))


def test_missing_parent_and_folder_as_file(tmp_path):
    with pytest.raises(OutputError, match="does not exist"):
        emit(report(), output=tmp_path / "no" / "a.csv")
    with pytest.raises(OutputError, match="does not exist"):
        check_output(tmp_path / "no" / "a.csv", True)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is not a folder"):
        check_output(tmp_path / "file" / "a.csv", False)
    with pytest.raises(UsageError, match="is a folder"):
        emit(report(), format="csv", output=tmp_path, force=True)


def test_folder_that_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match="is not writable"):
        check_output(tmp_path / "a.csv", False)


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.csv"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"cannot write .*a\.csv: No space left on device$"):
        write_file(path, b"new", True)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.csv"]


def test_interrupt_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "a.csv", b"new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_mode_follows_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        emit(report(["x"]), output=tmp_path / "a.csv")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.csv").stat().st_mode) == mode


def test_link_is_followed(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "a.csv"
    link.symlink_to(tmp_path / "there" / "b.csv")
    emit(report(["x"]), output=link)
    assert link.is_symlink()
    assert (tmp_path / "there" / "b.csv").read_bytes() == csv_format.render(report(["x"]))


def test_device_is_written_to_and_stays():
    null = os.stat(os.devnull)
    emit(report(["x"]), format="csv", output=device("/dev/null"))
    assert os.stat(os.devnull).st_ino == null.st_ino
    with pytest.raises(OutputError, match="No space left"):
        emit(report(["x"]), format="csv", output=device("/dev/full"))


CHILD = """
import sys
from headscope.columns import Column
from headscope.errors import OutputError
from headscope.reports import emit
from headscope.tables import Table
try:
    emit(Table("t", (Column("x", "", ""),), tuple({"x": "y" * 50} for _ in range(COUNT))))
except OutputError as error:
    sys.stderr.write(f"error: {error}")
    sys.exit(1)
assert not {"pandas", "rich", "torch", "matplotlib", "jinja2"} & set(sys.modules)
"""


def emit_in_child(count, stdout, unbuffered=""):
    child = [sys.executable, "-c", CHILD.replace("COUNT", str(count))]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(child, stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("count", [1, 5000])
def test_full_standard_output_is_one_error(count, unbuffered):
    with device("/dev/full").open("wb") as full:
        done = emit_in_child(count, full, unbuffered)
    assert done.stderr == b"error: cannot write to standard output: No space left on device"
    assert done.returncode == 1


def test_csv_imports_nothing_heavy():
    done = emit_in_child(3, subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"x\n" + b"".join(b"y" * 50 + b"\n" for _ in range(3))


def test_a_partial_write_is_continued(monkeypatch):
    class Slow(io.BytesIO):
        def write(self, data):
            return super().write(data[:7])

    slow = Slow()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(slow, encoding="utf-8"))
    emit(report(["x"]))
    assert slow.getvalue() == csv_format.render(report(["x"]))


def test_broken_pipe_is_left_to_the_caller(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(BrokenPipeError):
        emit(report())
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())  # so that what is still buffered can be let go
    stream.close()


def test_closed_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputError, match="standard output: it is closed"):
        emit(report())
