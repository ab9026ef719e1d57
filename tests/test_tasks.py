"""Every task end to end: losses are transformers' own, scores those of a loop, and batches change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from task_cases import CASES, LABELLED, Open, open_case, opener, recipe
from task_reference import asked, means, reference
from torch import Tensor
from torch.testing import assert_close

from headscope.capture import watch
from headscope.objective import Objective, Wanted
from headscope.study import batches


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return opener(tmp_path_factory)


def measures(name: str) -> tuple[str, ...]:
    return ("importance", "sensitivity", "effect") if name in LABELLED else ("sensitivity",)


def by_label(values: dict) -> dict[str, Tensor]:
    return {str(site): found for site, found in values.items()}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], name: str) -> None:
    """Equal within 1e-9 of the column's largest value."""
    assert list(found) == list(wanted)
    largest = max(float(value.abs().max()) for value in wanted.values())
    assert largest > 0
    for site, value in wanted.items():
        assert_close(
            found[site], value, rtol=0, atol=1e-9 * largest, msg=lambda text, site=site: f"{name} {site}: {text}"
        )


@pytest.mark.parametrize("name", CASES)
def test_task_is_found_from_the_checkpoint(name: str, opened: Open) -> None:
    study = opened(name).study
    assert study.loaded.task_name == CASES[name].task
    assert study.examples is not None
    assert len(study.examples) == len(CASES[name].rows)
    assert len({item.length for item in study.examples.items}) > 1 or name == "image-classification"
    assert study.examples.labelled == (name in LABELLED)


@pytest.mark.parametrize("name", LABELLED)
def test_loss_of_each_example_is_that_of_transformers(name: str, opened: Open) -> None:
    case = opened(name)
    wanted = [float(case.model(**asked(case, row)).loss) for row in case.case.rows]
    study = case.study
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    with watch(study.loaded.model, study.sites) as seen:
        found = torch.cat([objective.run(batch, seen, Wanted()).loss for batch in batches(study)])
    assert len(set(wanted)) == len(wanted)
    assert_close(found.sort().values, torch.tensor(wanted, dtype=torch.float64).sort().values, rtol=1e-9, atol=1e-12)
    assert case.scores("importance").loss == pytest.approx(sum(wanted) / len(wanted), rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_a_loop(name: str, opened: Open) -> None:
    case = opened(name)
    wanted = means(reference(case, draws=2, seed=5))
    found = case.scores(*measures(name), draws=2, seed=5).values
    assert set(found) == set(wanted)
    for column, values in wanted.items():
        assert_near(by_label(dict(found[column])), values, column)


@pytest.mark.parametrize("name", CASES)
def test_batch_size_changes_nothing(name: str, opened: Open) -> None:
    case = opened(name)
    alone = case.scores(*measures(name), batch_size=1, draws=3)
    assert alone.examples == len(case.case.rows)
    for size in (3, 7, None):
        found = case.scores(*measures(name), batch_size=size, draws=3)
        for column, values in alone.values.items():
            assert_near(by_label(dict(found.values[column])), by_label(dict(values)), f"{column} at {size}")


@pytest.mark.parametrize("name", ["several", "causal-gpt2", "masked", "embedding", "regression"])
def test_seed_decides_the_draws(name: str, opened: Open) -> None:
    case = opened(name)
    first, same, other = (case.scores("sensitivity", seed=seed).values["sensitivity"] for seed in (1, 1, 2))
    assert all(torch.equal(first[site], same[site]) for site in first)
    assert not any(torch.allclose(first[site], other[site]) for site in first)


@pytest.mark.parametrize("name", ["causal-gpt2", "causal-llama", "llama-class", "gpt2-class"])
def test_no_pad_token_is_noted_and_a_stand_in_found(name: str, opened: Open) -> None:
    examples = opened(name).study.examples
    assert examples is not None
    assert [note for note in examples.notes if "no pad token" in note]
    used = {token for item in examples.items for token in item.inputs["input_ids"]}
    assert examples.pads["input_ids"] not in used


@pytest.mark.parametrize("name", ["single", "causal-gpt2", "llama-class", "seq2seq-bart", "question-answering"])
def test_padding_side_of_the_tokenizer_changes_nothing(name: str, opened: Open, tmp_path: Path) -> None:
    case = CASES[name]
    left = open_case(replace(case, tokens=case.tokens | {"padding_side": "left"}), tmp_path)
    assert left.study.loaded.tokenizer().padding_side == "left"
    wanted, found = opened(name).scores("importance"), left.scores("importance")
    assert_near(by_label(dict(found.values["importance"])), by_label(dict(wanted.values["importance"])), name)


ONE = recipe("bert", "BertForSequenceClassification", problem_type="multi_label_classification", num_labels=1)
VARIANTS = {
    "one yes/no label": replace(
        CASES["several"], recipe=ONE, rows=[{"text": "w1 w2", "label": [0]}, {"text": "w3", "label": [1]}]
    ),
    "regression with a target of -100": replace(
        CASES["regression"], rows=[{"text": "w1 w2", "label": -100.0}, {"text": "w3", "label": 2}]
    ),
    "token types that the model does not take": replace(
        CASES["single"],
        recipe=recipe("distilbert", "DistilBertForSequenceClassification", num_labels=3),
        projections={"encoder.self": "distilbert.transformer.layer.{}.attention.out_lin"},
    ),
    "no mask from the tokenizer": replace(CASES["single"], tokens={"model_input_names": ["input_ids"]}),
    "pad token -1": replace(
        CASES["llama-class"], recipe=recipe("llama", "LlamaForSequenceClassification", num_labels=3, pad_token_id=-1)
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_transformers_own_loss_too(name: str, tmp_path: Path) -> None:
    case = open_case(VARIANTS[name], tmp_path)
    wanted = []
    for row in case.case.rows:
        arguments = case.case.ask(case.companion, row)
        arguments.pop("token_type_ids", None)
        if name == "one yes/no label":
            arguments["labels"] = torch.tensor([row["label"]], dtype=torch.float64)
        wanted.append(float(case.model(**arguments).loss))
    found = case.scores("importance", batch_size=len(wanted))
    assert found.examples == len(wanted)
    assert found.loss == pytest.approx(sum(wanted) / len(wanted), rel=1e-9)
    assert all(bool((values > 0).all()) for values in found.values["importance"].values())


def test_embedding_of_an_encoder_and_decoder(tmp_path: Path) -> None:
    case = open_case(replace(CASES["embedding"], recipe=recipe("t5", "T5Model"), form="t5"), tmp_path)
    one, all_of_them = (case.scores("sensitivity", batch_size=size).values["sensitivity"] for size in (1, 7))
    assert {f"{site.stack}.{site.kind}" for site in one} == {"encoder.self", "decoder.causal", "decoder.cross"}
    assert_near(by_label(dict(all_of_them)), by_label(dict(one)), "sensitivity")
