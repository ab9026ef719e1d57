"""Extractive question answering: where in a context the answer starts and where it ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headscope.errors import DataError
from headscope.examples import IGNORED, Batch, Example
from headscope.tasks import Encoder, Row, Task, example


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example with two predictions, start and end; an answer that truncation cuts off cannot be used."""
    if not getattr(encoder.tokenizer, "is_fast", False):
        raise DataError("question answering needs a fast tokenizer (tokenizer.json) to find the answer's tokens")
    question, context = encoder.text(row, "question"), encoder.text(row, "context")
    whole = encoder.tokens(question, context)
    truncated = len(whole["input_ids"]) > encoder.max_length
    if truncated and encoder.on_long == "error":
        raise DataError(f"{len(whole['input_ids'])} tokens, more than the limit of {encoder.max_length}")
    room = truncated and len(encoder.tokens(question, "")["input_ids"]) < encoder.max_length
    way = "only_second" if room else "longest_first"  # a question may fill the limit by itself
    options: dict[str, Any] = {"truncation": way, "max_length": encoder.max_length} if truncated else {}
    tokens = encoder.tokens(question, context, **options)
    labelled = "answer" in encoder.columns
    targets = _span(encoder, row, (question, context), options) if labelled else [0, 0]
    return [example(number, tokens, targets, truncated=truncated, labelled=labelled)]


def _span(encoder: Encoder, row: Row, texts: tuple[str, str], options: dict[str, Any]) -> list[int]:
    """Token positions of the first and last piece of the answer."""
    text, start = _answer(encoder, row, texts[1])
    encoded = encoder.encoded(*texts, **options)
    first = encoded.char_to_token(start, sequence_index=1)
    last = encoded.char_to_token(start + len(text) - 1, sequence_index=1)
    if first is None or last is None:
        return [IGNORED, IGNORED]  # cut off: the example is skipped and counted
    return [first, last]


def _answer(encoder: Encoder, row: Row, context: str) -> tuple[str, int]:
    """The answer's text and where it starts, from a text or from SQuAD's {text, answer_start}."""
    value = encoder.cell(row, "answer")
    if isinstance(value, dict):
        texts, starts = _list(value.get("text")), _list(value.get("answer_start"))
        if not texts:
            raise DataError("no answer given")
        value, start = texts[0], (starts[0] if starts else context.find(texts[0]))
    else:
        value = str(value)
        start = context.find(value)
    if not value or start < 0:
        raise DataError(f"answer {value[:80]!r} does not occur in the context")
    return value, start


def _list(value: Any) -> list[Any]:
    """SQuAD gives lists of answers, other data a single one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def rows(output: Any, batch: Batch) -> Tensor:
    """Logits over tokens, `[example 2 token]`; padding cannot be chosen."""
    both = torch.stack([output.start_logits, output.end_logits], dim=1)
    padding = batch.inputs["attention_mask"][:, None, :] == 0
    return both.masked_fill(padding, torch.finfo(both.dtype).min)


TASK = Task(
    auto_class="AutoModelForQuestionAnswering",
    mapping="MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    required=("question", "context"),
    optional=("answer",),
    encode=encode,
    rows=rows,
)
