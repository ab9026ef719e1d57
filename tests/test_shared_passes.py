"""Passes with gated heads, and judgements, cut into units: shared or resumed, the bits are those of one run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_cases import forked
from safetensors.torch import load_file, save_file
from task_cases import CASES, Opened, open_case
from test_shares import _fingerprint, numbers, same_bits, study_of
from torch import Tensor
from torch.testing import assert_close

from headscope.comparison import Judged, judge_models
from headscope.criteria import load_criterion
from headscope.errors import UsageError, WorkError
from headscope.first_scores import shared_scores
from headscope.pruning import PruneOptions, Pruning
from headscope.ranks import Ranks
from headscope.request import Request
from headscope.shares import Share
from headscope.study import Study
from headscope.work import WorkFolder

MEASURES = ("ablation", "only", "importance")
COPIES = 2
"""Each row of a case stands so often in the data: 14 examples, four units of four at one example a batch."""
METRICS = {"single": "accuracy", "regression": "pearson", "causal-llama": "perplexity"}
"""Cases whose metric is made of counts, of all examples' predictions, and of losses."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Opened]:
    found = {}
    for name in METRICS:
        case = CASES[name]
        found[name] = open_case(replace(case, rows=case.rows * COPIES), tmp_path_factory.mktemp(name))
    return found


@pytest.fixture(scope="module")
def undisturbed(opened: dict[str, Opened]) -> dict[str, dict[str, Tensor]]:
    return {name: numbers(study_of(case).scores(MEASURES)) for name, case in opened.items()}


@pytest.mark.parametrize("name", ["regression", "single", pytest.param("causal-llama", marks=pytest.mark.slow)])
def test_units_add_up_to_what_one_unit_finds(
    opened: dict[str, Opened], undisturbed: dict[str, dict[str, Tensor]], name: str
) -> None:
    whole = numbers(study_of(opened[name], batch_size=61).scores(MEASURES))
    assert undisturbed[name]["ablation_metric"].isfinite().all() and whole["ablation_metric"].any()
    for column in ("ablation", "ablation_se", "ablation_metric", "only"):
        assert_close(undisturbed[name][column], whole[column], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(METRICS))
def test_gated_passes_are_kept_and_resumed(
    opened: dict[str, Opened], undisturbed: dict[str, dict[str, Tensor]], tmp_path: Path, name: str
) -> None:
    def run() -> dict[str, Tensor]:
        return numbers(study_of(opened[name], Share(work=WorkFolder(tmp_path))).scores(MEASURES))

    assert same_bits(run(), undisturbed[name])
    files = sorted(tmp_path.iterdir())
    assert {path.name[:6] for path in files} == {"pass-1", "pass-2"}
    for path in files[1::2]:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in files[::2]}
    assert same_bits(run(), undisturbed[name])
    assert {path: path.stat().st_mtime_ns for path in kept} == kept and sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize("name", ["regression", "single"])
def test_ranks_ablate_as_one_process_does(
    opened: dict[str, Opened], undisturbed: dict[str, dict[str, Tensor]], tmp_path: Path, name: str
) -> None:
    ended = forked(2, lambda ranks: numbers(study_of(opened[name], Share(ranks)).scores(MEASURES)), tmp_path)
    for one in ended:
        assert one.error == "" and same_bits(one.given, undisturbed[name])


def test_finished_rows_are_read_and_not_run(
    opened: dict[str, Opened], undisturbed: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    study_of(opened["single"], Share(work=WorkFolder(tmp_path))).scores(MEASURES)
    first = tmp_path / "pass-1-unit-000000.safetensors"
    state = load_file(first)
    assert state["ablated/rows"].dtype == state["alone/rows"].dtype == torch.float64
    units = [load_file(path) for path in sorted(tmp_path.glob("pass-1-*"))]
    for kind in ("ablated", "alone"):
        counts = [len(unit[f"{kind}/numbers"]) for unit in units]
        assert counts == [4, 4, 4, 2], "each unit holds its own examples alone"
    state["ablated/rows"][0] += 7.0 * COPIES
    save_file(state, first, metadata={"fingerprint": json.dumps(_fingerprint(first))})
    for path in tmp_path.glob("pass-2-*"):
        path.unlink()
    found = numbers(study_of(opened["single"], Share(work=WorkFolder(tmp_path))).scores(MEASURES))
    assert_close(found["ablation"], undisturbed["single"]["ablation"] + 1.0, rtol=1e-9, atol=0)


def test_notes_come_once_and_every_run_is_a_step(opened: dict[str, Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch may take longer than ranks wait for each other."""
    steps: list[int] = []
    monkeypatch.setattr(Share, "step", lambda self: steps.append(1))
    monkeypatch.setattr("headscope.replay.Replay.notes", ("a route",), raising=False)
    study = study_of(opened["single"])
    told: list[tuple[int, int]] = []
    scores = study.scores(MEASURES, progress=lambda *one: told.append(one))
    heads, count = sum(site.n_heads for site in study.sites), 7 * COPIES
    assert len(steps) == count * (1 + heads + heads) + 2 * count
    assert told == [(done, count) for done in range(1, count + 1)]
    assert scores.notes.count("a route") == 1


def test_a_budget_is_for_one_process_that_keeps_nothing(opened: dict[str, Opened], tmp_path: Path) -> None:
    share = Share(work=WorkFolder(tmp_path / "work"))
    for study in (study_of(opened["single"], share, budget=9), study_of(opened["single"], share, budget=13)):
        with pytest.raises(UsageError, match="draws from all examples as it goes") as caught:
            study.scores(["ablation"])
        assert "exact ablation" in str(caught.value.hint)
        with pytest.raises(UsageError, match="draws from all examples as it goes"):
            study.ablate([study.sites[0].heads[:1]])
    assert not (tmp_path / "work").exists()
    enough = study_of(opened["single"], share, budget=7 * COPIES)
    assert enough.scores(["ablation"]).examples == 7 * COPIES, "all of them: exact"


def test_rows_of_other_ablations_are_refused(opened: dict[str, Opened], tmp_path: Path) -> None:
    def ablate(number: int) -> Tensor:
        study = study_of(opened["single"], Share(work=WorkFolder(tmp_path)))
        return study.ablate([[study.sites[0].heads[number]]]).change

    assert torch.equal(ablate(0), ablate(0))
    with pytest.raises(WorkError, match="units of another run: measured pairs is"):
        ablate(1)


def few(opened: Opened, first: int, stop: int) -> Study:
    """A study of a few of the examples."""
    study, examples = study_of(opened), opened.study.examples
    assert examples is not None
    found = Study(study.loaded, replace(examples, items=examples.items[first:stop]), study.options)
    found.__dict__["discovery"] = study.discovery
    return found


def test_rows_stand_under_the_number_of_their_example(opened: dict[str, Opened]) -> None:
    case = opened["single"]
    head, together = [case.study.sites[0].heads[0]], few(case, 0, 6)
    found = together.ablate([head]).changes
    assert sorted(found) == list(range(6)) and len(set(map(float, found.values()))) > 3, "some rows stand there twice"
    for number in range(6):
        alone = few(case, number, number + 1).ablate([head]).changes
        assert_close(found[number], alone[number], rtol=1e-9, atol=0)


def test_rows_without_losses_of_heads_alone_are_refused_to_who_wants_them(
    opened: dict[str, Opened], tmp_path: Path
) -> None:
    for measures in (["ablation"], ["ablation", "only"]):
        study = few(opened["single"], 0, 1)
        study.share = Share(work=WorkFolder(tmp_path / measures[-1]))
        study.scores(measures)
        for path in (tmp_path / measures[-1]).glob("pass-2-*"):  # as if it was killed before
            path.unlink()
    for measures, kept in ((["ablation", "only"], "ablation"), (["ablation"], "only")):
        study.share = Share(work=WorkFolder(tmp_path / kept))
        with pytest.raises(WorkError, match="units of another run: measure"):
            study.scores(measures)


def test_starting_anew_keeps_the_passes_made_before(opened: dict[str, Opened], tmp_path: Path) -> None:
    for _ in range(2):
        study = few(opened["single"], 0, 1)
        study.share = Share(work=WorkFolder(tmp_path, anew=True))
        study.scores(["only"])
        assert [path.name[:6] for path in sorted(tmp_path.iterdir())] == ["pass-1", "pass-2"]


def test_auto_begins_with_scores_of_what_the_mender_works_by(opened: dict[str, Opened], tmp_path: Path) -> None:
    """Which are noisy copies, where the model has learned the examples by heart."""
    study, copies = few(opened["single"], 0, 4), few(opened["single"], 4, 8)
    share, request = Share(work=WorkFolder(tmp_path)), Request(ratio=0.3)
    found = shared_scores(study, request, share, mender=SimpleNamespace(study=copies))  # type: ignore[arg-type]
    assert list(found) == ["importance", "sensitivity"] and len(list(tmp_path.iterdir())) == 2
    assert study.share.alone and copies.share.alone, "what follows is for one process"
    for criterion, scores in found.items():
        assert scores == load_criterion(criterion).scores(copies, 0) != load_criterion(criterion).scores(study, 0)


def test_a_choice_takes_the_scores_that_were_shared(
    opened: dict[str, Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = opened["single"].study
    assert study.examples is not None
    options = PruneOptions(Request(ratio=0.3, criterion="importance"), study=study.options, compensate=False)
    pruning = Pruning(study.loaded.location.name, study.examples.name, options)
    pruning.share(Share(work=WorkFolder(tmp_path)), None)
    assert [path.name[:6] for path in tmp_path.iterdir()] == ["pass-1"]
    monkeypatch.setattr(Study, "scores", lambda *_, **__: pytest.fail("measured again"))
    wanted = sorted(pruning.known["importance"], key=pruning.known["importance"].__getitem__)[:3]
    assert pruning.run(None, None).plan.removed == tuple(sorted(wanted))


@pytest.fixture(scope="module")
def other(opened: dict[str, Opened], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the classifier with one weight changed."""
    return changed(opened["single"], tmp_path_factory.mktemp("other") / "model", 0.5)


def changed(opened: Opened, folder: Path, by: float) -> Path:
    shutil.copytree(opened.study.loaded.location.folder, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "query.weight" in name)
    weights[name][0] += by
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def judged(opened: Opened, other: Path, share: Share | None = None, **settings: Any) -> Judged:
    loaded, examples = opened.study.loaded, opened.study.examples
    assert examples is not None
    options = replace(opened.study.options, batch_size=1)
    return judge_models([loaded.location.name, str(other)], examples.name, options, share=share, **settings)


def bits(found: Judged) -> dict[str, Tensor]:
    """Every number of the judgements, and of what metrics are resampled from."""
    numbers: dict[str, Tensor] = {}
    for model, one in enumerate(found.found):
        assert one.predictions is not None
        numbers |= {f"{model} loss": one.losses, f"{model} divergence": one.divergences}
        numbers[f"{model} metric"] = torch.tensor(one.metric)
        arrays = {name: getattr(one.predictions, name) for name in ("example", "prediction", "target", "loss")}
        numbers |= {f"{model} {name}": torch.from_numpy(array) for name, array in arrays.items()}
    return numbers


def test_judgements_are_shared_kept_and_resumed(opened: dict[str, Opened], other: Path, tmp_path: Path) -> None:
    wanted = bits(judged(opened["single"], other))
    assert wanted["1 divergence"].any() and not wanted["0 divergence"].any() and len(wanted["0 loss"]) == 7 * COPIES

    def job(ranks: Ranks) -> dict[str, Tensor]:
        return bits(judged(opened["single"], other, Share(ranks, WorkFolder(tmp_path / "work"))))

    for one in forked(2, job, tmp_path):
        assert one.error == "" and same_bits(one.given, wanted)
    files = sorted((tmp_path / "work").iterdir())
    assert len(files) == 4
    for path in files[::2]:
        path.unlink()
    kept = files[1].stat().st_mtime_ns
    found = judged(opened["single"], other, Share(work=WorkFolder(tmp_path / "work")))
    assert same_bits(bits(found), wanted) and files[1].stat().st_mtime_ns == kept
    f1 = judged(opened["single"], other, Share(work=WorkFolder(tmp_path / "work")), metric="f1")
    assert f1.found[0].metric_name == "f1" and files[1].stat().st_mtime_ns == kept, "units serve every metric"


def test_judgements_without_labels_are_kept_too(tmp_path: Path) -> None:
    case = open_case(CASES["embedding"], tmp_path / "case")
    other = changed(case, tmp_path / "other", 0.5)
    wanted = judged(case, other)
    for _ in range(2):
        found = judged(case, other, Share(work=WorkFolder(tmp_path / "work")))
        assert torch.equal(found.found[1].divergences, wanted.found[1].divergences) and found.found[1].loss is None
    assert wanted.found[1].divergence > 0 and len(list((tmp_path / "work").iterdir())) > 0


def test_judgements_of_other_models_are_refused(opened: dict[str, Opened], other: Path, tmp_path: Path) -> None:
    def work() -> Share:
        return Share(work=WorkFolder(tmp_path / "work"))

    judged(opened["single"], other, work())
    third = changed(opened["single"], tmp_path / "third", 0.25)
    with pytest.raises(WorkError, match="units of another run: model of model 2 is"):
        judged(opened["single"], third, work())
    place, examples = opened["single"].study.loaded.location.name, opened["single"].study.examples
    assert examples is not None
    options = replace(opened["single"].study.options, batch_size=1)
    with pytest.raises(WorkError, match="units of another run: models is '1' and was '2'"):
        judge_models([place], examples.name, options, share=work())
    with pytest.raises(WorkError, match="units of another run: measures is"):
        study_of(opened["single"], work()).scores(["importance"])


def test_what_is_timed_beside_others_says_so(opened: dict[str, Opened], other: Path) -> None:
    found = judged(opened["single"], other)
    for alone in (True, False):
        notes = found.report(tokens=8, speed=[1], alone=alone).table.notes
        said = [
            note for note in notes if note.startswith("timed by rank 0 alone, after all others had ended, threads:")
        ]
        assert len(said) == alone
