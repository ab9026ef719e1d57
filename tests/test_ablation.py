"""Exact ablation equals passes with gates, one at a time; groups, metrics, notes, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import zoo
from checkpoints import command, refused
from conftest import SAMPLES, TEST_FILES, slow_if
from task_cases import CASES, LABELLED, Open, open_case, opener
from test_behaviours import smollm2
from test_objective import hooks
from test_only import SHARED, transformers_losses
from torch import Tensor, nn
from torch.testing import assert_close

from headscope.capture import gate
from headscope.data import DataOptions
from headscope.discovery import find_sites
from headscope.errors import DataError, UsageError
from headscope.estimate import estimate
from headscope.evaluation import judge
from headscope.heads import HeadId, SiteId
from headscope.models import LoadOptions
from headscope.objective import Objective
from headscope.replay import Recording, Replay, without_heads
from headscope.study import Scores, Study, StudyOptions, batches
from headscope.sums import spearman

DIGITS = SAMPLES / "vit-digits"
REACHED = tuple(
    [
        "bert",
        "distilbert",
        "deberta-v2",
        "gpt2",
        "gptj",
        "bloom",
        "falcon-mqa",
        "mpt",
        "llama",
        "gemma2",
        "bitnet",
        "vit",
        "swin",
        "clip",
        "wav2vec2",
    ]
)
"""Post- and pre-norm, fused and interleaved, parallel attention, residual sums inside the module, mixed heads, groups,
windows, two towers, and (wav2vec2) tensors that are changed in place."""


COSTLY = {name for name in LABELLED if name not in ("single", "causal-llama", "masked", "pair", "regression")}
"""Tasks whose metric is compared in the slow run; those left have metrics of losses, of counts, and of all examples."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return opener(tmp_path_factory)


def sample(name: str, limit: int, **options: Any) -> Study:
    folder = SAMPLES / name
    length = None if name == "vit-digits" else 12
    data = DataOptions(limit=limit, max_length=length, on_long="truncate")
    chosen = StudyOptions(LoadOptions(dtype="float64"), data, **options)
    return Study.open(str(folder), str(folder / TEST_FILES[name]), chosen)


def naive(study: Study, groups: list[list[HeadId]]) -> dict[str, Tensor]:
    """Changes of losses, `[example group]`, and of the metric, `[group]`, by a whole pass with gates for each group."""
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)

    def run(gone: list[HeadId]) -> Callable[[Any], Tensor]:
        gates = {site.id: torch.tensor([float(head not in gone) for head in site.heads]) for site in study.sites}

        def forward(batch: Any) -> Tensor:
            with gate(study.loaded.model, gates, study.sites):
                return objective.forward(batch)

        return forward

    whole, *without = judge(
        [run([]), *(run(group) for group in groups)], study.loaded.task, study.loaded.task_name, batches(study)
    )
    nothing = float("nan")
    metric = [nothing if one.metric is None or whole.metric is None else one.metric - whole.metric for one in without]
    changes = torch.stack([one.losses - whole.losses for one in without], dim=1)
    return {"changes": changes, "metric": torch.tensor(metric, dtype=torch.float64)}


def heads_of(study: Study) -> list[list[HeadId]]:
    return [[head] for site in study.sites for head in site.heads]


def joined(scores: Scores, column: str) -> Tensor:
    return torch.cat(list(scores.values[column].values()))


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("vit-digits", 3),
        pytest.param("llama-gqa-web", 2, marks=pytest.mark.slow),
        pytest.param("sentiment-minilm", 2, marks=pytest.mark.slow),
        pytest.param("t5-g2p", 3, marks=pytest.mark.slow),
    ],
)
def test_samples_equal_passes_with_gates(name: str, limit: int) -> None:
    study = sample(name, limit)
    scores, wanted = study.scores(["ablation"]), naive(study, heads_of(study))
    changes = wanted["changes"]
    assert_close(joined(scores, "ablation"), changes.mean(dim=0), rtol=0, atol=1e-10)
    assert_close(joined(scores, "ablation_se"), changes.std(dim=0) / limit**0.5, rtol=0, atol=1e-8)
    assert_close(joined(scores, "ablation_metric"), wanted["metric"], rtol=1e-10, atol=1e-10)
    assert float(changes.abs().max()) > 1e-3
    assert not scores.notes  # every site was reached


@pytest.mark.parametrize("name", [name for name in zoo.SPECIMENS if name in REACHED])
def test_architectures_equal_passes_with_gates(name: str) -> None:
    replayed_equals_gated(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.SPECIMENS if name not in REACHED])
def test_other_architectures_equal_passes_with_gates(name: str) -> None:
    replayed_equals_gated(name)


def replayed_equals_gated(name: str) -> None:
    specimen = zoo.SPECIMENS[name]
    model = specimen.build().requires_grad_(False)
    sites, batch = find_sites(model).sites, specimen.inputs(model)
    replay = Replay.of(model, sites)
    assert replay.notes or set(replay.routes) == {site.id for site in sites}
    assert bool(replay.notes) == name.startswith("albert")
    seen = Recording()
    with torch.no_grad():
        with replay.recording(seen):
            whole = first(model(**batch))
        assert replay.usable(seen)
        for site in sites:
            for head in range(site.n_heads):
                gates = torch.ones(site.n_heads)
                gates[head] = 0
                with gate(model, {site.id: gates}, sites):
                    wanted = first(model(**batch))
                with replay.without({site.id: (head,)}, seen):
                    found = first(model(**batch))
                assert_close(found, wanted, rtol=1e-11, atol=1e-11 * float(wanted.abs().max()), equal_nan=True)
                assert float((wanted - whole).nan_to_num().abs().max()) > 1e-6
    assert_untouched(model)


def first(output: Any) -> Tensor:
    """What a model says: its logits, or those of both towers."""
    if "logits_per_text" in output:
        return output.logits_per_text
    return output.logits if "logits" in output else output[0]


def assert_untouched(model: nn.Module) -> None:
    assert hooks(model) == 0
    assert not [path for path, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize(
    "name",
    slow_if(
        ["single", "causal-gpt2", "causal-llama", "seq2seq-t5", "masked", "regression"],
        ["causal-gpt2", "seq2seq-t5", "masked", "regression"],
    ),
)
def test_ablation_is_a_loop_over_gates_through_transformers_loss(name: str, opened: Open) -> None:
    case = opened(name)
    places: dict[object, Any] = {}
    for site, path in case.case.paths().items():
        n_heads = zoo.at(case.case.recipe.n_heads, site.rpartition(".")[0])
        module = case.model.get_submodule(path)
        width = module.weight.shape[0 if "c_proj" in path else 1] // n_heads
        places[site] = (module, [channel // width for channel in range(n_heads * width)])
    with reference.GateTensors(places, torch.float64) as gates:
        wanted = reference.ablation(gates, transformers_losses(case))
    scores = case.scores("ablation", batch_size=3)
    for site, values in scores.values["ablation"].items():
        changes = wanted[str(site)]
        assert_close(values, changes.mean(dim=0), rtol=1e-9, atol=1e-11)
        error = changes.std(dim=0) / len(changes) ** 0.5
        assert_close(scores.values["ablation_se"][site], error, rtol=1e-6, atol=1e-9)
    assert_close(
        joined(case.scores("ablation", batch_size=1), "ablation"), joined(scores, "ablation"), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("name", slow_if(LABELLED, COSTLY))
def test_the_metric_of_every_task(name: str, opened: Open) -> None:
    case = opened(name)
    study = case.study
    wanted = naive(study, heads_of(study))["metric"]
    found = joined(case.scores("ablation", batch_size=3), "ablation_metric")
    assert_close(found, wanted, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert wanted.isfinite().all()


def test_only_what_is_behind_a_head_runs_again(opened: Open) -> None:
    case = opened("single")
    model = case.study.loaded.model
    calls = {path: 0 for path in ("embeddings.LayerNorm", *(f"encoder.layer.{n}.output.dense" for n in (0, 1)))}
    calls |= {f"encoder.layer.{n}.attention.self.query": 0 for n in (0, 1)}

    def count(path: str) -> Callable[..., None]:
        return lambda *_: calls.__setitem__(path, calls[path] + 1)

    handles = [model.bert.get_submodule(path).register_forward_pre_hook(count(path)) for path in calls]
    case.scores("ablation", batch_size=7)
    for handle in handles:
        handle.remove()
    proof, watched = 2 * 3, 1  # trace, recording and two runs a site on made-up inputs; the pass that counts examples
    assert calls["embeddings.LayerNorm"] <= proof + watched + 1
    layers = [calls[f"encoder.layer.{n}.output.dense"] for n in (0, 1)]
    assert layers[1] - layers[0] == 5 + 1  # heads of the second layer leave the first alone, in its proof too
    queries = [calls[f"encoder.layer.{n}.attention.self.query"] for n in (0, 1)]
    assert queries[1] - queries[0] == 5 + 1  # and those of the first run the second


def test_a_group_goes_at_once(opened: Open) -> None:
    study = opened("causal-llama").study
    site = study.sites[0]
    groups = [[HeadId(site.id, number) for number in group] for group in site.groups]
    groups.append([groups[0][0], HeadId(study.sites[1].id, 3)])  # heads of two sites
    found, wanted = study.ablate(groups), naive(study, groups)
    assert_close(found.change, wanted["changes"].mean(dim=0), rtol=1e-9, atol=1e-12)
    assert_close(found.metric, wanted["metric"], rtol=1e-9, atol=1e-12)
    single = study.ablate([[head] for head in groups[0]])
    assert abs(float(single.change.sum() - found.change[0])) > 1e-4
    with pytest.raises(UsageError, match=r"the model has no head decoder\.causal\.0\.99"):
        study.ablate([[HeadId(site.id, 99)]])
    with pytest.raises(UsageError, match="a group names no head"):
        study.ablate([[]])


def test_a_shared_module_takes_whole_passes_and_says_so(tmp_path: Path) -> None:
    case = open_case(SHARED, tmp_path)
    scores = case.scores("ablation")
    (note,) = scores.notes
    assert note.startswith("encoder.self.0, encoder.self.1") and "whole pass" in note
    assert_close(
        joined(scores, "ablation"),
        naive(case.study, heads_of(case.study))["changes"].mean(dim=0),
        rtol=1e-9,
        atol=1e-12,
    )


def test_what_changed_in_place_is_not_used_again() -> None:
    seen = Recording()
    kept, changed = torch.ones(3), torch.ones(3)
    seen.keep("kept", (kept,), (kept, None))
    seen.keep("changed", (kept,), (kept, changed))
    changed.add_(1)
    seen.settle()
    assert set(seen.outputs) == {"kept"} and set(seen.inputs) == {"kept", "changed"}


def test_a_carrier_that_did_more_than_in_its_proof_runs_again(opened: Open) -> None:
    study = opened("causal-llama").study
    model, site = study.loaded.model, study.sites[0]
    replay, seen = Replay.of(model, study.sites), Recording()
    (batch,) = study.examples.batches(7, tokens=0)  # type: ignore[union-attr]
    removed: dict[SiteId, tuple[int, ...]] = {site.id: (1,)}
    with torch.no_grad():
        with replay.recording(seen):
            model(**batch.inputs)
        carrier = replay.routes[site.id].carrier
        assert carrier is not None and carrier != site.output
        seen.outputs[carrier] = tuple(
            2 * item if item is seen.outputs[site.output] else item for item in seen.outputs[carrier]
        )
        with replay.without(removed, seen):
            found = model(**batch.inputs).logits
        with replay.without(removed):
            wanted = model(**batch.inputs).logits
    assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_another_course_of_modules_is_not_replayed(opened: Open) -> None:
    study = opened("single").study
    model = study.loaded.model
    replay = Replay.of(model, study.sites)
    (batch,) = study.examples.batches(7, tokens=0)  # type: ignore[union-attr]
    seen = Recording()
    removed: dict[SiteId, tuple[int, ...]] = {study.sites[1].id: (2,)}
    with torch.no_grad():
        with replay.recording(seen):
            model(**batch.inputs)
        seen.order.reverse()
        seen.outputs = {path: None for path in seen.outputs}  # would fail if used
        with replay.without(removed, seen):
            found = model(**batch.inputs).logits
        with replay.without(removed):
            wanted = model(**batch.inputs).logits
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_projection_without_heads(dtype: torch.dtype) -> None:
    model = zoo.SPECIMENS["gpt2"].build().to(dtype)
    site = find_sites(model).sites[0]
    projection = model.get_submodule(site.output)
    z = torch.randn(2, 3, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    gated = z.clone()
    gated[..., 6:12] = 0
    gated[..., 24:] = 0
    with torch.no_grad():
        found = without_heads(projection, site, z, projection(z), (1, 4))
        wanted = projection(gated)
    if dtype == torch.bfloat16:
        assert torch.equal(found, wanted)  # a subtraction would lose digits
    assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_measures_do_not_disturb_each_other(opened: Open) -> None:
    case = opened("causal-llama")
    others = ("attention", "importance", "effect", "only")
    apart, together = case.scores(*others), case.scores("ablation", *others)
    for column, values in apart.values.items():
        for site, value in values.items():
            assert_close(together.values[column][site], value, rtol=0, atol=0, equal_nan=True)
    assert_close(joined(together, "ablation"), joined(case.scores("ablation"), "ablation"), rtol=0, atol=0)
    assert together.loss == apart.loss
    assert {"ablation", "only", "importance", "effect"} == set(together.stability)


def test_the_model_is_left_as_it_was(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    case = opened("causal-llama")
    model = case.study.loaded.model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    case.scores("ablation")
    assert_untouched(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    body = Objective._rows
    calls: list[int] = []

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 9:  # inside an ablation
            assert any("forward" in module.__dict__ for module in model.modules())
            raise RuntimeError("planted")
        return body(*args)

    monkeypatch.setattr(Objective, "_rows", fail)
    with pytest.raises(RuntimeError, match="planted"):
        case.scores("ablation", batch_size=7)
    assert_untouched(model)


def test_memory_that_runs_out_halves_the_batch(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    case = opened("single")
    expected = case.scores("ablation", batch_size=4)
    say = Objective.say

    def small(self: Objective, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if len(batch) > 2:
            raise MemoryError
        return say(self, batch, *args, **kwargs)

    monkeypatch.setattr(Objective, "say", small)
    scores = case.scores("ablation", batch_size=4)
    assert len([note for note in scores.notes if "memory ran out" in note]) == 1
    assert_close(joined(scores, "ablation"), joined(expected, "ablation"), rtol=1e-9, atol=1e-12)
    assert_close(joined(scores, "ablation_metric"), joined(expected, "ablation_metric"), rtol=1e-9, atol=1e-12)


def test_a_loss_that_is_not_finite_stops_the_run(opened: Open, tmp_path: Path) -> None:
    case = open_case(CASES["single"], tmp_path)
    assert case.study.examples is not None
    worst = max(case.study.examples.items, key=lambda item: item.length)
    case.study.loaded.model.bert.embeddings.position_embeddings.weight.data[worst.length - 1] = torch.inf
    with pytest.raises(DataError, match=f"the loss of example {worst.number} is not finite"):
        case.scores("ablation", batch_size=1)
    assert_untouched(case.study.loaded.model)


def test_labels_are_needed(opened: Open) -> None:
    with pytest.raises(UsageError, match=r"^ablation needs labels, and .*rows\.jsonl has none for this model"):
        opened("embedding").scores("ablation")
    with pytest.raises(UsageError, match="ablation needs data with labels"):
        opened("embedding").study.ablate([])


def test_progress_is_told_once_for_each_example(opened: Open) -> None:
    told: list[tuple[int, int]] = []
    opened("single").study.scores(["ablation"], progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (7, 7)


def test_a_dry_run_counts_the_passes() -> None:
    options = StudyOptions(data=DataOptions(limit=6))
    table = estimate(str(DIGITS), str(DIGITS / "test.csv"), options, ["ablation"])
    assert {row["item"]: row["value"] for row in table.rows}["passes"] == pytest.approx(2 + 0.55 * 32)


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    run = command(monkeypatch, capsysbinary)
    ask = ("inspect", DIGITS, "--data", DIGITS / "test.csv", "--limit", "20", "--measures", "ablation")
    ran = run(*ask)
    assert ran.code == 0, ran.err
    header, *rows = ran.rows
    assert header[-3:] == ["ablation", "ablation_se", "ablation_metric"]
    assert len({row[-3] for row in rows}) == 32 and all(row[-1] for row in rows)
    assert "rank correlation of ablation" in ran.err
    few = run(*ask, "--budget", "12")
    assert few.code == 0, few.err
    assert all(row[-3] and float(row[-2]) > 0 and row[-1] == "" for row in few.rows[1:])
    assert "rank correlation" not in few.err
    assert "ablation is estimated: 12 to 12 exact runs each, of 20 examples" in few.err
    assert {row[-3] for row in few.rows} != {row[-3] for row in ran.rows}
    enough = run(*ask, "--budget", "20")  # all of them: exact
    assert enough.rows == ran.rows
    refused(run(*ask[:-1], "ablation,only", "--budget", "11"), 2, "--budget 11", "12 or more")
    refused(run(*ask, "--budget", "0"), 2, "--budget 0: expected a positive whole number")


@pytest.mark.slow
def test_effect_ranks_heads_as_ablation_does_on_a_real_language_model(tmp_path: Path) -> None:
    file = smollm2()
    texts = (SAMPLES / "llama-gqa-web" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:24]
    data = tmp_path / "texts.jsonl"
    data.write_text("\n".join(texts) + "\n", encoding="utf-8")
    options = StudyOptions(data=DataOptions(limit=24, max_length=48, on_long="truncate"), draws=2)
    scores = Study.open(str(file), str(data), options).scores(["ablation", "effect", "importance"])
    exact = joined(scores, "ablation").tolist()
    assert len(exact) == 270
    effect, michel = (spearman(joined(scores, name).tolist(), exact) for name in ("effect", "importance"))
    print(f"Spearman with ablation: effect {effect:.3f}, importance {michel:.3f}")
    assert effect >= 0.9 > michel
