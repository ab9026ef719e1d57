"""Small made-up inputs that drive a forward pass through every reachable attention module of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headscope.made_up import images, others, placeholders, series, sounds
from headscope.made_up._asked import BATCH, TOKENS, Asked
from headscope.offload import home

TARGET_TOKENS = 5  # differs from TOKENS, so that cross attention shows itself by its shape
_SPECIAL = ("image", "audio", "video", "vision", "boi", "eoi", "boa", "eoa", "mask", "sep", "cls", "pad", "speech")


def probe_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Inputs for `model.forward`: text of unequal source and target length, images, sounds, as its signature asks."""
    asked = Asked.of(model)
    inputs: dict[str, Any] = {}
    if asked.takes("input_ids") and (asked.needs("input_ids") or not _speaks(asked)):
        inputs["input_ids"] = _tokens(asked, TOKENS)
        inputs["attention_mask"] = torch.ones(BATCH, TOKENS, dtype=torch.long)
    for kind in (images, sounds, series, others):
        inputs |= kind.made(asked)
    inputs = placeholders.placed(asked, inputs)
    if asked.takes("decoder_input_ids") and not _pools_end(model):
        inputs["decoder_input_ids"] = _tokens(asked, TARGET_TOKENS, decoder=True)
    if asked.takes("use_cache"):
        inputs["use_cache"] = False
    return placed(inputs, model)


def _pools_end(model: PreTrainedModel) -> bool:
    """Whether the model reads its text into the decoder too and judges it at the end token."""
    return bool(model.config.is_encoder_decoder) and "ForSequenceClassification" in type(model).__name__


def _speaks(asked: Asked) -> bool:
    """Whether the main input is a sound, whose models take token ids for the decoder only."""
    return asked.main in ("input_values", "input_features")


def _tokens(asked: Asked, length: int, *, decoder: bool = False) -> Tensor:
    config = asked.config
    text: PreTrainedConfig = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or 32
    reserved = {
        getattr(source, name, None)
        for source in (config, text)
        for name in vars(source)
        if name.startswith(_SPECIAL) and name.endswith(("_token_id", "_token_index"))
    }
    end = getattr(text, "eos_token_id", None)
    end = end if isinstance(end, int) and 0 <= end < int(vocabulary) else None
    usable = [token for token in range(min(int(vocabulary), 1000)) if token not in reserved and token != end] or [0]
    picks = torch.randint(len(usable), (BATCH, length, *_streams(asked, decoder=decoder)), generator=asked.generator)
    ids = torch.tensor(usable)[picks]
    if end is not None and ids.dim() == 2:
        ids[:, -1] = end  # some models pool a text at its end token
    return ids


def _streams(asked: Asked, *, decoder: bool) -> tuple[int, ...]:
    """Tokens at one place of a text beside each other: codes of a sound, with or without a word."""
    config = asked.config
    if not decoder and hasattr(config, "codebook_vocab_size") and hasattr(config, "audio_bos_token_id"):
        return (config.num_codebooks + 1,)
    channels = getattr(getattr(config, "decoder_config", None), "num_channels", None)
    return (channels,) if decoder and channels else ()


def placed(inputs: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Inputs on the model's device; floating ones in the model's own type."""
    found: dict[str, Any] = {}
    device = home(model)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            value = value.to(device, model.dtype) if value.is_floating_point() else value.to(device)
        found[name] = value
    return found
