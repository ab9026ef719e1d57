"""Token classification: a class for each word, judged at the word's first piece."""

from __future__ import annotations

from typing import Any

from headscope.errors import DataError
from headscope.examples import IGNORED, Example
from headscope.tasks import Encoder, Row, Task, example, token_logits


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example from a list of words and a list of labels; a plain text is taken without labels."""
    words = encoder.cell(row, "tokens") if "tokens" in encoder.columns else encoder.text(row, "text").split()
    if not isinstance(words, list) or not words:
        raise DataError(f"column {encoder.columns.get('tokens', '')!r} must hold a list of words")
    tokens, truncated, firsts = _aligned(encoder, [str(word) for word in words])
    labelled = "label" in encoder.columns
    labels = _labels(encoder, row, len(words)) if labelled else [0] * len(words)
    targets = [IGNORED if word is None else labels[word] for word in firsts]
    return [example(number, tokens, targets, truncated=truncated, labelled=labelled)]


def _aligned(encoder: Encoder, words: list[str]) -> tuple[dict[str, Any], bool, list[int | None]]:
    """Tokens of the words, whether they were cut, and per token the word that begins there."""
    options: dict[str, Any] = {"is_split_into_words": True}
    tokens, truncated = encoder.cut(words, **options)
    if not getattr(encoder.tokenizer, "is_fast", False):
        raise DataError("token classification needs a fast tokenizer (tokenizer.json) to align words and tokens")
    limits = {"truncation": True, "max_length": encoder.max_length} if truncated else {}
    encoded = encoder.encoded(words, **options, **limits)
    seen: int | None = None
    firsts: list[int | None] = []
    for word in encoded.word_ids():
        firsts.append(word if word is not None and word != seen else None)
        seen = word
    return tokens, truncated, firsts


def _labels(encoder: Encoder, row: Row, count: int) -> list[int]:
    labels = encoder.cell(row, "label")
    if not isinstance(labels, list) or len(labels) != count:
        size = len(labels) if isinstance(labels, list) else "no list"
        raise DataError(f"{count} words but {size} labels in column {encoder.columns['label']!r}")
    return [IGNORED if label in (IGNORED, None) else encoder.class_number(label) for label in labels]


TASK = Task(
    auto_class="AutoModelForTokenClassification",
    mapping="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    required=(),
    optional=("tokens", "text", "label"),
    encode=encode,
    rows=token_logits,
)
