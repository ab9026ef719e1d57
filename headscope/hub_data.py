"""A data set of the Hugging Face Hub read as rows; its scripts are never run, and nothing is fetched when offline."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from typing import TYPE_CHECKING

from headscope.errors import DataError, HeadscopeError, UsageError, nearest
from headscope.formats import Example, Parsed
from headscope.interrupt import raise_interrupts
from headscope.unpack import printable

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

NAME = re.compile(r"[a-z0-9][\w.-]*(/[a-z0-9][\w.-]*)?", re.ASCII | re.IGNORECASE)
SPLITS = ("validation", "dev", "valid", "test", "train")
"""The split that is used when none is named: the first of these that exists, held-out ones first."""
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def could_be_id(data: str) -> bool:
    """Whether the text has the form `name` or `owner/name`."""
    return NAME.fullmatch(data) is not None


def hub_rows(data: str, *, config: str | None, split: str | None, hint: str | None) -> tuple[Parsed, str]:
    """The rows of one split of a Hub data set, undecoded, and the digest of its identity and rows.

    Raises:
        DataError: absent, gated, offline and not in the cache, in need of a script, or broken; has `hint`.
        UsageError: no such config or split; lists those that exist.
    """
    import pyarrow
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError

    _refuse_reader_name(data, hint)
    _refuse_late_offline(data, hint)
    try:
        builder = _builder(data, config)
        _require_split(builder, data, split)
        raise_interrupts()
        builder.download_and_prepare()
        _require_split(builder, data, split)
        chosen, notes = (split, []) if split is not None else _choice(builder)
        table = _split(builder, chosen)
        rows: list[Example] = table.to_list()
    except (DatasetsError, HTTPError, pyarrow.ArrowException, OSError, RuntimeError, ValueError) as error:
        raise _failure(data, error, hint) from error
    identity = [data, builder.hash, builder.config.name, chosen]
    digest = hashlib.sha256(json.dumps(identity).encode())
    for row in rows:
        digest.update(repr(row).encode("utf-8", "backslashreplace"))
    return Parsed(rows, table.column_names, list(range(1, len(rows) + 1)), notes), digest.hexdigest()


def _refuse_reader_name(data: str, hint: str | None) -> None:
    """A name such as `csv` or `text` means a reader to `datasets`, which would read the current folder with it."""
    from datasets import packaged_modules

    if data in getattr(packaged_modules, "_PACKAGED_DATASETS_MODULES", ()):
        raise DataError(f"no file or folder {data!r}, and no Hub data set can have that name", hint=hint)


def _refuse_late_offline(data: str, hint: str | None) -> None:
    """The libraries read the offline variables when they are imported, so a later change would not keep them quiet."""
    from datasets import config
    from huggingface_hub import constants

    if _offline() and not (config.HF_HUB_OFFLINE or constants.HF_HUB_OFFLINE):
        raise _offline_error(data, hint)


def _offline() -> str | None:
    """The variable that switches the network off, if one does."""
    return next((name for name in OFFLINE if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}), None)


def _offline_error(data: str, hint: str | None) -> DataError:
    return DataError(
        f"no file or folder {data!r}, and no Hub data set of that name can be fetched: offline, as {_offline()} is set",
        hint=hint,
    )


def _builder(data: str, config: str | None) -> DatasetBuilder:
    from datasets import load_dataset_builder

    try:
        return load_dataset_builder(data, config)
    except ValueError as error:
        known = _names_in(str(error))
        if config is not None and known and "not found" in str(error):
            raise UsageError(f"{data} has no --config {config!r}", hint=nearest(config, known)) from error
        if config is None and known and "Config name is missing" in str(error):
            raise UsageError(f"{data} needs a --config", hint="known: " + ", ".join(known)) from error
        raise


def _names_in(message: str) -> list[str]:
    """The list of names that stands in a message of `datasets`, which offers it nowhere else."""
    found = re.search(r"\[.*?\]", message)
    try:
        names = ast.literal_eval(found.group()) if found else []
    except (ValueError, SyntaxError):
        return []
    return [name for name in names if isinstance(name, str)]


def _require_split(builder: DatasetBuilder, data: str, split: str | None) -> None:
    """Nothing where the splits are not known yet, or each part of `train+test[:9]` exists."""
    known = list(builder.info.splits or ())
    for part in split.split("+") if split is not None and known else ():
        name = part.strip().partition("[")[0]
        if name not in {*known, "all"}:
            raise UsageError(f"{data} has no --split {name!r}", hint=nearest(name, known))


def _choice(builder: DatasetBuilder) -> tuple[str, list[str]]:
    known = list(builder.info.splits or ())
    if len(known) < 2:
        return (known or ["train"])[0], []
    chosen = next((name for name in SPLITS if name in known), known[0])
    return chosen, [f"split {chosen!r} is used, of {', '.join(known)}; --split takes another"]


def _split(builder: DatasetBuilder, split: str) -> Dataset:
    from datasets import Dataset

    try:
        table = builder.as_dataset(split=split)
    except (ValueError, AssertionError) as error:
        raise UsageError(f"--split {split!r} cannot be read: {_line(error)}") from error
    assert isinstance(table, Dataset), "one split name gives one data set"
    return table


def _failure(data: str, error: Exception, hint: str | None) -> HeadscopeError:
    """What went wrong at the Hub in our words."""
    from datasets.exceptions import DatasetNotFoundError

    if "scripts are no longer supported" in str(error):
        return DataError(
            f"Hub data set {data} needs its loading script, and scripts are not run",
            hint="download its .parquet or .jsonl files (most have the revision refs/convert/parquet) and name one",
        )
    if _offline():
        return _offline_error(data, hint)
    if isinstance(error, DatasetNotFoundError) and "gated" not in str(error):
        return DataError(f"no file, folder or Hub data set {data!r} (or it is private)", hint=hint)
    if isinstance(error, ConnectionError):
        return DataError(f"no file or folder {data!r}, and the Hub cannot be reached to look for it", hint=hint)
    return DataError(f"Hub data set {data} cannot be read: {_line(error)}", hint=hint)


def _line(error: Exception) -> str:
    return printable(str(error).strip().partition("\n")[0]) or type(error).__name__
