"""Made-up inputs that go with texts and images: boxes of words, prompts, states, queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headscope.made_up._asked import BATCH, TOKENS, Asked, size

STEPS = 4


def made(asked: Asked) -> dict[str, Any]:
    """What a model asks for beside its main input."""
    return {
        name: make(asked)
        for name, make in _MAKERS.items()
        if asked.needs(name) or (asked.takes(name) and _helps(asked, name))
    }


def _boxes(asked: Asked) -> Tensor:
    """A box for each word: left, top, right and bottom, of a page of 1000 or less."""
    limit = int(size(asked.config, ("max_2d_position_embeddings",), 1000))
    corners = torch.randint(0, max(limit // 2 - 1, 2), (BATCH, TOKENS, 2), generator=asked.generator)
    boxes = torch.cat([corners, corners + limit // 4], dim=-1)
    return boxes if asked.config.model_type != "bros" else boxes / limit


def _wide(asked: Asked, *names: str) -> Tensor:
    return asked.draw(BATCH, STEPS, int(size(asked.config, (*names, "hidden_size", "d_model"), 64)))


_MAKERS: dict[str, Callable[[Asked], Any]] = {
    "bbox": _boxes,
    "query_embeds": lambda asked: _wide(asked),
    "encoder_hidden_states": lambda asked: asked.draw(BATCH, TOKENS, asked.config.encoder_hidden_size),
    "inputs": lambda asked: asked.draw(BATCH, TOKENS, asked.config.d_model),
    "decoder_input_values": lambda asked: _wide(asked),
    "task_inputs": lambda asked: torch.ones(BATCH, asked.config.task_seq_len, dtype=torch.long),
    "inputs_embeds": lambda asked: _wide(asked),
    "noise_embeds": lambda asked: _wide(asked),
    "context_hidden_states": lambda asked: asked.draw(
        BATCH, STEPS, asked.config.hidden_size * len(asked.config.target_layer_ids)
    ),
    "latents": lambda asked: _wide(asked).transpose(1, 2),
    "qformer_input_ids": lambda asked: torch.ones(BATCH, TOKENS, dtype=torch.long),
    "visual_feats": lambda asked: asked.draw(BATCH, STEPS, asked.config.visual_feat_dim),
    "visual_pos": lambda asked: asked.draw(BATCH, STEPS, asked.config.visual_pos_dim),
    "visual_embeds": lambda asked: asked.draw(BATCH, STEPS, asked.config.visual_embedding_dim),
    "states": lambda asked: asked.draw(BATCH, STEPS, asked.config.state_dim),
    "actions": lambda asked: asked.draw(BATCH, STEPS, asked.config.act_dim),
    "rewards": lambda asked: asked.draw(BATCH, STEPS, 1),
    "returns_to_go": lambda asked: asked.draw(BATCH, STEPS, 1),
    "timesteps": lambda asked: torch.arange(STEPS)[None].repeat(BATCH, 1),
}
_HELPFUL = (
    "bbox",
    "actions",
    "rewards",
    "returns_to_go",
    "timesteps",
    "decoder_input_values",
    "visual_feats",
    "visual_pos",
    "visual_embeds",
)


def _helps(asked: Asked, name: str) -> bool:
    """Whether a model that could do without something shows all its attention only with it."""
    return name in _HELPFUL or (name == "encoder_hidden_states" and asked.needs("query_embeds"))
