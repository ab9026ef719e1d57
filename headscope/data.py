"""Data for a study: rows of a file, stdin or Hub data set become the examples of the model's task."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy

from headscope.errors import DataError, ModelError, UsageError
from headscope.examples import Example, Examples
from headscope.fields import find_column, pixel_columns
from headscope.models import LoadedModel
from headscope.rows import Rows
from headscope.sources import read
from headscope.tasks import Encoder

_MAIN = {"text": "text", "images": "image", "sounds": "audio"}
"""The role of what a model reads."""


@dataclass(frozen=True)
class DataOptions:
    """How to read data; the defaults are those of the command line."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Column names given by the user, by role."""
    config: str | None = None
    split: str | None = None
    encoding: str = "utf-8"
    skip_bad: bool = False
    limit: int | None = 512
    """Examples used, the first after a seeded shuffle; None for all."""
    max_length: int | None = None
    on_long: str | None = None
    seed: int = 0
    parse_special: bool = False


def load_examples(data: str, loaded: LoadedModel, options: DataOptions) -> Examples:
    """The examples of `data` for the model's task, shuffled by the seed and cut to the limit.

    Raises:
        DataError: the data cannot be read, or a row does not fit the task.
        UsageError: a column is missing or ambiguous.
    """
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit {options.limit}: expected 1 or more, or all")
    rows = read(data, config=options.config, split=options.split, encoding=options.encoding, skip_bad=options.skip_bad)
    encoder = _encoder(rows, loaded, options)
    items, skipped, bad = _encode(rows, loaded, encoder, options)
    if not items:
        raise DataError(f"no labelled token in {rows.name}" if skipped else f"no examples in {rows.name}")
    if loaded.assumed and items[0].labelled and all(map(_could_be_class, items)):
        raise DataError(
            f"{rows.name}: this model gives one number, and the labels are whole numbers, as those of classes are",
            hint="if they are numbers to be predicted, pass --task regression",
        )
    notes = list(rows.notes)
    if options.limit not in (None, DataOptions.limit) and len(items) < options.limit:
        notes.append(f"--limit {options.limit} is more than there are: all {len(items)} examples are used")
    truncated = sum(example.truncated for example in items)
    if truncated:
        limit = "the model takes" if loaded.task.reads == "sounds" else f"{encoder.max_length} tokens"
        notes.append(f"{truncated} of {len(items)} examples were longer than {limit} and cut")
    if skipped:
        notes.append(f"{skipped} examples without anything to predict were skipped")
    if bad:
        notes.append(f"{bad} rows that do not fit the task were skipped")
    pads, note = _pads(loaded, items)
    return Examples(tuple(items), pads, skipped + bad + rows.skipped, (*notes, *note), rows.name, rows.digest)


def _could_be_class(example: Example) -> bool:
    """Whether every target is a whole number from 0."""
    return all(float(target).is_integer() and target >= 0 for target in example.targets)


def _encoder(rows: Rows, loaded: LoadedModel, options: DataOptions) -> Encoder:
    pixels = tuple(pixel_columns(rows) or ()) if "image" in _roles(loaded) and not options.columns.get("image") else ()
    if loaded.task.reads == "sounds" != loaded.reads:
        raise ModelError("this model reads sounds beside text, which headscope cannot judge on data")
    columns = _columns(rows, loaded, options, pixels)
    reads_text = any(role in columns for role in ("text", "tokens", "context"))
    knows_text = reads_text or "target" in columns
    on_long = options.on_long or ("chunk" if loaded.task_name == "causal-lm" else "truncate")
    if on_long == "chunk" and loaded.task_name != "causal-lm":
        raise UsageError(f"--on-long chunk cuts texts for causal-lm, not for {loaded.task_name}", hint="use truncate")
    return Encoder(
        config=loaded.model.config,
        tokenizer=loaded.tokenizer() if knows_text else None,
        processor=None if reads_text else loaded.processor(),
        max_length=_max_length(loaded, options) if knows_text else 0,
        on_long=on_long,
        seed=options.seed,
        parse_special=options.parse_special,
        columns=columns,
        pixels=pixels,
    )


def _roles(loaded: LoadedModel) -> tuple[str, ...]:
    return (*loaded.task.required, *loaded.task.optional)


def _columns(rows: Rows, loaded: LoadedModel, options: DataOptions, pixels: tuple[str, ...]) -> dict[str, str]:
    """The data's column for each role of the task."""
    found: dict[str, str] = {}
    task = loaded.task
    for role in _roles(loaded):
        if role == "image" and pixels:
            continue
        if not task.required and role in _MAIN.values() and role != _MAIN[loaded.reads]:
            continue  # a lone column is no text to a model that sees or hears
        wanted = options.columns.get(role)
        if role == "target" and "audio" in found:  # data sets of speech call a transcript their text
            wanted = wanted or find_column(rows, role, None, required=False) or _text_column(rows, options)
        if role in ("question", "tokens"):
            wanted = options.columns.get("text")
        if role == "text" and "tokens" in found:
            continue
        wanted = None if role == "tokens" and wanted and not _lists(rows, wanted) else wanted
        column = find_column(rows, role, wanted, required=role in task.required)
        if column is not None:
            found[role] = column
    if not pixels and not any(role in found for role in ("text", "tokens", "context", "image", "audio")):
        find_column(rows, _MAIN[loaded.reads], None, required=True)
    return found


def _text_column(rows: Rows, options: DataOptions) -> str | None:
    return find_column(rows, "text", options.columns.get("text"), required=False)


def _lists(rows: Rows, column: str) -> bool:
    return any(isinstance(row.get(column), list) for row in rows.rows[:10])


def _encode(rows: Rows, loaded: LoadedModel, encoder: Encoder, options: DataOptions) -> tuple[list[Example], int, int]:
    """Examples in seeded order, how many had nothing to predict, and how many rows did not fit."""
    order = numpy.random.Generator(numpy.random.Philox(options.seed)).permutation(len(rows.rows))
    items: list[Example] = []
    number = skipped = bad = 0
    for index in order.tolist():
        if options.limit is not None and len(items) >= options.limit:
            break
        try:
            with _at(rows, index):
                found = loaded.task.encode(encoder, rows.rows[index], number)
        except DataError:
            if not options.skip_bad:
                raise
            bad += 1
            continue
        number += len(found)
        usable = [example for example in found if example.usable]
        skipped += len(found) - len(usable)
        items += usable
    return items[: options.limit], skipped, bad


@contextlib.contextmanager
def _at(rows: Rows, index: int) -> Iterator[None]:
    """Say in an error which row it is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{rows.name}, row {rows.numbers[index]}: {error}", hint=error.hint) from None


def _max_length(loaded: LoadedModel, options: DataOptions) -> int:
    limit = loaded.max_length()
    if options.max_length is None:
        return limit or 512
    if options.max_length < 1:
        raise UsageError(f"--max-length {options.max_length}: expected 1 or more")
    if limit is not None and options.max_length > limit:
        raise UsageError(f"--max-length {options.max_length} is more than this model's limit of {limit} tokens")
    return options.max_length


def _pads(loaded: LoadedModel, items: list[Example]) -> tuple[dict[str, int], tuple[str, ...]]:
    """What pads each input; a model without a usable pad token gets a stand-in that occurs in no example."""
    if "input_ids" not in items[0].inputs:
        return {}, ()
    config = loaded.model.config.get_text_config()
    by_pad = loaded.task.mapping == "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    known = range(int(config.vocab_size))
    if config.pad_token_id in known:
        return {"input_ids": config.pad_token_id}, ()
    used = {token for example in items for token in example.inputs["input_ids"]}
    pad: Any = getattr(loaded.tokenizer(), "pad_token_id", None)
    note: tuple[str, ...] = ()
    if pad not in known or pad in used:
        free = [token for token in known if token not in used]
        if by_pad and not free:
            raise ModelError("this model has no pad token and the data uses every token", hint="give it a pad token")
        pad = free[-1] if free else 0  # the attention mask hides it in any case
        note = (f"the model has no pad token: token {pad} stands in for it",)
    if by_pad:
        config.pad_token_id = pad  # classifiers of decoders find a text's last token by it
    return {"input_ids": pad}, note
