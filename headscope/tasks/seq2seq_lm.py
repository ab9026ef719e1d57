"""Sequence-to-sequence modelling: each token of a target text, given a source text and the target tokens before it."""

from __future__ import annotations

from headscope.errors import DataError
from headscope.examples import Example
from headscope.tasks import Encoder, Row, Task, example, token_logits
from headscope.tasks._decoding import prepare


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example; its targets are the target text's tokens, its length counts both texts."""
    tokens, cut_source = encoder.cut(encoder.text(row, "text"))
    target = encoder.text(row, "target")
    labels, cut_target = encoder.cut(None, text_target=target)
    targets = labels["input_ids"]
    if not targets:
        raise DataError("the target text has no token")
    found = example(number, tokens, targets, truncated=cut_source or cut_target)
    return [Example(found.number, found.inputs, found.targets, found.length + len(targets), truncated=found.truncated)]


TASK = Task(
    auto_class="AutoModelForSeq2SeqLM",
    mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    required=("text", "target"),
    optional=(),
    encode=encode,
    rows=token_logits,
    vocabulary=True,
    prepare=prepare,
)
