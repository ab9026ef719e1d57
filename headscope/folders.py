"""A folder of images or sounds read as rows: one per file, labelled by the name of its subfolder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection

from headscope.errors import DataError
from headscope.formats import Example, Parsed
from headscope.unpack import printable, split_suffix

MEDIA = {
    "image": ("png", "jpg", "jpeg", "bmp", "gif", "webp", "tif", "tiff"),
    "audio": ("wav", "flac", "mp3", "ogg", "opus", "m4a"),
}
LISTED = 10

Member = tuple[str, str]
"""Subfolder ("" for the folder itself) and file name."""


def folder(path: str, data_suffixes: Collection[str]) -> tuple[Parsed, str]:
    """The rows of a folder of images or sounds, sorted by label and file name, and the digest of names and bytes.

    Raises:
        DataError: it cannot be read, or holds data files, no media, both kinds, or media at more than one depth.
    """
    label = printable(path)
    try:
        inside = _members(path)
    except OSError as error:
        raise DataError(f"cannot read the folder {label}: {error.strerror}") from error
    found = {
        role: [one for one in inside if one[1].lower().rpartition(".")[2] in suffixes]
        for role, suffixes in MEDIA.items()
    }
    roles = [role for role, members in found.items() if members]
    if not roles:
        raise _no_media(path, inside, data_suffixes)
    if len(roles) > 1:
        raise DataError(f"{label} holds both images and sounds", hint="keep each kind in a folder of its own")
    members = found[roles[0]]
    labelled = [subfolder for subfolder, _ in members if subfolder]
    if labelled and len(labelled) < len(members):
        raise DataError(
            f"{label} holds {roles[0]} files of its own and in subfolders, so it is not clear whether they have labels",
            hint=f"subfolders: {_listing(set(labelled))}",
        )
    rows: list[Example] = []
    for subfolder, name in members:
        row: Example = {roles[0]: os.path.join(path, subfolder, name)}
        rows.append(row | {"label": subfolder} if subfolder else row)
    return Parsed(rows, list(rows[0]), list(range(1, len(rows) + 1))), _digest(path, members)


def _members(path: str) -> list[Member]:
    """All files of the folder and of its subfolders, one level deep, sorted; hidden ones are left out."""
    members: list[Member] = []
    for name in _visible(path):
        inner = os.path.join(path, name)
        if os.path.isdir(inner):
            members.extend((name, file) for file in _visible(inner) if not os.path.isdir(os.path.join(inner, file)))
        else:
            members.append(("", name))
    return sorted(members)


def _visible(path: str) -> list[str]:
    return [name for name in os.listdir(path) if not name.startswith(".")]


def _no_media(path: str, inside: Collection[Member], data_suffixes: Collection[str]) -> DataError:
    label = printable(path)
    files = [os.path.join(*member) for member in inside if split_suffix(member[1])[0] in data_suffixes]
    if files:
        return DataError(f"{label} is a folder, not a data file", hint=f"name one of its files: {_listing(files)}")
    deeper = [name for name in _visible(path) if os.path.isdir(os.path.join(path, name))]
    hint = f"name one of its subfolders, if one holds them: {_listing(deeper)}" if deeper else None
    return DataError(f"no examples in {label}: no data file, image or sound", hint=hint)


def _listing(names: Collection[str]) -> str:
    shown = ", ".join(printable(name) for name in sorted(names)[:LISTED])
    return f"{shown} and {len(names) - LISTED} more" if len(names) > LISTED else shown


def _digest(path: str, members: Collection[Member]) -> str:
    total = hashlib.sha256()
    for subfolder, name in members:
        inner = os.path.join(path, subfolder, name)
        try:
            with open(inner, "rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise DataError(f"cannot read {printable(inner)}: {error.strerror}") from error
        # two hashes of fixed length, so that no two different folders feed the hash the same bytes
        total.update(hashlib.sha256(os.fsencode(f"{subfolder}/{name}")).digest() + content)
    return total.hexdigest()
