"""The command line: wrong use is refused at once with exit 2, data goes to stdout, never a traceback."""

import csv
import io
import json

import pandas
import pytest
from checkpoints import bert, command, llama, refused
from conftest import SAMPLES

from headscope.reports import FORMATS

SENTIMENT, DIGITS = SAMPLES / "sentiment-minilm", SAMPLES / "vit-digits"
FEW = ("--data", DIGITS / "dev.csv", "--limit", "12", "--measures", "importance")
HEAD_COLUMNS = "head,stack,kind,layer,index,kv_head,shared_with,parameters,flags"


@pytest.fixture
def run(monkeypatch, capsysbinary):
    return command(monkeypatch, capsysbinary)


@pytest.fixture
def unloaded(monkeypatch):
    """No model may be opened."""
    monkeypatch.setattr("headscope.study.load", None)
    monkeypatch.setattr("headscope.checks.load", None)
    monkeypatch.setattr("headscope.survey.read_config", None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return bert(tmp_path_factory.mktemp("tiny"))


MISUSE = [
    (["inspct", "gpt2"], ["No such command 'inspct'", "did you mean 'inspect'?"]),
    (["inspect", "m", "--fromat", "csv"], ["--fromat", "did you mean '--format'?"]),
    (["inspect"], ["Missing argument 'MODEL'", "headscope inspect --help"]),
    (["inspect", "m", "extra"], ["extra"]),
    (["inspect", "m", "--format", "xml"], ["--format xml", "html", "csv, html, json, jsonl, markdown, parquet, table"]),
    (["inspect", "m", "-o", "x.xyz"], ["no format has suffix '.xyz'", ".parquet"]),
    (["inspect", "m", "-o", "x"], ["no format has a name without suffix"]),
    *[
        (["inspect", "m", "--batch-size", value], [f"--batch-size {value}: expected a positive whole number or 'auto'"])
        for value in ("0", "-3", "2.5", "many", "", "٣")
    ],
    (["inspect", "m", "--limit", "0"], ["--limit 0: expected a positive whole number or 'all'"]),
    (["inspect", "m", "--top", "0"], ["--top 0: expected a positive whole number"]),
    (["inspect", "m", "--draws", "x"], ["--draws x: expected a positive whole number"]),
    (["inspect", "m", "--tokens", "-1"], ["--tokens -1: expected a positive whole number"]),
    (["inspect", "m", "--max-length", "0", "--data", "d.txt"], ["--max-length 0"]),
    (["inspect", "m", "--seed", "x"], ["--seed"]),
    (["inspect", "m", "--seed", "-1"], ["--seed -1: expected 0 or more"]),
    (["inspect", "m", "--dtype", "float17"], ["did you mean 'float16'?", "auto, float32, bfloat16, float16, float64"]),
    (["inspect", "m", "--on-long", "cut", "--data", "d.txt"], ["chunk, truncate, error"]),
    (["inspect", "m", "--task", "causal"], ["no such task", "did you mean 'causal-lm'?"]),
    (["inspect", "m", "--by", "heads"], ["did you mean 'head'?", "head, layer, model"]),
    (["inspect", "m", "--measures", "importence"], ["no measure 'importence'", "did you mean 'importance'?", "all"]),
    (["inspect", "m", "--measures", ","], ["--measures names none"]),
    (["inspect", "m", "--measures", "importance"], ["importance cannot be measured without data", "--data FILE"]),
    (["inspect", "m", "--measures", "all"], ["cannot be measured without data"]),
    (["inspect", "m", "--columns", ","], ["--columns names none"]),
    (["inspect", "m", "--columns", "head,lair"], ["no column 'lair'", "did you mean 'layer'?"]),
    (["inspect", "m", "--sort", "-importanse", "--data", "d.txt"], ["did you mean 'importance'?"]),
    (["inspect", "m", "--sort", "importance"], ["no column 'importance' in this report"]),
    (["inspect", "m", "--by", "layer", "--columns", "sit"], ["did you mean 'site'?"]),
    (["inspect", "m", "--by", "model", "--sort", "head"], ["did you mean 'heads'?"]),
    (["inspect", "m", "--check", "--columns", "state"], ["did you mean 'status'?"]),
    (["inspect", "m", "--structure", "--columns", "modul"], ["did you mean 'module'?"]),
    (["inspect", "m", "--check", "--structure"], ["two reports"]),
    (["inspect", "m", "--label-column", "y"], ["--label-column is about data", "--data FILE"]),
    (["inspect", "m", "--split", "test"], ["--split is about data"]),
    *[
        (["inspect", "m", "--plot", "x.png", *words], ["--plot draws heads or layers"])
        for words in (["--by", "model"], ["--check"], ["--structure"])
    ],
    (["inspect", "m", "--plot", "x.gif", *map(str, FEW)], [".gif"]),
    (["inspect", "m", "--plot", "x.svg", "-o", "x.svg", "--format", "csv"], ["are both x.svg"]),
    (["explain", "importence"], ["did you mean 'importance'?"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "parts"), MISUSE, ids=lambda value: " ".join(value)[:40])
def test_wrong_use_is_refused_before_a_model_is_opened(run, unloaded, words, parts):
    assert refused(run(*words), 2, *parts)


def test_outputs_that_cannot_be_written_are_refused_before_a_model_is_opened(run, unloaded, tmp_path):
    (tmp_path / "old.csv").write_text("old")
    (tmp_path / "old.png").write_text("old")
    assert refused(run("inspect", "m", "-o", tmp_path / "old.csv"), 2, "exists already", "--force")
    assert refused(run("inspect", "m", *FEW, "--plot", tmp_path / "old.png"), 2, "exists already", "--force")
    assert refused(run("inspect", "m", "-o", tmp_path / "none" / "x.csv"), 1, "does not exist", "mkdir -p")
    assert refused(run("inspect", "m", *FEW, "--plot", tmp_path / "none" / "x.png"), 1, "does not exist")
    assert refused(run("inspect", "m", "-o", tmp_path / "old.csv" / "x.csv"), 1, "is not a folder")
    assert (tmp_path / "old.csv").read_text() == "old"


def read_report(data, name):
    """Column names and the number of rows of a report."""
    text = data.decode() if name != "parquet" else ""
    if name in ("csv", "tsv"):
        rows = list(csv.reader(io.StringIO(text), delimiter="\t" if name == "tsv" else ","))
        return rows[0], len(rows) - 1
    if name == "parquet":
        frame = pandas.read_parquet(io.BytesIO(data))
        return list(frame.columns), len(frame)
    if name == "jsonl":
        rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
        return list(rows[0]), len(rows)
    if name == "json":
        rows = json.loads(text, parse_constant=pytest.fail)["rows"]
        return list(rows[0]), len(rows)
    marks = {"markdown": "encoder.self.", "html": ">encoder.self.", "table": "encoder.self."}
    labels = [line for line in text.splitlines() if marks[name] in line]
    return None, len(labels) // (3 if name == "table" else 1)  # 80 columns hold a third of the table


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_rows(run, tiny, tmp_path, name):
    suffix = {"markdown": "md", "table": "txt"}.get(name, name)
    file = tmp_path / f"report.{suffix}"
    ran = run("inspect", tiny, "--format", name, "-o", file)
    assert (ran.code, ran.out) == (0, "")
    names, rows = read_report(file.read_bytes(), name)
    assert rows == 10
    assert names is None or ",".join(names[:9]) == HEAD_COLUMNS
    once = file.read_bytes()
    assert refused(run("inspect", tiny, "--format", name, "-o", file), 2, "--force")
    assert run("inspect", tiny, "-o", file, "--force", *(["--format", name] if name == "table" else [])).code == 0
    assert file.read_bytes() == once
    if name != "parquet":
        assert run("inspect", tiny, "--format", name).out == once.decode()
    beside = [] if name in ("json", "html", "markdown") else [f"{file.name}.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, *beside]


def test_shape_of_a_report(run, tiny):
    plain = run("inspect", tiny)
    assert plain.out.splitlines()[0].startswith(HEAD_COLUMNS)
    assert plain.err == "BertForSequenceClassification: 10 heads in 2 sites, task text-classification\n"
    by_norm = run("inspect", tiny, "--sort", "query_norm", "--top", "3", "--columns", "query_norm,head").rows
    norms = [float(row[0]) for row in by_norm[1:]]
    assert by_norm[0] == ["query_norm", "head"]
    everything = [float(row[plain.rows[0].index("query_norm")]) for row in plain.rows[1:]]
    assert norms == sorted(everything, reverse=True)[:3]
    smallest = run("inspect", tiny, "--sort", "-query_norm", "--top", "1", "--columns", "query_norm").rows
    assert float(smallest[1][0]) == min(everything)
    assert len(run("inspect", tiny, "--top", "99").rows) == 11


def test_views(run, tiny, tmp_path):
    layers = run("inspect", tiny, "--by", "layer")
    assert (layers.code, layers.err, len(layers.rows)) == (0, "", 3)
    model = run("inspect", tiny, "--by", "model", "--tokens", "7")
    assert (model.code, model.err, len(model.rows)) == (0, "", 2)
    more = run("inspect", tiny, "--by", "model", "--tokens", "8").rows[1]
    macs = model.rows[0].index("macs_per_token")
    assert int(more[macs]) - int(model.rows[1][macs]) == 2 * 5 * (4 + 4)  # one token more: layers x heads x (d + dv)
    means = run("inspect", tiny, "--by", "layer", "--measures", "weights").rows
    heads = run("inspect", tiny, "--columns", "query_norm").rows
    mean = sum(float(row[0]) for row in heads[1:6]) / 5
    assert float(means[1][means[0].index("query_norm")]) == pytest.approx(mean, rel=1e-12)
    group = run("inspect", llama(tmp_path), "--columns", "head,kv_head").rows
    assert [row[1] for row in group[1:7]] == ["0", "0", "1", "1", "2", "2"]


def test_measures_with_data(run):
    default = run("inspect", DIGITS, *FEW[:4])
    assert default.code == 0
    assert "12 examples, mean loss" in default.err
    assert {"query_norm", "importance", "importance_se"} < set(default.rows[0])
    chosen = run("inspect", DIGITS, *FEW[:4], "--measures", "sensitivity,importance", "--draws", "2")
    assert not {"query_norm"} & set(chosen.rows[0])
    assert {"importance", "sensitivity"} < set(chosen.rows[0])
    once = run("inspect", DIGITS, *FEW[:4], "--measures", "sensitivity", "--draws", "1")
    again = run("inspect", DIGITS, *FEW[:4], "--measures", "sensitivity", "--batch-size", "5")
    assert len(once.out) > 100 and once.out != chosen.out
    columns = [[float(row[9]) for row in ran.rows[1:]] for ran in (once, again)]
    assert columns[0] == pytest.approx(columns[1], rel=1e-4)
    assert run("inspect", DIGITS, *FEW).out == run("inspect", DIGITS, *FEW).out
    late = run("inspect", DIGITS, *FEW[:4], "--label-column", "labels")
    assert refused(late, 2, "--label-column 'labels': no such column", "did you mean 'label'?")


def test_quiet_verbose_and_pictures(run, tmp_path):
    quiet = run("inspect", DIGITS, *FEW, "--quiet", "--plot", tmp_path / "a.svg")
    loud = run("inspect", DIGITS, *FEW, "--verbose", "--plot", tmp_path / "b.svg", "--no-progress")
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.out == loud.out
    assert "weights_digest: " in loud.err and "seed: 0" in loud.err
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    table = run("inspect", DIGITS, *FEW, "--format", "table")
    assert "\x1b" not in table.out + table.err
    assert "vision.self" in table.out


def test_a_dry_run_writes_nothing(run, tiny, tmp_path):
    for more in (["--by", "layer"], ["--check"], ["--structure"], []):
        ran = run("inspect", tiny, "--dry-run", "-o", tmp_path / "x.csv", *more)
        assert ran.code == 0
        assert ran.rows[0] == ["item", "value", "unit"]
    ran = run(
        "inspect", DIGITS, *FEW, "--dry-run", "--plot", tmp_path / "x.png", "--sort", "importance", "--limit", "7"
    )
    assert ran.code == 0
    assert dict(row[:2] for row in ran.rows)["examples"] == "7"
    assert list(tmp_path.iterdir()) == []


def test_limits_and_faults_of_data(run, tmp_path):
    assert "1 of" not in run("inspect", DIGITS, *FEW).err
    every = run("inspect", DIGITS, "--data", DIGITS / "dev.csv", "--limit", "99999", "--dry-run").rows
    assert dict(row[:2] for row in every)["examples"] == str(len((DIGITS / "dev.csv").read_text().splitlines()) - 1)
    assert refused(run("inspect", SENTIMENT, "--data", tmp_path / "none.jsonl"), 1, "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    assert refused(run("inspect", SENTIMENT, "--data", tmp_path / "empty.jsonl"), 1, "no examples")


def test_bugs_are_one_line_without_debugging(monkeypatch, capsys):
    from headscope import cli

    cli._bug(RuntimeError, RuntimeError("first\nsecond"), None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: headscope failed unexpectedly: RuntimeError: first"
    assert lines[1].startswith("hint: HEADSCOPE_DEBUG=1")
    assert len(lines) == 2
