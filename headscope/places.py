"""Places where output may go: the checks that hold for a file and for a folder alike, before anything is computed."""

from __future__ import annotations

import os
from pathlib import Path

from headscope.errors import OutputError


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
