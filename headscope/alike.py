"""Whether two models can be judged on the same examples: one task, one way to read data, the same answers."""

from __future__ import annotations

import json
from typing import Any

from headscope.errors import UsageError
from headscope.examples import Examples
from headscope.models import LoadedModel

_ONE_DATA = "models are compared on the same inputs; evaluate them apart"


def require_alike(first: LoadedModel, other: LoadedModel, examples: Examples) -> None:
    """Refuse a model that cannot read the examples that were made for the first, or answers otherwise.

    Raises:
        UsageError: task, classes, vocabulary, tokenizer or preparation differ, or an example is too long.
    """
    a, b = first.location.name, other.location.name
    if first.task_name != other.task_name:
        raise UsageError(f"{a} does {first.task_name}, {b} does {other.task_name}", hint="--task chooses one for both")
    config, second = first.model.config, other.model.config
    if first.task.vocabulary:
        sizes = [int(model.model.config.get_text_config().vocab_size) for model in (first, other)]
        if sizes[0] != sizes[1]:
            raise UsageError(f"{a} has a vocabulary of {sizes[0]}, {b} one of {sizes[1]}", hint=_ONE_DATA)
    elif "label" in first.task.optional:
        if config.num_labels != second.num_labels:
            raise UsageError(f"{a} has {config.num_labels} classes, {b} has {second.num_labels}", hint=_ONE_DATA)
        if _named(config) and _named(second) and config.id2label != second.id2label:
            raise UsageError(f"{a} and {b} number their classes differently", hint="see id2label in config.json")
    if first.reads == "text":
        _require_one_tokenizer(first, other)
        _require_room(other, examples)
    elif _preparation(first) != _preparation(other):
        raise UsageError(f"{a} and {b} prepare {first.reads} differently", hint=_ONE_DATA)


def _named(config: Any) -> bool:
    """Whether classes have names of their own, not those that transformers makes up."""
    return any(name != f"LABEL_{number}" for number, name in (config.id2label or {}).items())


def _require_one_tokenizer(first: LoadedModel, other: LoadedModel) -> None:
    a, b = first.tokenizer(), other.tokenizer()
    names = f"{first.location.name} and {other.location.name}"
    if a.get_vocab() != b.get_vocab():
        sizes = f"{len(a.get_vocab())} and {len(b.get_vocab())} tokens"
        raise UsageError(f"the tokenizers of {names} have different vocabularies ({sizes})", hint=_ONE_DATA)
    if _rules(a) != _rules(b):
        raise UsageError(f"the tokenizers of {names} cut texts differently", hint=_ONE_DATA)


def _rules(tokenizer: Any) -> dict[str, Any] | None:
    """How a fast tokenizer turns text into tokens, without the state of its last call; None for others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    return {name: rule for name, rule in json.loads(backend.to_str()).items() if name not in ("truncation", "padding")}


def _require_room(other: LoadedModel, examples: Examples) -> None:
    longest = max((len(example.inputs.get("input_ids", ())) for example in examples.items), default=0)
    limit = other.max_length()
    if limit is not None and longest > limit:
        raise UsageError(
            f"{other.location.name} reads at most {limit} tokens, the longest example has {longest}",
            hint=f"use --max-length {limit}",
        )


def _preparation(loaded: LoadedModel) -> tuple[Any, ...]:
    """How images or sounds become inputs: the processor's settings, and the size and channels that the model takes."""
    settings = {name: value for name, value in loaded.processor().to_dict().items() if "processor" not in name}
    sizes = [getattr(loaded.model.config, name, None) for name in ("image_size", "num_channels")]
    return settings, sizes
