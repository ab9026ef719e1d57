"""A folder is a registry: each file in it holds one entry, and the file's name is the entry's name.

Names are listed without importing anything, so that `--help` and error messages need neither torch nor pandas.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headscope.errors import UsageError, nearest

_PACKAGE = Path(__file__).parent


def names(folder: str) -> list[str]:
    """The entries of `headscope/<folder>/` in alphabetical order, as typed on the command line."""
    files = sorted(_PACKAGE.joinpath(folder).glob("*.py"))
    return [file.stem.replace("_", "-") for file in files if not file.stem.startswith("_")]


def load(folder: str, name: str, entry: str) -> Any:
    """The object called `entry` in the file `name` of `headscope/<folder>/`.

    Raises:
        UsageError: there is no such file; the message lists those there are.
    """
    known = names(folder)
    if name not in known:
        raise UsageError(f"unknown {folder.rstrip('s')} {name!r}", hint=nearest(name, known))
    module = importlib.import_module(f"headscope.{folder}.{name.replace('-', '_')}")
    return getattr(module, entry)


def chosen(folder: str, entry: str, wanted: Iterable[str], what: str) -> dict[str, Any]:
    """The entries that a list of names asks for, each once; `all` stands for every one. `what` is what errors call one.

    Raises:
        UsageError: a name is unknown.
    """
    known, listed = names(folder), list(wanted)
    listed = known if "all" in listed else list(dict.fromkeys(listed))
    for name in listed:
        if name not in known:
            raise UsageError(f"no {what} {name!r}", hint=nearest(name, [*known, "all"]))
    return load_all(folder, entry, listed)


def load_all(folder: str, entry: str, only: Iterable[str] | None = None) -> dict[str, Any]:
    """All entries of a folder, or those named in `only`, by name and in the order given."""
    return {name: load(folder, name, entry) for name in (names(folder) if only is None else only)}
