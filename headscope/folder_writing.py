"""Folders that are written whole or not at all: a hidden neighbour, filled, flushed to disk, then renamed.

With `force` an old folder stands until the new one is complete and takes its place in two renames. A kill between them
leaves the old folder whole beside its place, and the next run puts it back first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Container, Iterator
from pathlib import Path

from safetensors import SafetensorError

from headscope import leftovers
from headscope.errors import OutputError, UsageError
from headscope.places import require_parent

_DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


def check_target(target: Path, source: Path | None, *, force: bool) -> None:
    """Refuse a folder that could not or should not be written later, before anything slow is done.

    A link is followed: the folder at its end is the one that is written. An old folder that a killed run had moved
    aside is put back first. `source` is the folder, or the one file, of the model that is read.

    Raises:
        UsageError: it exists and `force` is not set; it is a file, a mount point or no checkpoint; or it is, holds or
            lies in the source.
        OutputError: its folder is missing or not writable, or no folder can have its name.
    """
    real = _real(target)
    require_parent(target, real.parent)
    if not _exists(target, real):
        leftovers.restore(real)
    if source is not None:
        _check_source(target, real, source)
    if not _exists(target, real):
        return
    if not real.is_dir():
        raise UsageError(f"{target} is a file, not a folder")
    if not force:
        raise UsageError(f"{target} exists already", hint="pass --force to replace it")
    _check_replaceable(target, real)


@contextlib.contextmanager
def new_folder(target: Path, *, source: Path | None = None, force: bool = False, needed: int = 0) -> Iterator[Path]:
    """An empty folder beside `target`, to be filled and proved in this block; at its end it takes the target's place.

    After any exception it is gone and the target stands as it was. Files and folders get the modes of the umask.
    `needed` is the number of bytes to come, where known: too little room is told before anything is written.

    Raises:
        UsageError: as `check_target`.
        OutputError: as `check_target`; or the disk is full or failed, or another run writes the target or has done so.
    """
    check_target(target, source, force=force)
    real = _real(target)
    free = shutil.disk_usage(real.parent).free
    if needed > free:
        raise OutputError(f"cannot write {target}: {needed} bytes needed, {free} free")
    temporary = leftovers.temporary_name(real)
    try:
        with told(target, free):
            lock = _begin(temporary, target)
        try:
            with told(target, free, _DISK_FAULTS):
                yield temporary
            with told(target, free):
                _finish(temporary, target, force=force)
        finally:
            os.close(lock)
    finally:
        leftovers.settle(temporary, real)


def _real(target: Path) -> Path:
    """Where the folder itself lies: the end of the link if `target` is one."""
    real = Path(os.path.realpath(target))
    if os.path.islink(real):
        raise UsageError(f"{target} is a link that leads in a circle")
    try:
        os.fsencode(real).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{target}: its name is not UTF-8, and no weights could be read there") from None
    return real


def _exists(target: Path, real: Path) -> bool:
    try:
        real.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from None
    return True


def _check_source(target: Path, real: Path, source: Path) -> None:
    origin = Path(os.path.realpath(source))
    if _is_within(real, origin):
        raise UsageError(f"{target} is the model that is read, or lies in it", hint="name another folder")
    if _is_within(origin, real):
        raise UsageError(f"{target} holds the model that is read", hint="name another folder")


def _is_within(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or lies in it, under whatever names the file system knows them."""
    ups = [up for up in (path, *path.parents) if os.path.exists(up)]
    return os.path.exists(folder) and any(os.path.samefile(up, folder) for up in ups)


def _check_replaceable(target: Path, real: Path) -> None:
    """Only a checkpoint or an empty folder is ever removed, and only where that can succeed."""
    if os.path.ismount(real):
        raise UsageError(f"{target} is a mount point, which cannot be replaced", hint="name a folder inside it")
    if not os.access(real, os.R_OK | os.W_OK | os.X_OK):
        raise OutputError(f"cannot replace {target}: it is not writable")
    names = os.listdir(real)
    weights = any(name.endswith((".safetensors", ".bin")) for name in names)
    if names and not ("config.json" in names and weights):
        raise UsageError(
            f"{target} is no checkpoint: it holds files, but not config.json and weights, so it is not replaced",
            hint="name another folder, or remove this one yourself",
        )


@contextlib.contextmanager
def told(target: Path, free: int | None = None, faults: Container[int] | None = None) -> Iterator[None]:
    """What the disk refuses while the block writes `target`, as one line; with `faults`, only these error numbers.

    `free` is the number of bytes that were free before.

    Raises:
        OutputError: the disk refuses.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = _error_number(error)
        if faults is not None and code not in faults:
            raise
        reason = os.strerror(code) if code else str(error)
        full = free is not None and code in (errno.ENOSPC, errno.EDQUOT)
        room = f" ({free} bytes were free)" if full else ""
        raise OutputError(f"cannot write {target}: {reason}{room}") from error


def _error_number(error: OSError | SafetensorError) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 0


def _begin(temporary: Path, target: Path) -> int:
    """The lock of the hidden folder, made after what killed runs have left is gone."""
    try:
        leftovers.clear(_real(target))
        return leftovers.make(temporary)
    except BlockingIOError:
        raise OutputError(f"cannot write {target}: another run is writing it") from None


def _finish(temporary: Path, target: Path, *, force: bool) -> None:
    """Flush the folder and put it in the target's place."""
    real = _real(target)
    _flush(temporary)
    try:
        if force and os.path.lexists(real):
            check_target(target, None, force=True)
            os.rename(real, leftovers.aside_name(temporary))
        os.rename(temporary, real)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        raise OutputError(f"{target} exists already: something else has written it meanwhile") from error
    with contextlib.suppress(OSError):  # it is in its place, there is nothing to undo
        _sync(real.parent)
    leftovers.settle(temporary, real)
    aside = leftovers.aside_name(temporary)
    if os.path.lexists(aside):
        raise OutputError(f"{target} is written, but the old one could not be removed: {aside}")


def _flush(folder: Path) -> None:
    """Give everything in the folder the modes of the umask, which the folder itself was made with, and flush it."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    for root, _, names in os.walk(folder, topdown=False):
        for path in (os.path.join(root, name) for name in names):
            if not os.path.islink(path):
                _sync(path, mode & 0o666)
        _sync(root, mode)


def _sync(path: str | Path, mode: int | None = None) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if mode is not None:
            with contextlib.suppress(PermissionError):  # it is ours: this file system keeps no modes
                os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot flush a folder
            raise
    finally:
        os.close(descriptor)
