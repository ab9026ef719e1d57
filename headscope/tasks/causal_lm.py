"""Causal language modelling: each token predicts the next; a long text is cut into chunks, each an example."""

from __future__ import annotations

from headscope.errors import DataError
from headscope.examples import IGNORED, Example
from headscope.tasks import Encoder, Row, Task, example, token_logits


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example a chunk, numbered from `number` on; the first token of a chunk is not predicted."""
    tokens = encoder.tokens(encoder.text(row, "text"))
    ids = tokens["input_ids"]
    limit = encoder.max_length
    if len(ids) > limit and encoder.on_long == "error":
        raise DataError(f"{len(ids)} tokens, more than the limit of {limit}")
    chunked = encoder.on_long == "chunk"
    last = len(ids) if chunked and ids else 1  # an empty text is one empty chunk, so that it is counted
    pieces = [ids[start : start + limit] for start in range(0, last, limit)]
    usable = [piece for piece in pieces if len(piece) > 1] or pieces[:1]  # a lone token predicts nothing: skipped later
    return [
        example(
            number + index,
            {"input_ids": piece, "attention_mask": [1] * len(piece)},
            [*piece[1:], IGNORED],
            truncated=len(ids) > limit and not chunked,
        )
        for index, piece in enumerate(usable)
    ]


TASK = Task(
    auto_class="AutoModelForCausalLM",
    mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    required=("text",),
    optional=(),
    encode=encode,
    rows=token_logits,
    vocabulary=True,
)
