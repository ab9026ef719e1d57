"""Made-up inputs: models of every kind of input run on them and read all of them, and placeholders fit the features."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from census.build import build, default_format
from census.classes import attention_modules
from torch import Tensor
from transformers import MiniCPMV4_6ForConditionalGeneration, PreTrainedModel

from headscope import reload
from headscope.discovery import find_sites
from headscope.inputs import probe_inputs

KINDS = {
    "bert": {"input_ids"},
    "t5": {"input_ids", "decoder_input_ids"},
    "layoutlmv3": {"input_ids", "bbox", "pixel_values"},
    "lxmert": {"input_ids", "visual_feats", "visual_pos"},
    "vit": {"pixel_values"},
    "siglip2": {"input_ids", "pixel_values", "spatial_shapes"},
    "seggpt": {"pixel_values", "prompt_pixel_values", "prompt_masks"},
    "vivit": {"pixel_values"},
    "vjepa2": {"pixel_values_videos"},
    "llava": {"input_ids", "pixel_values"},
    "llava_next": {"input_ids", "pixel_values", "image_sizes"},
    "idefics3": {"input_ids", "pixel_values", "pixel_attention_mask"},
    "qwen2_vl": {"input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids"},
    "whisper": {"input_features", "decoder_input_ids"},
    "speech_to_text": {"input_features", "decoder_input_ids"},
    "wav2vec2": {"input_values"},
    "audio-spectrogram-transformer": {"input_values"},
    "clap": {"input_ids", "input_features"},
    "audioflamingo3": {"input_ids", "input_features", "input_features_mask"},
    "informer": {"past_values", "past_time_features", "future_values", "future_time_features"},
    "patchtst": {"past_values"},
    "decision_transformer": {"states", "actions", "rewards", "returns_to_go", "timesteps"},
    "dia": {"input_ids", "decoder_input_ids"},
    "minicpmv4_6": {"input_ids", "pixel_values", "target_sizes"},
    "t5gemma2": {"input_ids", "pixel_values", "decoder_input_ids"},
    "kosmos-2.5": {"input_ids", "flattened_patches", "image_embeds_position_mask"},
    "phi4_multimodal": {"input_ids", "image_pixel_values", "audio_input_features", "audio_embed_sizes"},
    "video_llava": {"input_ids", "pixel_values", "pixel_values_videos"},
    "chameleon": {"input_ids", "pixel_values"},
}
"""What a model of each type must be given."""
UNREAD = {("decision_transformer", "rewards"), ("informer", "past_time_features"), ("informer", "future_time_features")}
"""Inputs that a model asks for and does not use, and features of times of which there are none."""


def said(model: PreTrainedModel, inputs: dict[str, Any]) -> list[Tensor]:
    """Everything that a model says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(reload.outputs(model, inputs).values())


@pytest.mark.parametrize("model_type", KINDS)
def test_a_model_runs_on_its_inputs_and_reads_them(model_type: str) -> None:
    model = build(model_type)
    inputs = probe_inputs(model)
    assert KINDS[model_type] <= inputs.keys()
    with default_format(model_type):
        whole = said(model, inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.is_floating_point() and (model_type, name) not in UNREAD:
                noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(7), dtype=value.dtype)
                other = said(model, inputs | {name: noise})
                assert any(not torch.equal(one, two) for one, two in zip(whole, other, strict=True)), name


@pytest.mark.parametrize(
    "model_type", ["minicpmv4_6", "t5gemma2", "kosmos-2.5", "phi4_multimodal", "video_llava", "chameleon"]
)
def test_towers_of_every_sense_are_reached(model_type: str) -> None:
    with default_format(model_type), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(model_type)
        found = [site.module for site in find_sites(model).sites]
    expected = attention_modules(model)
    assert [path for path in expected if not any(f"{one}.".startswith(f"{path}.") for one in found)] == []
    assert len(found) == len(expected)


def test_the_same_model_is_given_the_same() -> None:
    model = build("llava")
    first, second = probe_inputs(model), probe_inputs(model)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in ("input_ids", "pixel_values"))


def test_there_are_as_many_placeholders_as_features() -> None:
    model = build("qwen2_vl")
    inputs = probe_inputs(model)
    places = inputs["input_ids"] == model.config.image_token_id
    features = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    assert int(places.sum()) == sum(len(one) for one in features)
    assert torch.equal(places, inputs["mm_token_type_ids"] == 1)
    assert inputs["attention_mask"].shape == inputs["input_ids"].shape


def test_a_model_that_passes_images_on_has_places_for_them() -> None:
    model = MiniCPMV4_6ForConditionalGeneration(build("minicpmv4_6").config).double().eval()
    inputs = probe_inputs(model)
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == len(inputs["target_sizes"])
    assert said(model, inputs)


def test_outputs_in_tuples_are_part_of_what_a_model_says() -> None:
    one, two = torch.ones(1), torch.zeros(2)

    def model(**inputs: Any) -> dict[str, Any]:
        return {"loss": one, "maps": (two, {"ids": torch.ones(1, dtype=torch.long), "deep": one}), "cache": object()}

    found = reload.outputs(model, {})
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "loss": [1.0],
        "maps.0": [0.0, 0.0],
        "maps.1.deep": [1.0],
    }
