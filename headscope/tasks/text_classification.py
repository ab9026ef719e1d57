"""Text classification: one of several classes (or several yes/no labels) for a text or a pair of texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headscope.errors import DataError, ModelError
from headscope.examples import Batch, Example
from headscope.tasks import Encoder, Row, Task, example, logits


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example; without a label column its target is a class that no loss is taken of."""
    pair = encoder.text(row, "pair") if "pair" in encoder.columns else None
    tokens, truncated = encoder.cut(encoder.text(row, "text"), pair)
    labelled = "label" in encoder.columns
    if not _several(encoder.config) and encoder.config.num_labels == 1:
        raise ModelError("this model gives one number, not classes", hint="use --task regression")
    if _several(encoder.config):
        targets = _flags(encoder, row) if labelled else [0] * int(encoder.config.num_labels or 0)
    else:
        targets = [encoder.label(row) if labelled else 0]
    return [example(number, tokens, targets, truncated=truncated, labelled=labelled)]


def rows(output: Any, batch: Batch) -> Tensor:
    """Class logits `[example 1 class]`; for yes/no labels `[example label 2]`, so that each is a choice of two."""
    if batch.targets.shape[1] == 1 and output.logits.shape[-1] > 1:
        return logits(output, batch)
    return torch.stack([torch.zeros_like(output.logits), output.logits], dim=-1)


def _several(config: Any) -> bool:
    return config.problem_type == "multi_label_classification"


def _flags(encoder: Encoder, row: Row) -> list[int]:
    """Yes/no for every label, from a list of as many 0 and 1, or of the labels that hold."""
    value = encoder.cell(row, "label")
    if not isinstance(value, list):
        raise DataError(
            f"this model gives several labels to a text: column {encoder.columns['label']!r} must be a list"
        )
    if len(value) == encoder.config.num_labels and all(flag in (0, 1) for flag in value):
        return [int(flag) for flag in value]
    held = {encoder.class_number(label) for label in value}
    return [int(label in held) for label in range(int(encoder.config.num_labels or 0))]


TASK = Task(
    auto_class="AutoModelForSequenceClassification",
    mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    required=("text",),
    optional=("pair", "label"),
    encode=encode,
    rows=rows,
)
