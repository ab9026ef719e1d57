"""The hidden neighbours of a folder that is being written, and what becomes of them when a run is killed.

A run fills `.NAME.headscope-PID-HEX`, under a lock that ends with its process. To replace an old folder it moves that
to the same name with `.old`, and back if the new one does not come to stand in its place. As long as both stand there,
the old one is whole and wanted; where the filled one has left its name, it has taken the place, and the old one is done
with.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path

from headscope.errors import OutputError
from headscope.interrupt import raise_interrupts

_OLD = ".old"


def temporary_name(target: Path) -> Path:
    """A new hidden name beside the target."""
    return target.with_name(f"{_stem(target)}{os.getpid()}-{secrets.token_hex(8)}")


def aside_name(temporary: Path) -> Path:
    """Where the run that fills `temporary` puts the old folder."""
    return temporary.with_name(temporary.name + _OLD)


def make(temporary: Path) -> int:
    """Make the hidden folder and lock it, until the returned descriptor is closed or the process has ended.

    Raises:
        BlockingIOError: a run that has just begun took it for a leftover.
    """
    raise_interrupts()
    os.mkdir(temporary)
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        _lock(descriptor)
        if not temporary.is_dir():
            raise BlockingIOError
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def restore(target: Path) -> None:
    """Put the old folder that a killed run had moved aside back in its place, if that is free.

    Raises:
        OutputError: it cannot be moved.
    """
    for aside in _leftovers(target, _OLD):
        if os.path.lexists(_filled(aside)):
            _put_back(aside, target)


def clear(target: Path) -> None:
    """Remove what killed runs have left beside the target.

    Raises:
        BlockingIOError: one of them still runs.
    """
    for temporary in _leftovers(target, ""):
        try:
            descriptor = os.open(temporary, os.O_RDONLY)
        except FileNotFoundError:  # its run has just ended
            continue
        try:
            if _lock(descriptor):  # without locks it may be in use, so it stays
                shutil.rmtree(temporary, ignore_errors=True)
        finally:
            os.close(descriptor)
    for aside in _leftovers(target, _OLD):
        if os.path.lexists(target) and not os.path.lexists(_filled(aside)):
            shutil.rmtree(aside, ignore_errors=True)


def settle(temporary: Path, target: Path) -> None:
    """End what a run began: an old folder goes back to its place if that is free, and all the rest is removed."""
    aside = aside_name(temporary)
    _put_back(aside, target)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)


def _filled(aside: Path) -> Path:
    """The folder that the run which moved this one aside has filled."""
    return aside.with_name(aside.name.removesuffix(_OLD))


def _put_back(aside: Path, target: Path) -> None:
    if os.path.lexists(target) or not os.path.lexists(aside):
        return
    try:
        os.rename(aside, target)
    except FileNotFoundError:  # another run has done it
        return
    except OSError as error:
        raise OutputError(f"cannot put {target} back: {error.strerror}", hint=f"mv {aside} {target}") from error


def _stem(target: Path) -> str:
    """The beginning of all hidden names for a target; a name too long to be made longer stands as its hash."""
    name = os.fsencode(target.name)
    return f".{target.name if len(name) <= 200 else hashlib.sha256(name).hexdigest()[:32]}.headscope-"


def _leftovers(target: Path, ending: str) -> list[Path]:
    """Hidden folders of all runs for this target: those filled or removed (""), or those moved aside (`_OLD`)."""
    pattern = re.compile(re.escape(_stem(target)) + r"\d+-[0-9a-f]+" + re.escape(ending))
    try:
        with os.scandir(target.parent) as entries:
            found = [e.name for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except PermissionError:  # a folder to write in but not to look into
        return []
    return [target.parent / name for name in sorted(found)]


def _lock(descriptor: int) -> bool:
    """Lock an open folder; False on a file system without locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
