"""Regression: one number for a text or a pair of texts, judged by the squared error."""

from __future__ import annotations

import math

from headscope.errors import DataError, ModelError
from headscope.examples import Example
from headscope.losses import Distribution
from headscope.tasks import Encoder, Row, Task, example, logits


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example whose target is a number."""
    if encoder.config.num_labels != 1:
        raise ModelError(f"this model gives {encoder.config.num_labels} outputs, and regression judges only one")
    pair = encoder.text(row, "pair") if "pair" in encoder.columns else None
    tokens, truncated = encoder.cut(encoder.text(row, "text"), pair)
    labelled = "label" in encoder.columns
    target = _number(encoder, row) if labelled else 0.0
    return [example(number, tokens, [target], truncated=truncated, labelled=labelled)]


def _number(encoder: Encoder, row: Row) -> float:
    value = encoder.cell(row, "label")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise DataError(f"label {str(value)[:80]!r} is not a number") from None
    if not math.isfinite(number):
        raise DataError(f"label {value} is not finite")
    return number


TASK = Task(
    auto_class="AutoModelForSequenceClassification",
    mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    required=("text",),
    optional=("pair", "label"),
    encode=encode,
    rows=logits,
    distribution=Distribution.GAUSSIAN,
)
