"""`prune` with repair, from end to end: the four samples, all layouts, rounds and limits, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Ran, command, refused
from pruning_cases import difference, gates, said
from safetensors.torch import load_file

import headscope
from headscope import mending
from headscope import repair as repairing
from headscope.card import Quality
from headscope.criteria import candidates
from headscope.data import DataOptions, load_examples
from headscope.discovery import find_sites
from headscope.examples import held_out
from headscope.heads import HeadId
from headscope.inputs import probe_inputs
from headscope.manifest import read_manifest
from headscope.mending import Mender
from headscope.models import LoadOptions, load
from headscope.plan import SiteHeads, read_plan
from headscope.prune_report import _repair
from headscope.request import Request
from headscope.selection import select
from headscope.study import Study, StudyOptions
from headscope.trials import Trials, Verdict

pytestmark = pytest.mark.usefixtures("in_process")
Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return command(monkeypatch, capsysbinary)


def manifest_of(folder: Path) -> dict[str, Any]:
    found = read_manifest(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("sample", "file", "options"),
    [
        ("vit-digits", "dev.csv", ("--limit", 90, "--ratio", 0.4)),
        ("llama-gqa-web", "dev.jsonl", ("--limit", 12, "--max-length", 32, "--ratio", 0.25, "--unit", "auto")),
        pytest.param(
            "llama-gqa-web",
            "dev.jsonl",
            ("--limit", 12, "--max-length", 32, "--ratio", 0.3, "--unit", "head", "--layout", "masked"),
            marks=pytest.mark.slow,
        ),
        pytest.param("sentiment-minilm", "dev.jsonl", ("--limit", 256, "--ratio", 0.5), marks=pytest.mark.slow),
        pytest.param("t5-g2p", "dev.jsonl", ("--limit", 40, "--ratio", 0.4), marks=pytest.mark.slow),
    ],
)
def test_the_samples_are_repaired(
    run: Run, samples: Path, tmp_path: Path, sample: str, file: str, options: tuple[object, ...]
) -> None:
    """The checkpoint computes what the repaired model was judged by, and its weights are the repaired ones."""
    source, target = samples / sample, tmp_path / "pruned"
    ran = run("prune", source, "--data", source / file, "--criterion", "reconstruction", *options, "-o", target)
    assert ran.code == 0, ran.err
    assert "repaired: the output projection" in ran.err and "without that loss" in ran.err
    manifest = manifest_of(target)
    quality, repair = manifest["quality"], manifest["repair"]
    assert quality["before"]["divergence"] == 0
    assert repair["divergence_after"] < repair["divergence_before"]
    assert all(site["error_after"] < site["error_before"] for site in repair["sites"])
    assert {"loss", "divergence"} <= quality["unrepaired"].keys()
    increase = quality["loss_increase"]
    assert increase["low"] <= increase["difference"] <= increase["high"]
    assert increase["difference"] == pytest.approx(quality["after"]["loss"] - quality["before"]["loss"], abs=1e-6)
    assert any("repaired masked and pruned" in name for name in manifest["proof"])
    card = (target / "README.md").read_text()
    assert f"Repaired: the output projection of {len(repair['sites'])} site" in card
    plain = tmp_path / "plain"
    again = run("prune", source, "--plan", target, *_layout(options), "-o", plain)
    assert again.code == 0, again.err
    new, old = load_file(target / "model.safetensors"), load_file(plain / "model.safetensors")
    changed = {name for name in new if not torch.equal(new[name], old[name])}
    whole = load(str(source), LoadOptions()).model
    outputs = {str(site.id): site.output for site in find_sites(whole).sites}
    assert changed == {
        f"{outputs[site['site']]}.{name}" for site in repair["sites"] for name in ["weight", "bias"][: 1 + site["bias"]]
    }


def _layout(options: tuple[object, ...]) -> tuple[object, ...]:
    return ("--layout", "masked") if "masked" in options else ()


def test_the_checkpoint_is_the_model_that_was_judged(run: Run, samples: Path, tmp_path: Path) -> None:
    """By hand: the repair of the same plan from the same part of the data, on the gated whole model."""
    source, target = samples / "vit-digits", tmp_path / "pruned"
    given = ("--data", source / "dev.csv", "--limit", 40, "--heads", "0:0,2;1:1,3;2:1,2;3:0,5")
    ran = run("prune", source, *given, "-o", target)
    assert ran.code == 0 and "learned these images by heart" in ran.err
    options = StudyOptions(data=DataOptions(limit=40))
    loaded = load(str(source), options.load)
    choosing, _ = held_out(load_examples(str(source / "dev.csv"), loaded, options.data), 0)
    study = Study(loaded, choosing, options)
    plan = read_plan(target, [SiteHeads.of(site) for site in study.sites])
    stored = load_file(source / "model.safetensors")
    repair = Mender(study, dtype=next(iter(stored.values())).dtype, noise=True).repair(plan)
    assert repair is not None
    inputs = probe_inputs(loaded.model)
    with repairing.gate(loaded.model, gates(study.sites, plan), study.sites):
        unrepaired = said(loaded.model, inputs)
        with repairing.applied(loaded.model, study.sites, repair):
            expected = said(loaded.model, inputs)
    got = said(headscope.load(target, dtype="float32"), inputs)
    assert difference(expected, got) <= 1e-5
    assert difference(unrepaired, got) > 1e-3


def test_repair_never_sees_what_judges(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    def noted(true: Callable[..., Any]) -> Callable[..., Any]:
        def fitted(study: Study, *given: Any, **options: Any) -> Any:
            assert study.examples is not None
            seen.append({example.origin for example in study.examples.items})
            return true(study, *given, **options)

        return fitted

    for name in ("fit", "refitted"):
        monkeypatch.setattr(mending, name, noted(getattr(mending, name)))
    source = samples / "vit-digits"
    options = StudyOptions(data=DataOptions(limit=24))
    done = headscope.prune(str(source), str(source / "dev.csv"), tmp_path / "x", ratio=0.3, options=options)
    assert done.plan.criterion in candidates(labelled=True), "auto was measured"
    loaded = load(str(source), options.load)
    choosing, judging = held_out(load_examples(str(source / "dev.csv"), loaded, options.data), 0)
    assert len(seen) > 1 and seen[-1] == {example.number for example in choosing.items}
    assert not set.union(*seen) & {example.number for example in judging.items}
    assert done.verdict is not None and done.quality == (done.verdict.whole, done.verdict.final)


def test_without_repair_nothing_but_heads_changes(run: Run, samples: Path, tmp_path: Path) -> None:
    source, target = samples / "vit-digits", tmp_path / "pruned"
    given = ("prune", source, "--data", source / "dev.csv", "--limit", 40, "--heads", "0:0")
    ran = run(*given, "--no-compensate", "-o", target)
    assert ran.code == 0 and "not repaired" in ran.err
    assert manifest_of(target)["repair"] is None and "unrepaired" not in manifest_of(target)["quality"]
    assert "No weight of the heads that stay was changed." in (target / "README.md").read_text()
    plain = tmp_path / "plain"
    assert run("prune", source, "--heads", "0:0", "-o", plain).code == 0
    one, other = load_file(target / "model.safetensors"), load_file(plain / "model.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_does_not_help_is_not_written(
    run: Run, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mending, "fit", lambda *_, **__: None)
    source, target = samples / "vit-digits", tmp_path / "pruned"
    ran = run("prune", source, "--data", source / "dev.csv", "--limit", 40, "--heads", "0:0", "-o", target)
    assert ran.code == 0, ran.err
    assert "no repair was made" in ran.err and "not repaired" in ran.err
    assert manifest_of(target)["repair"] is None


def test_too_little_data_for_a_repair(run: Run, samples: Path, tmp_path: Path) -> None:
    source, target = samples / "vit-digits", tmp_path / "pruned"
    given = ("prune", source, "--data", source / "dev.csv", "--limit", 3, "--heads", "0:0", "-o", target)
    assert refused(run(*given, "--compensate"), 2, "--compensate needs 4 examples")
    ran = run(*given)
    assert ran.code == 0 and "3 examples are too few" in ran.err and "no repair was tried" in ran.err


@pytest.mark.parametrize(("without", "harmful"), [(0.5, False), (0.1, True)])
def test_a_repair_that_does_harm_on_held_out_data_is_not_praised(without: float, harmful: bool) -> None:
    """It is not taken back, which would be a choice by the data that judges."""
    head = HeadId.parse("encoder.self.0.1")
    one = repairing.SiteRepair(head.site, (head,), torch.zeros(0), None, 0.1, 2.0, 1.0)
    whole, less, repaired = (Quality(divergence=value) for value in (0.0, without, 0.2))
    said_of_it = _repair(Verdict(whole, less, repaired, repairing.Repair((one,), 0.4, 0.3)))
    assert f"without that divergence {without:g} nats" in said_of_it
    assert ("which is less" in said_of_it and "--no-compensate" in said_of_it) is harmful


def digits(samples: Path, limit: int) -> tuple[Study, Study]:
    """Studies of the examples that choose and of those that judge."""
    source = samples / "vit-digits"
    options = StudyOptions(data=DataOptions(limit=limit))
    loaded = load(str(source), options.load)
    choosing, judging = held_out(load_examples(str(source / "dev.csv"), loaded, options.data), 0)
    study = Study(loaded, choosing, options)
    return study, study.on(judging)


def test_limits_are_kept_by_the_repaired_model(samples: Path) -> None:
    """With repair more heads go within the same limit, or as many."""
    study, judging = digits(samples, 80)
    request = Request(max_loss_increase=0.05, criterion="joint-fisher")
    counts: list[int] = []
    for mender in (None, Mender(study)):
        trials = Trials(judging, None, mender)
        plan = select(study, request, trials, mender=mender).plan
        verdict = trials.judged(plan)
        assert verdict.final.loss is not None and verdict.whole.loss is not None
        assert verdict.final.loss - verdict.whole.loss <= 0.05
        assert verdict.increase is not None
        assert verdict.increase.low <= verdict.final.loss - verdict.whole.loss <= verdict.increase.high
        counts.append(len(plan.removed))
    assert counts[1] > counts[0] > 0


def test_rounds_score_the_repaired_model(samples: Path) -> None:
    study, _ = digits(samples, 50)
    request = Request(ratio=0.5, rounds=2, criterion="importance")
    mender = Mender(study)
    bare, mended = select(study, request, None), select(study, request, None, mender=mender)
    assert bare.history[0] == mended.history[0], "the first scores are of the whole model"
    first = tuple(sorted(head for head in mended.plan.removed if str(head) in mended.history[0]["taken"]))
    assert mender._removed == first, "repaired once, after the first round"
    scores = study.scores(["importance"]).values["importance"]
    with mender.mended(repairing.Plan(mended.plan.sites, first)):
        scores = study.scores(["importance"]).values["importance"]
    for site in study.sites:
        for head, value in zip(site.heads, scores[site.id].tolist(), strict=True):
            if head not in first:
                assert mended.plan.scores[head] == pytest.approx(value, rel=1e-6, abs=1e-9)
    left = [head for head in mended.plan.scores if head not in first]
    assert any(mended.plan.scores[head] != bare.plan.scores[head] for head in left)


def test_a_dry_run_repairs_nothing(run: Run, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "fit", None)
    source = samples / "vit-digits"
    given = ("prune", source, "--data", source / "dev.csv", "--limit", 20, "--ratio", 0.3, "--dry-run")
    given += ("--criterion", "importance")
    ran = run(*given, "--format", "json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)
