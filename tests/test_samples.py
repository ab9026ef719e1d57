"""The four real sample models: every head is found and scored, and equals references that know nothing of headscope."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import reference
import torch
from conftest import SAMPLES, TEST_FILES
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from headscope.data import DataOptions
from headscope.models import LoadOptions
from headscope.objective import Objective
from headscope.study import Scores, Study, StudyOptions

HEADS = {"sentiment-minilm": 72, "llama-gqa-web": 32, "t5-g2p": 72, "vit-digits": 32}
KINDS = {
    "sentiment-minilm": {"encoder.self": 6},
    "llama-gqa-web": {"decoder.causal": 4},
    "t5-g2p": {"encoder.self": 3, "decoder.causal": 3, "decoder.cross": 3},
    "vit-digits": {"vision.self": 4},
}


def study(
    name: str, *, limit: int | None, batch_size: int | None = None, dtype: str = "float32", device: str = "cpu"
) -> Study:
    options = StudyOptions(LoadOptions(dtype=dtype, device=device), DataOptions(limit=limit), batch_size=batch_size)
    return Study.open(str(SAMPLES / name), str(SAMPLES / name / TEST_FILES[name]), options)


def column(scores: Scores, name: str) -> Tensor:
    return torch.cat(list(scores.values[name].values()))


@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_head_is_found_and_scored(name: str) -> None:
    found = study(name, limit=12)
    kinds: dict[str, int] = {}
    for site in found.sites:
        kinds[f"{site.id.stack}.{site.id.kind}"] = kinds.get(f"{site.id.stack}.{site.id.kind}", 0) + 1
    assert kinds == KINDS[name]
    scores = found.scores(["weights", "importance", "sensitivity", "effect"])
    for title, values in scores.values.items():
        total = torch.cat(list(values.values()))
        assert len(total) == HEADS[name]
        assert torch.isfinite(total).all(), title
    assert (column(scores, "importance") > 0).all()


def sentiment_reference(dtype: torch.dtype, rows: list[tuple[str, int]]) -> dict[object, dict[str, Tensor]]:
    """Gate gradients of each example by plain transformers and autograd, one text at a time, no padding."""
    folder = SAMPLES / "sentiment-minilm"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)
    owner = [channel // 32 for channel in range(384)]
    layers = enumerate(model.bert.encoder.layer)
    places = {index: (layer.attention.output.dense, owner) for index, layer in layers}
    gradients = []
    with reference.GateTensors(places, dtype) as gates:
        for text, label in rows:
            inputs = tokenizer(text, truncation=True, max_length=128, return_tensors="pt")
            gradients.append(gates.gradients(model(**inputs, labels=torch.tensor([label])).loss))
    return reference.importance(gradients)


def rows_of(found: Study) -> list[tuple[str, int]]:
    """The texts and labels of a study, found again in the file by their token ids."""
    folder = SAMPLES / "sentiment-minilm"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [json.loads(line) for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = {tuple(tokenizer(row["text"], truncation=True, max_length=128)["input_ids"]): row for row in lines}
    assert found.examples is not None
    chosen = [texts[tuple(example.inputs["input_ids"])] for example in found.examples.items]
    return [(row["text"], row["label"]) for row in chosen]


def check_against_reference(limit: int | None, dtype: str, tolerance: float) -> None:
    found = study("sentiment-minilm", limit=limit, dtype=dtype)
    scores = found.scores(["importance"])
    wanted = sentiment_reference(getattr(torch, dtype), rows_of(found))
    for title in ("importance", "importance_se", "importance_layer_norm", "gradient_mean", "fisher"):
        expected = torch.cat([wanted[layer][title] for layer in range(6)])
        got = column(scores, title)
        if title == "importance":
            assert ((got - expected).abs() <= tolerance * expected.abs()).all()
        else:
            assert (got - expected).abs().max() <= tolerance * expected.abs().max(), title


def test_importance_equals_autograd_on_explicit_gates() -> None:
    check_against_reference(24, "float32", 1e-5)


def test_importance_equals_autograd_in_float64() -> None:
    check_against_reference(8, "float64", 1e-11)


@pytest.mark.slow
def test_importance_equals_autograd_on_the_whole_test_file() -> None:
    check_against_reference(None, "float32", 1e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        pytest.param(name, dtype, tolerance, marks=[pytest.mark.slow] * (name in long))
        for dtype, tolerance, long in (
            ("float64", 1e-9, ("sentiment-minilm",)),
            ("float32", 1e-5, ("llama-gqa-web", "t5-g2p")),
        )
        for name in sorted(HEADS)
    ],
)
def test_batch_size_changes_nothing(name: str, dtype: str, tolerance: float) -> None:
    limit = {"llama-gqa-web": 3}.get(name, 9)  # long texts
    whole = study(name, limit=limit, dtype=dtype)
    measures = ["importance", "sensitivity"]
    wanted = whole.scores(measures)
    for size in (1, 7, 64):
        other = Study(whole.loaded, whole.examples, replace(whole.options, batch_size=size)).scores(measures)
        for title in wanted.values:
            expected = column(wanted, title)
            error = (column(other, title) - expected).abs().max()
            assert error <= tolerance * expected.abs().max(), f"{title} at batch size {size}"


def test_effective_rank_equals_the_whole_product() -> None:
    found = study("llama-gqa-web", limit=4)
    scores = found.scores(["weights"])
    model, site = found.loaded.model, found.sites[1]
    attention = model.model.layers[1].self_attn
    for head in (0, 3, 7):
        group = head // 2
        query = attention.q_proj.weight[head * 32 : (head + 1) * 32]
        key = attention.k_proj.weight[group * 32 : (group + 1) * 32]
        value = attention.v_proj.weight[group * 32 : (group + 1) * 32]
        out = attention.o_proj.weight[:, head * 32 : (head + 1) * 32]
        close = {"rel": 1e-6}
        assert float(scores.values["qk_rank"][site.id][head]) == pytest.approx(
            reference.effective_rank(query.double().T @ key.double()), **close
        )
        assert float(scores.values["ov_rank"][site.id][head]) == pytest.approx(
            reference.effective_rank(value.double().T @ out.double().T), **close
        )
        assert float(scores.values["query_norm"][site.id][head]) == pytest.approx(float(query.double().norm()), **close)
        assert float(scores.values["key_norm"][site.id][head]) == pytest.approx(float(key.double().norm()), **close)
        assert float(scores.values["value_norm"][site.id][head]) == pytest.approx(float(value.double().norm()), **close)
        assert float(scores.values["output_norm"][site.id][head]) == pytest.approx(float(out.double().norm()), **close)


def accuracy(name: str) -> float:
    """Share of the sample's test rows that are classified right, by the study's own batches and predictions."""
    found = study(name, limit=None)
    assert found.examples is not None
    objective = Objective(found.loaded.model, found.loaded.task, found.sites)
    correct = 0
    for batch in found.examples.batches(None, tokens=512):
        with torch.no_grad():
            predicted = objective.forward(batch).argmax(dim=-1)
        correct += int((predicted == batch.targets[:, 0]).sum())
    return correct / len(found.examples)


def test_images_reach_the_model_as_it_was_trained() -> None:
    """0..16 grey values become -1..1: the accuracy is the one that the sample was published with."""
    published = json.loads((SAMPLES / "vit-digits" / "metrics.json").read_text())["test"]
    assert accuracy("vit-digits") == pytest.approx(published, abs=1e-9)


@pytest.mark.slow
def test_texts_reach_the_model_as_it_was_trained() -> None:
    published = json.loads((SAMPLES / "sentiment-minilm" / "metrics.json").read_text())["test"]["all"]
    assert accuracy("sentiment-minilm") == pytest.approx(published, abs=1e-4)


def test_samples_carry_their_own_licence_and_script() -> None:
    for name in HEADS:
        folder: Path = SAMPLES / name
        for file in ("README.md", "LICENSE", "train.py", "model.safetensors", "config.json"):
            assert (folder / file).stat().st_size > 0, f"{name}/{file}"
