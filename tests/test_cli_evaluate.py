"""`headscope evaluate`: a row a model, the first as the baseline; what reads otherwise is refused in one line."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from checkpoints import Ran, command, configure, pickled, refused, rewrite
from conftest import SAMPLES, TEST_FILES
from task_cases import CASES
from tiny_tokenizers import save, tokenizer, write

import headscope
from headscope.comparison import weight_bytes
from headscope.errors import UsageError
from headscope.location import locate
from headscope.metrics import METRICS
from headscope.study import Study

NAMES = "model,loss,metric,metric_name,divergence,parameters,macs_per_token,kv_bytes_per_token,disk_bytes,examples"
SPEED = "latency_ms,latency_iqr_ms,throughput,speedup,speedup_predicted"
DIGITS = SAMPLES / "vit-digits"
FEW = ("--data", DIGITS / "test.csv", "--limit", "40")
Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch, capsysbinary) -> Run:
    return command(monkeypatch, capsysbinary)


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """What is measured of time is tried in test_timing.py."""
    monkeypatch.setattr("headscope.timing.FEWEST", 2)
    monkeypatch.setattr("headscope.timing.MOST", 2)


def rows(ran: Ran) -> list[dict[str, str]]:
    assert ran.code == 0, ran
    return list(csv.DictReader(io.StringIO(ran.out)))


def checkpoint(folder: Path, name: str = "single", **tokens: object) -> Path:
    """The model of a case with what it reads by."""
    case = CASES[name]
    return Path(save(folder, case.build(), replace(case, tokens=case.tokens | tokens).companion()))


def data_of(folder: Path, name: str = "single") -> Path:
    return Path(write(folder / "rows.jsonl", CASES[name].rows))


def masked(source: Path, target: Path) -> Path:
    """A copy of the digits sample without the heads 0 to 3 of its first layer."""
    shutil.copytree(source, target)
    name = "vit.encoder.layer.0.attention.output.dense.weight"
    return rewrite(target, lambda tensors: tensors[name][:, :16].zero_())


MISUSE = [
    ([], ["Missing argument 'MODEL...'", "headscope evaluate --help"]),
    (["m"], ["evaluate needs data", "--data FILE"]),
    (["m", "--data", "d.txt", "--metric", "acuracy"], ["no metric 'acuracy'", "did you mean 'accuracy'?"]),
    (["m", "--data", "d.txt", "--speed-batches", "1,x"], ["--speed-batches x: expected a positive whole number"]),
    (["m", "--data", "d.txt", "--speed-batches", ","], ["--speed-batches names none"]),
    (["m", "--data", "d.txt", "--tokens", "0"], ["--tokens 0"]),
    (["m", "--data", "d.txt", "--columns", "los"], ["no column 'los'", "did you mean 'loss'?"]),
    (["m", "--data", "d.txt", "--sort", "-latency_ms"], ["no column 'latency_ms'"]),
    (["m", "--data", "d.txt", "--format", "xml"], ["--format xml"]),
    (["m", "--label-column", "y"], ["--label-column is about data"]),
]


@pytest.mark.parametrize(("words", "parts"), MISUSE, ids=lambda value: " ".join(value)[:40])
def test_wrong_use_is_refused_before_a_model_is_opened(run: Run, monkeypatch, words, parts) -> None:
    monkeypatch.setattr("headscope.study.load", None)
    assert refused(run("evaluate", *words), 2, *parts)


def test_models_and_data_that_are_not_there(run: Run, tmp_path: Path) -> None:
    assert refused(run("evaluate", DIGITS, "./none", *FEW), 1, "no such model: ./none")
    assert refused(run("evaluate", DIGITS, "--data", tmp_path / "no.csv"), 1, "no.csv")
    old = tmp_path / "old.csv"
    old.write_text("old")
    assert refused(run("evaluate", DIGITS, *FEW, "-o", old), 2, "exists already")
    wrong = run("evaluate", DIGITS, *FEW, "--metric", "perplexity")
    assert refused(wrong, 2, "perplexity does not fit image-classification", "it has: accuracy, f1")


def test_a_row_a_model(run: Run, tmp_path: Path) -> None:
    other = masked(DIGITS, tmp_path / "masked")
    ran = run("evaluate", DIGITS, other, *FEW)
    first, second = rows(ran)
    assert ran.out.splitlines()[0] == NAMES
    assert (first["model"], second["model"]) == (str(DIGITS), str(other))
    assert float(first["divergence"]) == 0 < float(second["divergence"])
    assert float(first["loss"]) < float(second["loss"])
    assert (first["metric_name"], first["examples"], first["kv_bytes_per_token"]) == ("accuracy", "40", "0")
    whole = rows(run("inspect", DIGITS, "--by", "model"))[0]
    assert first["parameters"] == second["parameters"] == whole["total_parameters"]
    assert first["macs_per_token"] == whole["macs_per_token"]
    assert int(first["disk_bytes"]) == (DIGITS / "model.safetensors").stat().st_size
    (line,) = ran.err.splitlines()
    assert line.startswith(f"{other} against {DIGITS} on 40 examples (95 % intervals by paired bootstrap): loss +")
    assert f"accuracy {float(second['metric']) - float(first['metric']):+.4g} (" in line
    assert run("evaluate", DIGITS, other, *FEW).err == ran.err
    assert run("evaluate", DIGITS, other, *FEW, "--seed", "1").err != ran.err
    longer = rows(run("evaluate", DIGITS, *FEW, "--tokens", "513"))[0]
    assert int(longer["macs_per_token"]) == int(first["macs_per_token"]) + 4 * 8 * (8 + 8)


def test_the_loss_is_that_of_inspect(run: Run) -> None:
    ran = run("inspect", DIGITS, *FEW, "--measures", "importance")
    (row,) = rows(run("evaluate", DIGITS, *FEW))
    assert f"40 examples, mean loss {float(row['loss']):.6g}" in ran.err


@pytest.mark.parametrize("size", ["1", "7", "64"])
def test_batch_size_changes_only_rounding(run: Run, tmp_path: Path, size: str) -> None:
    other = masked(DIGITS, tmp_path / "masked")
    words = ("evaluate", DIGITS, other, *FEW, "--dtype", "float64")
    wanted, found = rows(run(*words)), rows(run(*words, "--batch-size", size))
    for name in ("loss", "metric", "divergence"):
        got, right = ([float(row[name]) for row in one] for one in (found, wanted))
        assert got == pytest.approx(right, rel=1e-9, abs=0), name


PUBLISHED = {
    "vit-digits": ("accuracy", 0.944, 1e-9, []),
    "t5-g2p": ("token-accuracy", 0.916, 1e-4, []),
    "llama-gqa-web": ("perplexity", 30.087, 0.05, ["--max-length", "161"]),  # other windows of 160 predictions
    "sentiment-minilm": ("accuracy", 0.8794, 1e-4, []),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED if name[0] != "v"])
def test_samples_against_themselves_on_all_their_test_rows(run: Run, name: str) -> None:
    check_published(run, name)


def test_digits_against_themselves(run: Run) -> None:
    check_published(run, "vit-digits")


def check_published(run: Run, name: str) -> None:
    """Twice the same model: no divergence, and the metric that the sample was published with."""
    metric, value, tolerance, words = PUBLISHED[name]
    folder = SAMPLES / name
    ran = run("evaluate", folder, folder, "--data", folder / TEST_FILES[name], "--limit", "all", *words)
    for row in rows(ran):
        assert (row["divergence"], row["metric_name"]) == ("0.0", metric)
        assert float(row["metric"]) == pytest.approx(value, abs=tolerance)
    assert "loss +0 (+0 to +0)" in ran.err


@pytest.mark.parametrize("name", ["sentiment-minilm", "t5-g2p", "llama-gqa-web"])
def test_samples_against_themselves(run: Run, name: str) -> None:
    folder, few = SAMPLES / name, "2" if "llama" in name else "20"
    first, second = rows(run("evaluate", folder, folder, "--data", folder / TEST_FILES[name], "--limit", few))
    assert first == second
    assert (first["divergence"], first["metric_name"]) == ("0.0", PUBLISHED[name][0])


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_task_is_judged(run: Run, tmp_path: Path, name: str) -> None:
    """Also models without a pad token, whose stand-in both copies must know."""
    model = checkpoint(tmp_path / "model", name)
    ran = run("evaluate", model, model, "--data", data_of(tmp_path, name), "--dtype", "float64")
    first, second = rows(ran)
    assert first == second
    assert (first["divergence"], first["examples"]) == ("0.0", "7")
    if CASES[name].task == "embedding":
        assert (first["loss"], first["metric"], first["metric_name"], ran.err) == ("", "", "", "")
    else:
        assert float(first["loss"]) > 0 and first["metric_name"] in METRICS


def test_speed_gives_a_row_a_model_and_batch_size(run: Run, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", "causal-llama")
    ran = run(
        "evaluate", model, model, "--data", data_of(tmp_path, "causal-llama"), "--speed", "--speed-batches", "2,1,2"
    )
    found = rows(ran)
    head, _, tail = NAMES.partition(",")
    assert ran.out.splitlines()[0] == f"{head},batch_size,{tail},{SPEED}"
    assert [row["batch_size"] for row in found] == ["2", "2", "1", "1"]
    for row in found:
        size, latency = int(row["batch_size"]), float(row["latency_ms"])
        assert float(row["throughput"]) == pytest.approx(1000 * size / latency)
        assert float(row["latency_iqr_ms"]) >= 0
        assert row["speedup_predicted"] == "1.0"
    assert [found[0]["speedup"], found[2]["speedup"]] == ["1.0", "1.0"]
    assert float(found[1]["speedup"]) == pytest.approx(float(found[0]["latency_ms"]) / float(found[1]["latency_ms"]))
    assert "masking heads saves no time: only heads that are removed do\n" in ran.err
    assert "timed on 47 tokens, the most that the models read" in ran.err


def test_half_the_work_is_predicted_to_be_twice_as_fast(run: Run, tmp_path: Path, monkeypatch) -> None:
    model, macs = checkpoint(tmp_path / "model"), iter([300, 150])
    monkeypatch.setattr("headscope.comparison.matrix_macs", lambda *_: next(macs))
    words = ("--data", data_of(tmp_path), "--speed", "--speed-batches", "1")
    assert [row["speedup_predicted"] for row in rows(run("evaluate", model, model, *words))] == ["1.0", "2.0"]


def test_speed_where_memory_runs_out(run: Run, tmp_path: Path, monkeypatch) -> None:
    model = checkpoint(tmp_path / "model")
    monkeypatch.setattr("headscope.comparison.time_models", lambda *_, **__: None)
    ran = run("evaluate", model, "--data", data_of(tmp_path), "--speed", "--speed-batches", "4")
    (row,) = rows(ran)
    assert (row["latency_ms"], row["speedup"], row["speedup_predicted"]) == ("", "", "1.0")
    assert "note: memory ran out at batch size 4" in ran.err


def other_tokenizer(folder: Path) -> Path:
    return checkpoint(folder, pieces=True)


def same_words_cut_otherwise(folder: Path) -> Path:
    path = checkpoint(folder) / "tokenizer.json"
    rules = json.loads(path.read_text())
    path.write_text(json.dumps(rules | {"normalizer": {"type": "Lowercase"}}))
    return path.parent


def other_numbering(folder: Path) -> Path:
    return configure(checkpoint(folder), id2label={"0": "yes", "1": "no", "2": "maybe"})


def fewer_classes(folder: Path) -> Path:
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    config = CASES["single"].build().config
    config.num_labels = 2
    return Path(save(folder, BertForSequenceClassification(config), tokenizer("bert")))


def shorter(folder: Path) -> Path:
    path = checkpoint(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 6}))
    return path.parent


UNLIKE = {
    "task": (lambda folder: checkpoint(folder, "masked"), ["does text-classification", "does masked-lm", "--task"]),
    "vocabulary": (other_tokenizer, ["different vocabularies (53 and"]),
    "rules": (same_words_cut_otherwise, ["cut texts differently"]),
    "numbering": (other_numbering, ["number their classes differently", "id2label"]),
    "classes": (fewer_classes, ["has 3 classes", "has 2"]),
    "length": (shorter, ["reads at most 6 tokens, the longest example has 14", "--max-length 6"]),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_models_that_cannot_be_compared(run: Run, tmp_path: Path, name: str) -> None:
    build, parts = UNLIKE[name]
    ran = run("evaluate", checkpoint(tmp_path / "first"), build(tmp_path / "other"), "--data", data_of(tmp_path))
    assert refused(ran, 2, str(tmp_path / "other"), *parts)


def test_vocabularies_of_other_sizes(run: Run, tmp_path: Path) -> None:
    case = CASES["causal-llama"]
    wide = replace(case, recipe=replace(case.recipe, config=case.recipe.config | {"vocab_size": 60}))
    models = [
        save(tmp_path / name, one.build(), tokenizer(case.form)) for name, one in (("first", case), ("other", wide))
    ]
    ran = run("evaluate", *models, "--data", data_of(tmp_path, "causal-llama"))
    assert refused(ran, 2, "has a vocabulary of 53", "one of 60")


def test_notes_on_what_is_measured(run: Run, tmp_path: Path) -> None:
    case, model = CASES["single"], checkpoint(tmp_path / "model")
    bare = write(tmp_path / "bare.jsonl", [{"text": row["text"]} for row in case.rows])
    ran = run("evaluate", model, model, "--data", bare)
    assert [(row["loss"], row["metric"], row["metric_name"]) for row in rows(ran)] == [("", "", "")] * 2
    assert ran.err == "note: the data has no labels for this model: neither loss nor metric is measured\n"
    skewed = write(tmp_path / "skewed.jsonl", [row | {"label": int(place < 1)} for place, row in enumerate(case.rows)])
    ran = run("evaluate", model, "--data", skewed)
    assert rows(ran)[0]["metric_name"] == "f1"
    assert ran.err == "note: f1 is the metric, since one class has more than 80 % of the labels\n"
    assert rows(run("evaluate", model, "--data", skewed, "--metric", "accuracy"))[0]["metric_name"] == "accuracy"
    assert run("evaluate", model, "--data", skewed, "--metric", "f1").err == ""


def test_images_prepared_differently(run: Run, tmp_path: Path) -> None:
    other = shutil.copytree(DIGITS, tmp_path / "other")
    path = other / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [0.1] * 1}))
    assert refused(run("evaluate", DIGITS, other, *FEW), 2, "prepare images differently")


def test_names_made_up_by_transformers_are_no_numbering(run: Run, tmp_path: Path) -> None:
    named = checkpoint(tmp_path / "first")
    unnamed = configure(checkpoint(tmp_path / "other"), id2label={str(n): f"LABEL_{n}" for n in range(3)})
    assert len(rows(run("evaluate", named, unnamed, "--data", data_of(tmp_path)))) == 2


def test_weights_on_disk(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    whole = (folder / "model.safetensors").stat().st_size
    (folder / "other.safetensors").write_bytes(b"12345")
    pickled(folder, keep=True)
    assert weight_bytes(locate(str(folder))) == whole
    model = zoo.build(CASES["single"].recipe)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shards = list((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 1
    assert weight_bytes(locate(str(tmp_path / "shards"))) == sum(file.stat().st_size for file in shards)
    pickled(folder)
    assert weight_bytes(locate(str(folder))) == (folder / "pytorch_model.bin").stat().st_size


def test_report_options(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    ran = run("evaluate", DIGITS, *FEW, "-o", file, "--columns", "model,loss", "--quiet")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    report = json.loads(file.read_text())
    assert list(report["rows"][0]) == ["model", "loss"]
    loud = run("evaluate", DIGITS, DIGITS, *FEW, "--verbose", "--metric", "f1", "--sort", "loss", "--top", "1")
    assert rows(loud)[0]["metric_name"] == "f1"
    assert f"model: {DIGITS}, {DIGITS}\n" in loud.err
    assert "1e" not in run("evaluate", DIGITS, *FEW, "--format", "table").err


def test_a_dry_run_runs_no_model(run: Run, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("headscope.comparison.judge", None)
    ran = run("evaluate", DIGITS, DIGITS, *FEW, "--dry-run", "--speed", "-o", tmp_path / "x.csv")
    found = {row["item"]: row["value"] for row in rows(ran)}
    assert (found["models"], found["examples"], found["passes"], found["metric"]) == ("2", "40", "2", "accuracy")
    assert found["speed_batches"] == "1,8,32"
    assert float(found["seconds"]) > 30 and int(found["peak_bytes"]) > 2 * 169162 * 4
    assert not list(tmp_path.iterdir())


def test_python_gives_the_same_numbers(run: Run) -> None:
    frame = headscope.evaluate(str(DIGITS), str(DIGITS / "test.csv"))
    assert ",".join(frame.columns) == NAMES
    assert frame.attrs["provenance"]["seed"] == 0
    (row,) = rows(run("evaluate", DIGITS, "--data", DIGITS / "test.csv"))
    assert float(row["loss"]) == frame.loc[str(DIGITS), "loss"]
    timed = headscope.evaluate([str(DIGITS)], str(DIGITS / "test.csv"), speed=True, speed_batches=[2])
    assert timed["batch_size"].tolist() == [2]
    with pytest.raises(UsageError, match="needs a model"):
        headscope.evaluate([], "x.csv")


def test_columns_are_explained_and_metrics_are_listed(run: Run) -> None:
    for name in [*SPEED.split(","), "divergence", "metric_name", "disk_bytes", "batch_size"]:
        assert run("explain", name).out.startswith(f"{name} [")
    help_text = " ".join(run("evaluate", "--help").out.split())
    for name in METRICS:
        assert name in help_text


def test_sites_are_found_once_a_model(run: Run, monkeypatch) -> None:
    found: list[Study] = []
    find = Study.discovery.func  # type: ignore[attr-defined]
    monkeypatch.setattr(Study.discovery, "func", lambda study: found.append(study) or find(study))
    assert run("evaluate", DIGITS, DIGITS, *FEW).code == 0
    assert len(found) == 2


@pytest.mark.slow
def test_piped_it_is_csv_in_a_process_of_its_own() -> None:
    words = [sys.executable, "-m", "headscope", "evaluate", DIGITS, "--data", "-", "--limit", "5"]
    with (DIGITS / "test.csv").open() as file:
        lines = [dict(row) for row in csv.DictReader(file)][:5]
    sent = "".join(json.dumps({name: int(value) for name, value in row.items()}) + "\n" for row in lines)
    ran = subprocess.run(list(map(str, words)), input=sent, capture_output=True, text=True, env=os.environ, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[0] == NAMES
    assert ran.stdout.splitlines()[1].endswith(",5")
