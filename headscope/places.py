"""Places where output may go: the checks that hold for a file and for a folder alike, before anything is computed."""

from __future__ import annotations

import os
from pathlib import Path

from headscope.errors import OutputError, UsageError


def require_parent(target: Path, parent: Path) -> None:
    """Refuse an output `target` whose folder `parent` cannot take it.

    Raises:
        OutputError: the folder is missing, none or not writable.
    """
    if not os.path.exists(parent):
        raise OutputError(f"cannot write {target}: folder {parent} does not exist", hint=f"mkdir -p {parent}")
    if not os.path.isdir(parent):
        raise OutputError(f"cannot write {target}: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {target}: folder {parent} is not writable")


def require_folder(folder: Path) -> None:
    """Refuse a folder that is to be filled and is neither there nor can be made.

    Raises:
        UsageError: it is a file.
        OutputError: it, or the folder that it would lie in, cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder")
    require_parent(folder, folder if folder.exists() else folder.absolute().parent)
