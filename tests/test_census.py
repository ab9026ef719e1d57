"""The census: its committed rows hold for a sample of text models, and the harness itself can say no."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
from census import judge, rows, workers
from census.__main__ import main
from census.build import build, model_types
from census.classes import attention_modules
from census.rows import EXACT, NOT_RUN, REFUSED, VERDICTS, WRONG, Row
from census.sample import LANGUAGE, LONG, SENSES

from headscope import layouts, surgery
from headscope.plan import Plan

COMMITTED = rows.read()


def judged(model_type: str) -> Row:
    """A fresh row; what models warn of is their own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge.judged(model_type)


@pytest.mark.parametrize("model_type", LANGUAGE)
def test_a_text_model_is_as_the_census_says(model_type: str) -> None:
    row, committed = judged(model_type), COMMITTED[model_type]
    assert row.verdicts == committed.verdicts, row.reason
    assert (row.started, row.sites_expected, row.sites_found) == (
        committed.started,
        committed.sites_expected,
        committed.sites_found,
    )


def test_the_sample_has_sixty_structures() -> None:
    assert set(SENSES) >= LONG and len({*LANGUAGE, *SENSES} - LONG) >= 60
    assert {*LANGUAGE, *SENSES} <= set(model_types())


def test_the_census_has_a_row_for_every_model_type() -> None:
    assert list(COMMITTED) == model_types()


def test_no_row_is_wrong() -> None:
    assert [row.model_type for row in COMMITTED.values() if WRONG in row.verdicts.values()] == []


def test_what_is_not_exact_has_a_reason() -> None:
    for row in COMMITTED.values():
        assert row.reason or (row.started == "yes" and not {REFUSED, WRONG} & set(row.verdicts.values())), row


def test_most_types_start_and_are_found_masked_and_pruned() -> None:
    started = [row for row in COMMITTED.values() if row.started == "yes"]
    assert len(started) >= 480
    softmax = [row for row in started if row.sites_expected or row.kinds]
    assert sum(row.sites_found == row.sites_expected for row in softmax) >= 0.97 * len(softmax)
    heads = [row for row in started if row.kinds]
    for column, least in (("masked", 0.97), ("pruned_uniform", 0.92), ("pruned_uneven", 0.92)):
        run = [row for row in heads if row.verdicts[column] != NOT_RUN]
        assert sum(row.verdicts[column] == EXACT for row in run) >= least * len(run), column


def test_the_readme_shows_the_summary() -> None:
    assert rows.summary(COMMITTED.values()) in (rows.ROOT / "README.md").read_text(encoding="utf-8")


def test_expected_modules_are_counted_in_the_model_not_in_what_is_found() -> None:
    assert attention_modules(build("bert")).keys() == {f"encoder.layer.{layer}.attention.self" for layer in range(2)}
    assert len(attention_modules(build("t5"))) == 6


def test_a_wrong_pruning_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_head(model, sites, plan: Plan) -> None:
        first, rest = sites[0], plan.removed[1:]
        spare = next(head for head in first.heads if head not in plan.removed)
        surgery.prune(model, sites, Plan(plan.sites, tuple(sorted((spare, *rest)))))

    monkeypatch.setattr(judge, "prune", other_head)
    row = judged("gpt2")
    assert (row.masked, row.pruned_uniform, row.pruned_uneven, row.reloaded) == (EXACT, WRONG, WRONG, NOT_RUN)
    assert "pruned differs by" in row.reason


def test_a_wrong_mask_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "silence_heads", lambda model, sites, plan: None)
    assert judged("gpt2").masked == WRONG


def test_a_wrong_reload_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(model, folder: Path) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data + 1e-3
        layouts.save_portable(model, folder)

    monkeypatch.setattr(judge, "save_portable", spoiled)
    row = judged("gpt2")
    assert (row.pruned_uneven, row.reloaded) == (EXACT, WRONG)


def test_a_type_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(model_type: str) -> None:
        raise ImportError("TimmBackbone requires the timm library but it was not found in your environment.")

    monkeypatch.setattr(judge, "build", absent)
    row = judged("gpt2")
    assert (row.started, row.reason) == ("no", "needs the package timm")


WORKER = """
import json, os, resource, sys, time
for name in sys.argv[2:]:
    if name == "hangs":
        time.sleep(60)
    if name == "loops":
        resource.setrlimit(resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))
        while True:
            pass
    if name == "crashes":
        os._exit(3)
    print("noise")
    print(json.dumps({"model_type": name, "started": "yes"}), flush=True)
"""


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_hang_and_a_crash_cost_one_row_each(jobs: int) -> None:
    limits = workers.Limits(seconds=3.0, patience=1.0, command=(sys.executable, "-c", WORKER))
    types = ["a", "hangs", "b", "loops", "crashes", "c"]
    found = {row.model_type: row for row in workers.run(types, jobs, limits)}
    assert {name: row.started for name, row in found.items()} == {
        "a": "yes",
        "hangs": "no",
        "b": "yes",
        "loops": "no",
        "crashes": "no",
        "c": "yes",
    }
    assert "hangs" in found["hangs"].reason
    assert "hangs" in found["loops"].reason
    assert "exit status 3" in found["crashes"].reason


def test_resume_skips_rows_of_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, asked = tmp_path / "census.csv", []

    def run(types, jobs, limits):
        asked.append(list(types))
        return iter([Row(name, started="yes") for name in types])

    monkeypatch.setattr("census.__main__.run", run)
    rows.write([Row("bert", source=rows.source_digest()), Row("gpt2", source="older")], table)
    arguments = ["--only", "bert,gpt2,llama", "--output", str(table)]
    assert main([*arguments, "--resume"]) == 0
    assert main(arguments) == 0
    assert asked == [["gpt2", "llama"], ["bert", "gpt2", "llama"]]
    assert {row.source for row in rows.read(table).values()} == {rows.source_digest()}


def test_a_wrong_row_ends_with_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "census.csv"
    rows.write(
        [
            Row("a", started="yes", kinds="self:1", sites_expected=1, sites_found=1, masked=EXACT, pruned_uneven=WRONG),
            Row("b", started="yes", kinds="self:2", sites_expected=2, sites_found=1, masked=EXACT),
            Row("c", reason="needs the package timm"),
        ],
        table,
    )
    assert main(["--summary", "--output", str(table)]) == 1
    printed = capsys.readouterr().out
    assert "| in AutoModel's mapping | 3 |" in printed
    assert "| of these with every expected attention module found | 1 (50.0 %) |" in printed
    assert "| masked | 2 (100.0 %) | 0 | 0 | 0 |" in printed
    assert "| pruned uneven | 0 (0.0 %) | 0 | 1 | 1 |" in printed


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    row = Row("a", "yes", 'a, "quoted" reason', 3, 2, "self:2", *(EXACT for _ in VERDICTS), "q_norm.weight", 1.5, "0f")
    rows.write([row], tmp_path / "census.csv")
    assert rows.read(tmp_path / "census.csv") == {"a": row}
