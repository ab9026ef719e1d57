"""The objective holds logits in pieces, refuses NaN, and leaves the model as it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from task_cases import CASES, Case, Opened, open_case, recipe
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_configs import RECIPES, Recipe

from headscope import objective as objective_module
from headscope import study as study_module
from headscope.capture import watch
from headscope.discovery import find_sites
from headscope.errors import DataError
from headscope.objective import Objective, Wanted
from headscope.study import batches
from headscope.vocabulary import split

HEADS: dict[str, Recipe] = {
    "llama": RECIPES["llama"],
    "gpt2": RECIPES["gpt2"],
    "gemma2": recipe("gemma2", "Gemma2ForCausalLM", final_logit_softcapping=2.0),
    "cohere": recipe("cohere", "CohereForCausalLM", logit_scale=0.25),
    "bert": recipe("bert", "BertForMaskedLM"),
    "roberta": RECIPES["roberta"],
    "distilbert": RECIPES["distilbert"],
    "albert": RECIPES["albert"],
    "electra": recipe("electra", "ElectraForMaskedLM"),
    "modernbert": RECIPES["modernbert"],
    "opt": RECIPES["opt"],
    "gpt_neox": RECIPES["gpt_neox"],
    "t5": RECIPES["t5"],
    "bart": RECIPES["bart"],
    "marian": RECIPES["marian"],
}
LANGUAGE = ("causal-gpt2", "causal-llama", "masked", "seq2seq-t5", "seq2seq-bart")


def hooks(model: nn.Module) -> int:
    """Forward and backward hooks anywhere in the model, and forwards set on instances."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    counted = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return counted + sum("forward" in module.__dict__ for module in model.modules())


def measured(opened: Opened, *measures: str, **options: Any) -> tuple[dict[str, dict], tuple[str, ...]]:
    """Importance and sensitivity, or the measures named, and the notes."""
    scores = opened.scores(*(measures or ("importance", "sensitivity")), **options)
    return {column: dict(values) for column, values in scores.values.items()}, scores.notes


@pytest.mark.parametrize("name", HEADS)
def test_pieces_of_the_head_give_the_whole_logits(name: str) -> None:
    model = zoo.build(HEADS[name]).requires_grad_(False)
    inputs = zoo.inputs("text", model)
    head = split(model, find_sites(model).sites, inputs)
    assert head is not None
    with torch.no_grad():
        whole = model(**inputs).logits
        hidden = head.body(model, inputs)
        rows = torch.cat([head.logits(piece) for piece in hidden.flatten(0, 1).split(4)])
    assert hidden.shape[:2] == whole.shape[:2]
    assert hidden.shape[-1] != whole.shape[-1]  # the body stopped in front of the head
    assert_close(rows.view(whole.shape), whole, rtol=1e-12, atol=1e-12)
    assert hooks(model) == 0


class _Widest(TorchDispatchMode):
    """Remembers the most rows of any tensor whose last axis is the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return output


@pytest.mark.parametrize("name", ["causal-gpt2", "masked", "seq2seq-bart"])
def test_logits_are_never_held_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective_module, "CHUNK_VALUES", 53 * 16)
    rows = [row for _ in range(9) for row in CASES[name].rows]
    opened = open_case(dataclasses.replace(CASES[name], rows=rows), tmp_path)
    study, model = opened.study, opened.study.loaded.model
    objective = Objective(model, study.loaded.task, study.sites)
    assert study.examples is not None
    (batch,) = study.examples.batches(len(rows), tokens=0)
    width = 40 if name == "seq2seq-bart" else 30  # a transposed head is as wide as the vocabulary and has d_model rows
    with watch(model, study.sites) as seen, _Widest(53) as widest:
        pieces = objective.run(batch, seen, Wanted(gradient=True, draws=2))
    assert int(batch.positions.sum()) > 2 * width
    assert 16 <= widest.rows <= width
    objective.head = None
    with watch(model, study.sites) as seen, _Widest(53) as widest:
        whole = objective.run(batch, seen, Wanted(gradient=True, draws=2))
    assert widest.rows >= batch.targets.numel() - len(batch)  # the counter sees whole logits where they are
    assert_close(pieces.loss, whole.loss, rtol=1e-12, atol=0)
    for site, values in whole.gate.items():
        assert_close(pieces.gate[site], values, rtol=1e-9, atol=1e-12)
        assert_close(pieces.sampled[site], whole.sampled[site], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_head_that_cannot_be_split_gives_the_same_with_a_note(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_case(CASES[name], tmp_path)
    pieces, silent = measured(opened)
    assert not silent
    monkeypatch.setattr(objective_module, "split", lambda *_: None)
    whole, notes = measured(opened)
    assert [note for note in notes if "held whole" in note]
    for column, values in pieces.items():
        for site, wanted in values.items():
            assert_close(whole[column][site], wanted, rtol=1e-9, atol=1e-9)


def test_forward_gives_the_logits_of_predicted_positions(tmp_path: Path) -> None:
    opened = open_case(CASES["causal-gpt2"], tmp_path)
    objective = Objective(opened.study.loaded.model, opened.study.loaded.task, opened.study.sites)
    (batch,) = opened.study.examples.batches(7, tokens=0)  # type: ignore[union-attr]
    with torch.no_grad():
        rows = objective.forward(batch)
    assert rows.shape == (int(batch.positions.sum()), 53)
    logits = opened.model(input_ids=batch.inputs["input_ids"], attention_mask=batch.inputs["attention_mask"]).logits
    assert_close(rows, logits[batch.predicted], rtol=1e-9, atol=1e-12)


def dropout(case: Case) -> Case:
    config = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5, "classifier_dropout": 0.5}
    return dataclasses.replace(case, recipe=dataclasses.replace(case.recipe, config=case.recipe.config | config))


def test_dropout_is_off(tmp_path: Path) -> None:
    for folder in ("plain", "dropped"):
        (tmp_path / folder).mkdir()
    plain = open_case(CASES["single"], tmp_path / "plain")
    dropped = open_case(dropout(CASES["single"]), tmp_path / "dropped")
    model = dropped.study.loaded.model
    assert not any(module.training for module in model.modules())
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.5}
    first, second = measured(dropped)[0], measured(dropped)[0]
    wanted = measured(plain)[0]
    for column, values in wanted.items():
        for site, value in values.items():
            assert torch.equal(first[column][site], second[column][site])
            assert torch.equal(first[column][site], value)


@pytest.mark.parametrize("name", ["single", "causal-llama", "seq2seq-t5", "masked"])
def test_the_model_is_left_as_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_case(CASES[name], tmp_path)
    model = opened.study.loaded.model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    measured(opened)
    assert hooks(model) == 0
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()

    def fail(*_: Any) -> Any:
        assert hooks(model) > 0
        raise RuntimeError("planted")

    monkeypatch.setattr(objective_module, "draw", fail)
    with pytest.raises(RuntimeError, match="planted"):
        measured(opened)
    assert hooks(model) == 0
    monkeypatch.undo()
    again = measured(opened)[0]["importance"]
    assert all(bool(values.gt(0).any()) for values in again.values())


@pytest.mark.parametrize(
    ("name", "measure"),
    [(name, measure) for name in ("single", "causal-gpt2") for measure in ("importance", "sensitivity")]
    + [("embedding", "sensitivity")],
)
def test_a_value_that_is_not_finite_stops_the_run(name: str, measure: str, tmp_path: Path) -> None:
    opened = open_case(CASES[name], tmp_path)
    examples, model = opened.study.examples, opened.study.loaded.model
    assert examples is not None
    worst = max(examples.items, key=lambda item: item.length)
    (positions,) = [value for key, value in model.named_parameters() if "position_embeddings" in key or "wpe" in key]
    positions[worst.length - 1] = torch.inf  # only the longest example reaches it
    with pytest.raises(DataError, match=rf"of example {worst.number} is not finite in float64") as error:
        measured(opened, measure, batch_size=1)
    assert error.value.exit_code == 1
    assert "float32" in str(error.value.hint)
    assert hooks(model) == 0


def test_memory_that_runs_out_halves_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_case(CASES["single"], tmp_path)
    wanted, _ = measured(opened, batch_size=7)
    run = Objective.run

    def small(self: Objective, batch: Any, seen: Any, asked: Wanted) -> Any:
        if len(batch) > 2:
            raise MemoryError
        return run(self, batch, seen, asked)

    monkeypatch.setattr(study_module.Objective, "run", small)
    found, notes = measured(opened, batch_size=7)
    assert len([note for note in notes if "memory ran out" in note]) == 1
    assert len(batches(opened.study)) >= 1
    for column, values in wanted.items():
        for site, value in values.items():
            assert_close(found[column][site], value, rtol=1e-9, atol=1e-12)


def test_random_scores_have_the_covariance_of_drawn_labels() -> None:
    """`diag(p) − p pᵀ`, the Fisher information of a choice, also where the prediction is nearly certain."""
    from headscope.losses import scores

    rows = torch.tensor([[2.0, 0.0, -1.0, 1.0], [9.0, 0.0, -3.0, 0.0]], dtype=torch.float64)
    noise = torch.randn(200_000, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = scores(rows.expand(200_000, 2, 4), noise)
    chance = rows.softmax(dim=-1)
    wanted = torch.diag_embed(chance) - chance[:, :, None] * chance[:, None]
    measured = torch.einsum("nra,nrb->rab", found, found) / len(found)
    assert ((measured - wanted).abs() <= 0.02 * wanted.diagonal(dim1=1, dim2=2).amax(dim=1)[:, None, None]).all()
    assert found.sum(dim=-1).abs().max() < 1e-12
