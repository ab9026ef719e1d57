"""Reading untrusted files of a model folder: a path kept inside it, bytes under a limit, JSON with its faults named."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headscope.errors import ModelError

Pairs = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def quote(text: object, limit: int = 80) -> str:
    """Text from a model file, made short and harmless for a message: quoted, escaped and cut at `limit` characters."""
    shown = ascii(text[:limit] if isinstance(text, str) else text)
    return shown if len(shown) <= limit + 2 else shown[:limit] + "..."


def inside(folder: Path, name: str) -> Path:
    """The path of a file of the folder, after its links are followed and found to stay in the folder or its cache."""
    path = folder / name
    try:
        home = folder.resolve(strict=True)
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise ModelError(f"{folder}: {quote(name)} is missing or a broken link") from None
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{folder}: {quote(name)} cannot be read: {error}") from None
    roots = [home]
    cache = next((up for up in home.parents if up.name.startswith("models--")), None)
    if cache is not None and cache / "snapshots" in home.parents:
        roots.append(cache / "blobs")
    if not any(target.is_relative_to(root) for root in roots):
        raise ModelError(
            f"{folder}: {quote(name)} is a link that leaves the folder", hint="copy the file into the folder"
        )
    return path


def read(path: Path, limit: int, *, length: int | None = None, offset: int = 0) -> tuple[bytes, int]:
    """At most `length` bytes of a regular file from `offset` on, and its size; a whole file must respect `limit`."""
    try:
        size = _regular_size(path)
        if length is None and size > limit:
            raise ModelError(f"{path}: {size} bytes, more than the limit of {limit}")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size if length is None else length), size
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None


def _regular_size(path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: not a regular file")
    return status.st_size


def json_object(data: bytes, where: object, pairs: Pairs = dict) -> dict[str, Any]:
    """The JSON object in these bytes; `where` starts every message, `pairs` makes each object."""
    if not data.strip():
        raise ModelError(f"{where}: empty")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        raise ModelError(f"{where}: not UTF-8 text at byte {error.start}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        ended = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        raise ModelError(f"{where}: {'cut short' if ended else 'not JSON'} at {place}: {error.msg}") from None
    except RecursionError:
        raise ModelError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{where}: not usable JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{where}: a JSON object is needed, not {kind(value)}")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which no key stands twice, for `json_object`."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {quote(twice)} stands twice in one object")
    return made


def kind(value: object) -> str:
    """What sort of JSON value this is, in words."""
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
