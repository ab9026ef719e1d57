"""The zoo is what it claims: the same models every time, finite in float64, with batches whose padding is harmless."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel
from zoo import FAST, SPECIMENS, Specimen, at, specimens
from zoo_configs import RECIPES

BUILD_SECONDS = 0.5

TEXTS = [name for name, recipe in RECIPES.items() if "text" in recipe.inputs]

FLOAT32_TOLERANCE = 2e-6
FLOAT32_INSIDE = {
    "bloom": "its softmax runs in float32, so the number of masked keys changes the rounding of the sum",
    "mpt": "its softmax runs in float32",
    "gemma2": "soft-capping needs the eager function, whose softmax runs in float32",
}
"""Why row 0 may differ by more than rounding in float64."""

PADDING_SEEN = {
    "convbert": "the span convolution reads the neighbours of the last token, padding or not",
}
"""Why padding reaches real tokens: here the comparison would be wrong, not the batch."""


def row_0(model: PreTrainedModel, batch: dict[str, Any], length: int) -> Tensor:
    """The first `length` outputs of row 0 (or its one output, where that stands for the whole sequence)."""
    output = model(**batch)
    values = output.text_model_output.last_hidden_state if "text_model_output" in output else output.logits
    return values[0, :length] if values.dim() == 3 else values[0]


def first_alone(batch: dict[str, Any]) -> dict[str, Any]:
    """Row 0 of a batch, cut to its real tokens."""
    alone = {key: value[:1] if isinstance(value, Tensor) else value for key, value in batch.items()}
    for side in ("", "decoder_"):
        if f"{side}input_ids" in alone:
            length = int(alone[f"{side}attention_mask"].sum())
            for key in (f"{side}input_ids", f"{side}attention_mask"):
                alone[key] = alone[key][:, :length]
    return alone


@pytest.mark.parametrize("specimen", specimens())
def test_builds_the_same_twice_and_leaves_the_random_state(specimen: Specimen) -> None:
    state = torch.get_rng_state()
    start = time.perf_counter()
    first = specimen.build()
    middle = time.perf_counter()
    second = specimen.build()
    seconds = min(middle - start, time.perf_counter() - middle)  # the first build may pay for an import
    print(f"{specimen.name}: built in {seconds:.3f} s, {sum(p.numel() for p in second.parameters())} parameters")
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(dict(second.state_dict()), dict(first.state_dict()), rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(first.buffers(), second.buffers(), strict=True))
    assert not first.training
    assert seconds < BUILD_SECONDS


@pytest.mark.parametrize("specimen", specimens())
def test_output_is_finite_float64(specimen: Specimen) -> None:
    model = specimen.build()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    with torch.no_grad():
        output = model(**specimen.inputs(model))
        again = model(**specimen.inputs(model))
    tensors = [value for value in output.to_tuple() if isinstance(value, Tensor)]
    assert tensors
    for value in tensors:
        assert value.dtype == torch.float64
        assert torch.isfinite(value).all()
    assert torch.equal(output[0], again[0])


@pytest.mark.parametrize("specimen", specimens())
def test_eager_attention_is_finite(specimen: Specimen) -> None:
    """In float64 a query that sees no key at all would be NaN: eager casts its mask to float32, where it is -inf."""
    model = specimen.build()
    batch = specimen.inputs(model)
    with torch.no_grad():
        before = model(**batch)[0]
        model.set_attn_implementation("eager")
        after = model(**batch)[0]
    assert torch.isfinite(after).all()
    assert_close(after, before, rtol=1e-4, atol=1e-5)  # float32 softmax


@pytest.mark.parametrize("specimen", specimens(TEXTS))
def test_padding_does_not_reach_row_0(specimen: Specimen) -> None:
    model = specimen.build()
    batch = specimen.inputs(model)
    lengths = batch["attention_mask"].sum(dim=-1)
    assert lengths[0] < batch["input_ids"].shape[1] == lengths[1]
    padding = batch["input_ids"] == model.config.get_text_config().pad_token_id
    assert torch.equal(padding, batch["attention_mask"] == 0)
    written = int(batch.get("decoder_attention_mask", batch["attention_mask"])[0].sum())
    with torch.no_grad():
        padded = row_0(model, batch, written)
        alone = row_0(model, first_alone(batch), written)
        unmasked = row_0(model, batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}, written)
    tolerance = FLOAT32_TOLERANCE if specimen.name in FLOAT32_INSIDE else 1e-9
    if specimen.name in PADDING_SEEN:
        assert not torch.allclose(padded, alone, rtol=tolerance, atol=tolerance)
    else:
        assert_close(padded, alone, rtol=tolerance, atol=tolerance)
    if "encoder.self" in specimen.stacks:
        assert not torch.allclose(unmasked, padded, rtol=1e-3, atol=1e-3)  # the mask did something


@pytest.mark.parametrize("name", SPECIMENS)
def test_expectations_name_known_stacks(name: str) -> None:
    specimen = SPECIMENS[name]
    assert specimen.stacks.keys() <= {
        f"{stack}.{kind}" for stack in ("encoder", "decoder", "vision", "audio") for kind in ("self", "causal", "cross")
    }
    for stack in specimen.stacks:
        heads, kv_heads = at(specimen.n_heads, stack), at(specimen.n_kv_heads, stack)
        assert heads == kv_heads == 0 or heads % kv_heads == 0


def test_fast_names_exist() -> None:
    assert set(FAST) <= set(SPECIMENS)
