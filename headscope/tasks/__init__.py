"""Tasks: how rows of data become examples and what a model's output predicts; a file here is a name for `--task`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from headscope.errors import DataError, ModelError, UsageError
from headscope.examples import IGNORED, Batch, Example
from headscope.foreign import RAISED, NoBareErrors, first_line
from headscope.losses import Distribution

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Encoder:
    """What turns a row into examples: tokenizer, preparation of images or sounds, limits, the configuration."""

    config: PreTrainedConfig
    tokenizer: Any = None
    processor: Any = None
    max_length: int = 512
    on_long: str = "truncate"
    seed: int = 0
    parse_special: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    """The data's column for each role that was found: text, pair, label, target, image, audio, context, question,
    answer."""
    pixels: tuple[str, ...] = ()
    """Pixel columns in order, where images are given that way."""

    def cell(self, row: Row, role: str) -> Any:
        """The row's value for a role.

        Raises:
            DataError: it is empty.
        """
        column = self.columns[role]
        value = row.get(column)
        if value is None:
            raise DataError(f"no value in column {column!r}")
        return value

    def text(self, row: Row, role: str) -> str:
        """The row's text for a role.

        Raises:
            DataError: it is empty or no text.
        """
        value = self.cell(row, role)
        if isinstance(value, (dict, list)):
            raise DataError(f"column {self.columns[role]!r} holds a {type(value).__name__}, not a text")
        return value if isinstance(value, str) else str(value)

    def tokens(self, text: Any, pair: str | None = None, **options: Any) -> dict[str, list[int]]:
        """Token ids and masks of a text, or of a pair, uncut; `_special` marks the tokens put around them.

        Special-token strings in the text are plain text unless asked for.
        """
        if self.tokenizer is None:
            raise UsageError("this model has no tokenizer, so it cannot read text")
        masks = {"return_attention_mask": True, "return_special_tokens_mask": True, "verbose": False}
        encoded = self.encoded(text, pair, **masks, **options)
        found = {name: list(values) for name, values in encoded.items() if name in _TEXT_INPUTS}
        found["_special"] = list(encoded["special_tokens_mask"])
        if not self.parse_special and self._names_special((text, pair, options.get("text_target"))):
            found["input_ids"] = self._plain(found["input_ids"], found["_special"])
        return found

    def encoded(self, *texts: Any, **options: Any) -> Any:
        """What the tokenizer makes of texts; special-token strings in them are plain text unless asked for.

        Raises:
            ModelError: it cannot read them, as one may that was loaded from broken files.
        """
        try:
            with NoBareErrors():
                return self.tokenizer(*texts, split_special_tokens=not self.parse_special, **options)
        except RAISED as error:
            raise ModelError(f"the model's tokenizer fails on a text: {first_line(error)}") from error

    def special_ids(self) -> set[int]:
        """Tokens that stand for no text: all special ones but the unknown one."""
        return set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}

    def _names_special(self, texts: tuple[Any, ...]) -> bool:
        """Whether a text, or one of its words, holds the string of a special token."""
        words = [word for text in texts if text for word in (text if isinstance(text, list) else [text])]
        return any(token in word for token in self.tokenizer.all_special_tokens for word in words)

    def _plain(self, ids: list[int], around: list[int]) -> list[int]:
        """A vocabulary that holds special tokens as ordinary entries finds them in text: they are unknown words."""
        unknown, special = self.tokenizer.unk_token_id, self.special_ids()
        if unknown is None or not getattr(self.tokenizer, "is_fast", False):
            return ids
        return [unknown if token in special and not own else token for token, own in zip(ids, around, strict=True)]

    def cut(self, text: Any, pair: str | None = None, **options: Any) -> tuple[dict[str, list[int]], bool]:
        """Token ids and masks within the model's limit, and whether that shortened the text.

        Raises:
            DataError: the text is too long and `--on-long error` was asked for, or it has no token.
            UsageError: the limit leaves no room for text.
        """
        whole = self.tokens(text, pair, **options)
        if not whole["input_ids"]:
            raise DataError("the text has no token")
        if len(whole["input_ids"]) <= self.max_length:
            return whole, False
        if self.on_long == "error":
            raise DataError(f"{len(whole['input_ids'])} tokens, more than the limit of {self.max_length}")
        shorter = self.tokens(text, pair, truncation=True, max_length=self.max_length, **options)
        if len(shorter["input_ids"]) > self.max_length:
            raise UsageError(f"--max-length {self.max_length} leaves no room for text between special tokens")
        return shorter, True

    def label(self, row: Row) -> int:
        """The class number of the row's label, given as a number or by its name in the model's configuration.

        A label of -100 is ignored, as everywhere in transformers.

        Raises:
            DataError: the model has no such class.
        """
        value = self.cell(row, "label")
        return IGNORED if value == IGNORED else self.class_number(value)

    def class_number(self, value: Any) -> int:
        """The class number that a label means; see `label`."""
        names = {str(name): int(number) for name, number in (self.config.label2id or {}).items()}
        if isinstance(value, str):
            if value in names:
                return names[value]
            if not re.fullmatch(r"\s*-?[0-9]+\s*", value):
                listing = ", ".join(sorted(names, key=lambda name: names[name])[:20])
                raise DataError(f"label {value[:80]!r} is none of the model's: {listing}")
            value = int(value)
        if not isinstance(value, int):
            raise DataError(
                f"label {str(value)[:80]} is no class number; use --task regression for a model that predicts numbers"
            )
        if not 0 <= int(value) < int(self.config.num_labels or 0):
            raise DataError(f"label {value} is outside the model's {self.config.num_labels} classes")
        return int(value)


_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Task:
    """One task.

    `mapping` names transformers' table of the classes that do it, `auto_class` the loader. `required` and `optional`
    are column roles. `rows` turns a model's output into `[example position class]`; where `vocabulary` is set, these
    are the logits of the language-model head, which is then run in pieces.
    """

    auto_class: str
    mapping: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    encode: Callable[[Encoder, Row, int], list[Example]]
    rows: Callable[[Any, Batch], Tensor]
    distribution: Distribution = Distribution.CATEGORICAL
    vocabulary: bool = False
    reads: str = "text"
    prepare: Callable[[Any, Batch], dict[str, Any]] | None = None
    """Adds inputs that only the model can make, such as the decoder's."""


def logits(output: Any, batch: Batch) -> Tensor:
    """One prediction per example: `[example 1 class]`."""
    return output.logits.unsqueeze(1)


def token_logits(output: Any, batch: Batch) -> Tensor:
    """A prediction at every token: `[example token class]`."""
    return output.logits


def example(number: int, tokens: dict[str, Any], targets: list[Any], **flags: Any) -> Example:
    """An example of encoded text; helper entries that begin with an underscore are left out."""
    inputs = {name: values for name, values in tokens.items() if not name.startswith("_")}
    return Example(number, inputs, tuple(targets), length=len(inputs["input_ids"]), **flags)


def moved_right(config: Any, labels: Tensor) -> Tensor:
    """The tokens one place later, behind the decoder's start token."""
    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    moved = torch.roll(labels, 1, dims=1)
    moved[:, 0] = start
    return moved.masked_fill(moved == IGNORED, config.pad_token_id or 0)
