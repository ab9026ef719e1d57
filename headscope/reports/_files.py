"""Files that are written whole or not at all: a temporary neighbour, flushed to disk, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from headscope.errors import OutputError, UsageError
from headscope.interrupt import raise_interrupts
from headscope.places import require_parent


def check_output(output: Path | None, force: bool = False) -> None:
    """Refuse an output file that could not be written later, before anything is computed.

    Raises:
        UsageError: the file exists and `force` is not set, or it is a folder.
        OutputError: its folder is missing or not writable.
    """
    if output is None or is_device(output):
        return
    if os.path.isdir(output):
        raise UsageError(f"{output} is a folder, not a file")
    if os.path.exists(output) and not force:
        raise UsageError(f"{output} exists already", hint="pass --force to replace it")
    require_parent(output, _target(output).parent)


def write_file(output: Path, data: bytes, force: bool = False) -> None:
    """Write `data` to a file; until it is complete an older file of that name stays as it was.

    A symbolic link is followed, a device or pipe is written to directly, and the file's mode follows the umask.

    Raises:
        UsageError: the file exists and `force` is not set, or it is a folder.
        OutputError: its folder is missing or not writable, or the disk is full.
    """
    write_files({output: data}, force)


def write_files(files: Mapping[Path, bytes], force: bool = False) -> None:
    """Write files that belong together, each as `write_file` does; none takes its place before all are on the disk.

    Raises:
        UsageError: a file exists and `force` is not set, or it is a folder.
        OutputError: a folder is missing or not writable, or the disk is full.
    """
    for output in files:
        check_output(output, force)
    raise_interrupts()
    staged: dict[Path, Path] = {}
    output = next(iter(files))
    try:
        for output, data in files.items():
            if is_device(output):
                output.write_bytes(data)
            else:
                target = _target(output)
                staged[target] = target.parent / f".headscope-{secrets.token_hex(8)}.tmp"
                _stage(staged[target], data)
        for target, temporary in staged.items():
            os.replace(temporary, target)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _stage(temporary: Path, data: bytes) -> None:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def is_device(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder: a device or a pipe."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _target(path: Path) -> Path:
    """Where the file itself lies: the end of the link if `path` is one."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path
