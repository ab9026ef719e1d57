"""Embedding: models without a task head; a text, image or sound is one point on the sphere, and no labels exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headscope.errors import ModelError
from headscope.examples import Batch, Example
from headscope.losses import Distribution
from headscope.tasks import Encoder, Row, Task, example, moved_right
from headscope.tasks._images import encode as encode_image
from headscope.tasks._sounds import encode as encode_sound


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example without a target."""
    if "text" not in encoder.columns:
        (found,) = (encode_sound if "audio" in encoder.columns else encode_image)(encoder, row, number)
        return [replace(found, targets=(0,), labelled=False)]
    tokens, truncated = encoder.cut(encoder.text(row, "text"))
    return [example(number, tokens, [0], truncated=truncated, labelled=False)]


def prepare(model: Any, batch: Batch) -> dict[str, Any]:
    """For a decoder behind an encoder also the decoder's input: the text itself, moved right, as BART does alone."""
    config, inputs = model.config, dict(batch.inputs)
    if hasattr(config, "vision_config") and hasattr(config, "text_config"):
        raise ModelError("this model reads texts and images together, which headscope cannot judge on data")
    if config.is_encoder_decoder and "input_ids" in inputs:
        inputs["decoder_input_ids"] = moved_right(config, inputs["input_ids"])
    return inputs


def rows(output: Any, batch: Batch) -> Tensor:
    """Mean of the last hidden states over real tokens, normalised: `[example 1 d_model]`."""
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        raise ModelError("this model returns no last hidden state, so it gives no embedding; choose another --task")
    hidden = hidden.flatten(2).transpose(1, 2) if hidden.dim() == 4 else hidden  # [batch channel height width]
    mask = batch.inputs.get("attention_mask")
    if mask is None or mask.shape[1] != hidden.shape[1]:
        mask = torch.ones(hidden.shape[:2], device=hidden.device)
    weights = mask.to(hidden)[..., None]
    pooled = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
    return F.normalize(pooled, dim=-1).unsqueeze(1)


TASK = Task(
    auto_class="AutoModel",
    mapping="MODEL_MAPPING_NAMES",
    required=(),
    optional=("text", "image", "audio"),
    encode=encode,
    rows=rows,
    prepare=prepare,
    distribution=Distribution.DIRECTION,
)
