"""The manifest headscope.json: what a checkpoint is, how it was made, and the hash of each of its files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headscope.errors import ModelError
from headscope.jsonfiles import inside, json_object, kind, quote, read, unique

SCHEMA = 1
"""The version of the manifest's layout that this headscope writes, and the newest that it reads."""
NAME = "headscope.json"
LIMIT = 64 * 1024**2
"""Bytes; the scores of 10,000 heads take about one million."""


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a folder and those below it, by relative name in order, without the manifest itself."""
    found: dict[str, str] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            found[path.relative_to(folder).as_posix()] = _sha256(path)
    found.pop(NAME, None)
    return dict(sorted(found.items()))


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write headscope.json: the schema version, `content` in its own order, and the hashes of all files there are.

    Raises:
        ValueError: `content` holds NaN or infinity, which JSON cannot say, or a field that is added here.
    """
    added = {"schema", "files"} & content.keys()
    if added:
        raise ValueError(f"the manifest's {sorted(added)[0]} is not for the caller to give")
    whole = {"schema": SCHEMA, **content, "files": hashes(folder)}
    text = json.dumps(whole, indent=2, allow_nan=False) + "\n"
    (folder / NAME).write_bytes(text.encode("ascii"))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, or None where there is none.

    Raises:
        ModelError: it is no JSON object, its schema or its list of files is unusable, or a newer headscope wrote it.
    """
    if not os.path.lexists(folder / NAME):
        return None
    path = inside(folder, NAME)
    data, _ = read(path, LIMIT)
    manifest = json_object(data, path, unique)
    _check_schema(path, manifest.get("schema"))
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise ModelError(f"{path}: no list of files with the hash of each")
    return manifest


def changed_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Files of a manifest that are missing, lead out of the folder or have another hash, in order of their names."""
    return sorted(name for name, digest in manifest["files"].items() if _found_hash(folder, name) != digest)


def _check_schema(path: Path, schema: object) -> None:
    if type(schema) is not int or schema < 1:
        found = "is missing" if schema is None else f"is {kind(schema)}, {quote(schema)}"
        raise ModelError(f"{path}: schema {found}, expected a whole number from 1")
    if schema > SCHEMA:
        raise ModelError(
            f"{path}: written by a newer headscope (schema {schema}, this one reads up to {SCHEMA})",
            hint="pip install --upgrade headscope",
        )


def _found_hash(folder: Path, name: str) -> str | None:
    try:
        path = inside(folder, name)
        return _sha256(path) if path.is_file() else None
    except (ModelError, OSError, ValueError):  # ValueError: a null character in the name
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
