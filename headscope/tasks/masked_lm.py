"""Masked language modelling: 15 % of the tokens of a text are hidden, the same ones in every run with the same seed."""

from __future__ import annotations

import math

from headscope.errors import UsageError
from headscope.examples import IGNORED, Example
from headscope.losses import uniforms
from headscope.tasks import Encoder, Row, Task, example, token_logits

SHARE = 0.15


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example in which the hidden tokens, at least one, are to be predicted; special tokens stay."""
    mask = getattr(encoder.tokenizer, "mask_token_id", None)
    if mask is None:
        raise UsageError("this model's tokenizer has no mask token, so it cannot do masked-lm")
    tokens, truncated = encoder.cut(encoder.text(row, "text"))
    ids, special = tokens["input_ids"], encoder.special_ids()
    plain = [place for place, around in enumerate(tokens["_special"]) if not around and ids[place] not in special]
    order = uniforms(len(plain), seed=encoder.seed, example=number, draw=0).argsort().tolist()
    hidden = {plain[place] for place in order[: max(1, math.floor(SHARE * len(plain) + 0.5))]}
    tokens["input_ids"] = [mask if position in hidden else token for position, token in enumerate(ids)]
    targets = [token if position in hidden else IGNORED for position, token in enumerate(ids)]
    return [example(number, tokens, targets, truncated=truncated)]


TASK = Task(
    auto_class="AutoModelForMaskedLM",
    mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    required=("text",),
    optional=(),
    encode=encode,
    rows=token_logits,
    vocabulary=True,
)
