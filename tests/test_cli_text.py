"""What the command line says: long values cut, narrow terminals, colour on demand, and Ctrl-C in its first moment."""

import os
import re

import pytest
from checkpoints import bert, command, refused
from rich.cells import cell_len
from test_cli_process import finish, start

from headscope.reports._cells import safe_line

LONG = "x" * 5000
SGR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def run(monkeypatch, capsysbinary):
    return command(monkeypatch, capsysbinary)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return bert(tmp_path_factory.mktemp("tiny"))


OPTIONS = ["format", "batch-size", "limit", "dtype", "device", "task", "by", "measures", "columns", "sort", "top"]
OPTIONS += ["seed", "draws", "tokens", "attn-implementation", "output", "plot"]
VALUES = {"x": LONG, "digits": "9" * 5000, "escapes": "\x1b[31m" * 1000, "words": "é " * 2500}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("value", VALUES)
def test_long_values_are_cut(run, option, value):
    ran = run("inspect", "m", f"--{option}", VALUES[value])
    assert ran.code in (1, 2) and ran.out == ""
    first, *more = ran.err.splitlines()
    assert len(first) < 600 and len(more) <= 1
    assert first.startswith("error: ") and "\x1b" not in ran.err


REASONS = [
    (["inspect", "m", "--batch-size", LONG], ["--batch-size xxx", "[...]", "expected a positive whole number"]),
    (["inspect", LONG], ["xxx", "[...]"]),
    (["inspect", "m", f"--{LONG}"], ["No such option: --xxx", "[...]"]),
    ([LONG], ["No such command 'xxx", "[...]"]),
    (["explain", LONG], ["no column 'xxx", "[...]", "importance"]),
    (["prune", "m", "--heads", "0.0", "-o", "x", "--max-shard-size", LONG], ["expected a size such as 5GB"]),
    (["prune", "m", "--heads", "0.0", "-o", "x", "--min-heads", "9" * 5000], ["expected 0 or a positive"]),
]


@pytest.mark.parametrize(("words", "parts"), REASONS, ids=map(str, range(len(REASONS))))
def test_the_reason_stays_where_a_value_is_cut(run, words, parts):
    ran = run(*words)
    for part in parts:
        assert part in ran.err
    assert ran.code in (1, 2) and len(ran.err.splitlines()[0]) < 600


def test_a_line_that_is_short_enough_is_whole():
    assert safe_line("a" * 500) == "a" * 500
    assert safe_line("a" * 300 + "b" * 300) == "a" * 300 + "b" * 34 + " [...] " + "b" * 166
    assert safe_line("\x1b" * 20, 30) == r"\x1b" * 5 + " [...] " + (r"\x1b" * 3)[-10:]


def test_a_long_name_of_a_folder_stands_whole_in_a_hint(run, tmp_path):
    folder = tmp_path / ("n" * 200) / ("m" * 200)
    assert refused(run("inspect", "m", "-o", folder / "x.csv"), 1, f"hint: mkdir -p {folder}\n")


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize(
    "line", ["inspect", "inspect --by layer", "inspect --check", "similarity", "prune --heads 0.0 --dry-run"]
)
def test_tables_fit_narrow_terminals(run, tiny, monkeypatch, width, line):
    monkeypatch.setenv("COLUMNS", str(width))
    name, *words = line.split()
    ran = run(name, tiny, *words, "--format", "table")
    assert ran.code == 0
    assert max(cell_len(shown) for shown in ran.out.splitlines()) <= width
    assert "encoder" in ran.out and "\x1b" not in ran.out


def test_colour_on_demand_is_only_ours(run, tiny, monkeypatch):
    """FORCE_COLOR adds colours and nothing else; NO_COLOR goes before it; other formats have none."""
    plain = run("inspect", tiny, "--format", "table").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run("inspect", tiny, "--format", "table").out
    assert "\x1b" not in plain and "\x1b" in coloured
    assert SGR.sub("", coloured) == plain
    assert "\x1b" not in run("inspect", tiny).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("inspect", tiny, "--format", "table").out == plain


INTERRUPT = """
import atexit, os, signal, sys
where = {where!r}
class Now:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Now())
if where == 'the end':
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("where", ["headscope.cli", "typer", "headscope.cli.prune", "headscope.survey", "the end"])
def test_interrupts_before_and_after_the_work(where, tmp_path, tiny):
    """Ctrl-C while the command line itself is loaded, and while Python leaves: one line at most, and no traceback."""
    code, out, err = finish(start("inspect", tiny, "--by", "model", env=_interrupted(where, tmp_path)))
    assert (code, err) == (130, b"error: interrupted\n")
    assert bool(out) is (where == "the end")


@pytest.mark.parametrize(("rank", "told"), [("0", b"error: interrupted\n"), ("1", b"")])
def test_of_several_processes_rank_0_tells_an_interrupt(rank, told, tmp_path, tiny):
    ranks = {"RANK": rank, "WORLD_SIZE": "2"}
    assert finish(start("inspect", tiny, env=_interrupted("typer", tmp_path) | ranks)) == (130, b"", told)


def _interrupted(where, folder):
    """The environment of a process that is interrupted when it imports `where`."""
    (folder / "sitecustomize.py").write_text(INTERRUPT.format(where=where))
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
