"""Small made-up inputs that drive a forward pass through every reachable attention module of a model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

BATCH = 2
TOKENS = 7
TARGET_TOKENS = 5  # differs from TOKENS, so that cross attention shows itself by its shape
SAMPLES = 4000


def probe_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Inputs for `model.forward`: text of unequal source and target length, images, sounds, as its signature asks."""
    accepted = inspect.signature(model.forward).parameters
    config = model.config
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {}
    main = model.main_input_name
    if main == "input_ids" or ("input_ids" in accepted and not _speaks(main)):
        inputs["input_ids"] = _tokens(config, TOKENS, generator)
        inputs["attention_mask"] = torch.ones(BATCH, TOKENS, dtype=torch.long)
    if "pixel_values" in accepted and (main.startswith("pixel") or hasattr(config, "vision_config")):
        inputs["pixel_values"] = _image(config, generator)
    if main == "input_values":
        inputs["input_values"] = _sound(config, generator)
    if main == "input_features":
        inputs["input_features"] = _spectrum(config, generator)
    if "decoder_input_ids" in accepted and not _pools_end(model):
        inputs["decoder_input_ids"] = _tokens(config, TARGET_TOKENS, generator)
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return placed(inputs, model)


def _pools_end(model: PreTrainedModel) -> bool:
    """Whether the model reads its text into the decoder too and judges it at the end token."""
    return bool(model.config.is_encoder_decoder) and "ForSequenceClassification" in type(model).__name__


def _speaks(main: str) -> bool:
    """Whether the main input is a sound, whose models take token ids for the decoder only."""
    return main in ("input_values", "input_features")


def _tokens(config: PreTrainedConfig, length: int, generator: torch.Generator) -> Tensor:
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or 32
    reserved = {
        getattr(source, name, None)
        for source in (config, text)
        for name in ("pad_token_id", "image_token_id", "image_token_index", "audio_token_id", "video_token_id")
    }
    end = getattr(text, "eos_token_id", None)
    end = end if isinstance(end, int) and 0 <= end < int(vocabulary) else None
    usable = [token for token in range(min(int(vocabulary), 1000)) if token not in reserved and token != end] or [0]
    picks = torch.randint(len(usable), (BATCH, length), generator=generator)
    ids = torch.tensor(usable)[picks]
    if end is not None:
        ids[:, -1] = end  # some models pool a text at its end token
    return ids


def _image(config: PreTrainedConfig, generator: torch.Generator) -> Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = _first(vision, ("image_size", "crop_size", "img_size"), 224)
    height, width = size if isinstance(size, Sequence) else (size, size)
    channels = _first(vision, ("num_channels", "in_channels", "in_chans"), 3)
    return torch.randn(BATCH, int(channels), int(height), int(width), generator=generator)


def _sound(config: PreTrainedConfig, generator: torch.Generator) -> Tensor:
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if isinstance(bins, int) and isinstance(frames, int) and config.model_type == "audio-spectrogram-transformer":
        return torch.randn(BATCH, frames, bins, generator=generator)
    return torch.randn(BATCH, SAMPLES, generator=generator)


def _spectrum(config: PreTrainedConfig, generator: torch.Generator) -> Tensor:
    bins = int(_first(config, ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel"), 80))
    frames = getattr(config, "max_source_positions", None)
    if config.model_type == "whisper" and isinstance(frames, int):
        return torch.randn(BATCH, bins, 2 * frames, generator=generator)
    return torch.randn(BATCH, 40, bins, generator=generator)


def _first(config: PreTrainedConfig, names: tuple[str, ...], default: Any) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None)), default)


def placed(inputs: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Inputs on the model's device; floating ones in the model's own type."""
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            value = value.to(model.device, model.dtype) if value.is_floating_point() else value.to(model.device)
        found[name] = value
    return found
