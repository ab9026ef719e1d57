"""The loss with one head left in its site equals explicit gates through transformers' loss; nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import zoo
from checkpoints import command, refused
from conftest import SAMPLES, TEST_FILES
from task_cases import BERT, CASES, Opened, open_case, recipe
from task_reference import asked
from test_objective import hooks
from torch import Tensor
from torch.testing import assert_close

from headscope import gated as gated_module
from headscope.data import DataOptions
from headscope.errors import DataError, UsageError
from headscope.estimate import estimate
from headscope.models import LoadOptions
from headscope.objective import Objective
from headscope.scores import LABELS, Need
from headscope.study import Study, StudyOptions, batches, load_scores
from headscope.sums import spearman

DIGITS = SAMPLES / "vit-digits"
ONE_HEAD = replace(
    CASES["single"],
    recipe=replace(recipe("bert", "BertForSequenceClassification", num_labels=3, num_attention_heads=1), n_heads=1),
    projections=BERT,
)
ALBERT = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense"
SHARED = replace(
    CASES["single"],
    recipe=recipe("albert", "AlbertForSequenceClassification", num_labels=3),
    projections={"encoder.self": ALBERT},
)
NAMES = ["single", "causal-gpt2", "causal-llama", "seq2seq-t5", "masked", "regression"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """Opens each case once."""
    known: dict[str, Opened] = {}

    def find(name: str) -> Opened:
        if name not in known:
            case = replace(CASES[name], rows=CASES[name].rows[:4])
            known[name] = open_case(case, tmp_path_factory.mktemp(name))
        return known[name]

    return find


def transformers_losses(case: Opened) -> Callable[[], list[float]]:
    """The losses of all rows, one at a time, as transformers computes them."""
    arguments = [asked(case, row) for row in case.case.rows]
    return lambda: [float(case.model(**one).loss) for one in arguments]


def wanted(case: Opened) -> dict[str, Tensor]:
    """The column by a loop over heads and rows with gates as tensors."""
    places: dict[object, Any] = {}
    for site, path in case.case.paths().items():
        n_heads = zoo.at(case.case.recipe.n_heads, site.rpartition(".")[0])
        module = case.model.get_submodule(path)
        width = module.weight.shape[0 if "c_proj" in path else 1] // n_heads
        places[site] = (module, [channel // width for channel in range(n_heads * width)])
    with reference.GateTensors(places, torch.float64) as gates:
        return {str(site): values for site, values in reference.only(gates, transformers_losses(case)).items()}


def measured(case: Opened, *measures: str, **options: Any) -> dict[str, Tensor]:
    found = case.scores(*(measures or ("only",)), **options).values["only"]
    return {str(site): values for site, values in found.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for site, values in expected.items():
        assert_close(found[site], values, rtol=1e-9, atol=0, msg=lambda text, site=site: f"{site}: {text}")


@pytest.mark.parametrize("name", NAMES)
def test_only_is_a_loop_over_gates_through_transformers_loss(name: str, opened: Callable[[str], Opened]) -> None:
    case = opened(name)
    found = measured(case, batch_size=3)
    assert_same(found, wanted(case))  # the loop takes one row at a time, without padding
    assert len({float(value) for values in found.values() for value in values}) == sum(map(len, found.values()))
    if name == "seq2seq-t5":
        assert {site.rpartition(".")[0] for site in found} == {"encoder.self", "decoder.causal", "decoder.cross"}


@pytest.mark.parametrize("name", ["single", "causal-gpt2", "causal-llama"])
def test_batch_size_changes_nothing(name: str, opened: Callable[[str], Opened]) -> None:
    alone = measured(opened(name), batch_size=1)
    for size in (3, 4, None):
        assert_same(measured(opened(name), batch_size=size), alone)


@pytest.mark.parametrize("name", ["single", "causal-llama"])
def test_measures_do_not_disturb_each_other(name: str, opened: Callable[[str], Opened]) -> None:
    case = opened(name)
    others = ("attention", "importance", "sensitivity")
    apart, together = case.scores(*others), case.scores("only", *others)
    assert_same({str(site): values for site, values in together.values["only"].items()}, measured(case))
    for column, values in apart.values.items():
        for site, value in values.items():
            assert_close(together.values[column][site], value, rtol=0, atol=0, equal_nan=True)
    assert together.loss == apart.loss
    assert set(together.stability) == {"only", "importance", "sensitivity"}
    assert_same(measured(case, "only", "attention"), measured(case))  # the reader computes attention itself


def test_stability_compares_the_halves_of_the_examples(opened: Callable[[str], Opened]) -> None:
    case = opened("single")
    study = case.study
    assert study.examples is not None
    assert [item.number for item in sorted(study.examples.items, key=lambda item: item.length)] != [0, 1, 2, 3]
    rankings: list[list[float]] = []
    for half in (0, 1):
        kept = replace(study.examples, items=tuple(item for item in study.examples.items if item.number % 2 == half))
        found = Study(study.loaded, kept, study.options).scores(["only"]).values["only"]
        rankings.append(torch.cat(list(found.values())).tolist())
    assert case.scores("only").stability["only"] == pytest.approx(spearman(*rankings), abs=1e-12)


def test_a_head_that_is_the_only_one_gives_the_plain_loss(tmp_path: Path) -> None:
    case = open_case(ONE_HEAD, tmp_path)
    scores = case.scores("only")
    plain = torch.tensor([scores.loss], dtype=torch.float64)
    assert len(scores.values["only"]) == 2
    for values in scores.values["only"].values():
        assert_close(values, plain, rtol=1e-14, atol=0)


def test_a_shared_module_is_gated_in_one_layer_only(tmp_path: Path) -> None:
    case = open_case(SHARED, tmp_path)
    projection, losses = case.model.get_submodule(ALBERT), transformers_losses(case)
    layers = case.model.config.num_hidden_layers
    assert layers > 1
    found = measured(case)
    assert list(found) == [f"encoder.self.{layer}" for layer in range(layers)]
    calls = [0]
    for layer in range(layers):
        for head in range(5):

            def scale(module: Any, args: Any, layer: int = layer, head: int = head) -> Any:
                calls[0] += 1
                if (calls[0] - 1) % layers != layer:
                    return None
                kept = torch.arange(30) // 6 == head
                return (args[0] * kept,)

            with torch.no_grad():
                handle = projection.register_forward_pre_hook(scale)
                each = losses()
                handle.remove()
            assert float(found[f"encoder.self.{layer}"][head]) == pytest.approx(sum(each) / len(each), rel=1e-9)
    assert len({float(value) for values in found.values() for value in values}) == 5 * layers


def test_losses_are_those_of_transformers_without_a_graph(opened: Callable[[str], Opened]) -> None:
    case = opened("causal-gpt2")
    study = case.study
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    (batch,) = study.examples.batches(4, tokens=0)  # type: ignore[union-attr]
    found = objective.losses(batch)
    expected = torch.tensor(transformers_losses(case)(), dtype=torch.float64)
    assert (found.dtype, found.requires_grad) == (torch.float64, False)
    assert_close(found.sort().values, expected.sort().values, rtol=1e-9, atol=0)


def test_the_model_is_left_as_it_was(opened: Callable[[str], Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    case = opened("causal-llama")
    model = case.study.loaded.model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    measured(case)
    assert hooks(model) == 0
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.is_grad_enabled()

    def fail(*_: Any) -> Any:
        assert hooks(model) > 0
        raise RuntimeError("planted")

    monkeypatch.setattr(Objective, "losses", fail)
    with pytest.raises(RuntimeError, match="planted"):
        measured(case)
    assert hooks(model) == 0
    assert torch.is_grad_enabled()


def test_heads_are_gated_only_when_asked_for(opened: Callable[[str], Opened]) -> None:
    case = opened("single")
    count = len(batches(case.study))
    passes = {name: count_passes(case, name) for name in ("importance", "only")}
    assert passes == {"importance": count, "only": count * (1 + 10)}


def count_passes(case: Opened, measure: str) -> int:
    """How often the model runs for a measure."""
    calls: list[int] = []
    handle = case.study.loaded.model.register_forward_pre_hook(lambda *_: calls.append(1))
    case.scores(measure)
    handle.remove()
    return len(calls)


def test_memory_that_runs_out_halves_the_batch(
    opened: Callable[[str], Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = opened("single")
    expected = measured(case, batch_size=4)
    run = gated_module.alone

    def small(objective: Objective, batch: Any) -> Tensor:
        if len(batch) > 2:
            raise MemoryError
        return run(objective, batch)

    monkeypatch.setattr(gated_module, "alone", small)
    scores = case.scores("only", batch_size=4)
    assert len([note for note in scores.notes if "memory ran out" in note]) == 1
    assert_same({str(site): values for site, values in scores.values["only"].items()}, expected)


def test_progress_is_told_once_for_each_example(opened: Callable[[str], Opened]) -> None:
    study = opened("single").study
    told: list[tuple[int, int]] = []
    study.scores(["only", "importance"], progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (4, 4)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    case = open_case(CASES["single"], tmp_path)
    examples, model = case.study.examples, case.study.loaded.model
    assert examples is not None
    worst = max(examples.items, key=lambda item: item.length)
    model.bert.embeddings.position_embeddings.weight.data[worst.length - 1] = torch.inf
    with pytest.raises(DataError, match=f"the loss of example {worst.number} is not finite"):
        case.scores("only", batch_size=1)
    assert hooks(model) == 0


def test_labels_are_needed(opened: Callable[[str], Opened]) -> None:
    assert load_scores(["only"])["only"].needs & LABELS == {Need.ALONE}
    with pytest.raises(UsageError, match=r"^only needs labels, and .*rows\.jsonl has none for this model") as error:
        opened("embedding").scores("only")
    assert "--measures sensitivity" in str(error.value.hint)
    with pytest.raises(UsageError, match=r"^importance, only needs labels"):
        opened("embedding").scores("importance", "only", "sensitivity")
    with pytest.raises(UsageError, match="only cannot be measured without data"):
        Study(opened("single").study.loaded, None, StudyOptions()).scores(["only"])


@pytest.mark.parametrize(
    ("measures", "passes"), [(["only"], 33), (["importance"], 2), (["only", "importance"], 34), (["weights"], 0)]
)
def test_a_dry_run_counts_the_passes(measures: list[str], passes: int) -> None:
    options = StudyOptions(data=DataOptions(limit=6))
    table = estimate(str(DIGITS), str(DIGITS / "test.csv"), options, measures)
    assert {row["item"]: row["value"] for row in table.rows}["passes"] == passes


@pytest.mark.slow
def test_every_head_of_the_sentiment_sample_has_a_loss() -> None:
    folder = SAMPLES / "sentiment-minilm"
    options = StudyOptions(LoadOptions(dtype="float32"), DataOptions(limit=8, max_length=12))
    scores = Study.open(str(folder), str(folder / TEST_FILES[folder.name]), options).scores(["only"])
    values = torch.cat(list(scores.values["only"].values()))
    assert len(values) == 72
    assert torch.isfinite(values).all() and (values > 0).all()
    assert len({float(value) for value in values} - {scores.loss}) == 72


def test_the_command_line_gives_a_row_for_each_head(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run = command(monkeypatch, capsysbinary)
    ran = run("inspect", DIGITS, "--data", DIGITS / "test.csv", "--limit", "20", "--measures", "only")
    assert ran.code == 0, ran.err
    header, *rows = ran.rows
    assert header[-1] == "only" and "only_se" not in header
    assert len(rows) == 32
    assert all(float(row[-1]) > 0 for row in rows)
    assert "rank correlation of only" in ran.err
    assert refused(run("inspect", DIGITS, "--measures", "only"), 2, "only cannot be measured without data", "--data")
