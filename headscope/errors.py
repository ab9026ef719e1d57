"""Every error that headscope raises on purpose, each with the exit code that the command line gives it.

    HeadscopeError                 1  failed: something that cannot be used
    ├── ModelError                 1  a model, its configuration or its weights
    │   └── UnsupportedModel       1  a model whose heads cannot be found
    ├── DataError                  1  a data file, or what stands in it
    ├── DeviceError                1  a device that is absent, or memory that ran out
    ├── OutputError                1  a file that cannot be written
    ├── CheckFailed                1  a structure check of `inspect --check` failed
    ├── ProofFailed                1  a pruned checkpoint does not compute what it should
    ├── WorkError                  1  a folder of finished work that belongs to another run
    ├── RankError                  1  one of several processes that ended, stands still or sees other inputs
    ├── Stopped          130 or 143  a run that was interrupted or terminated, and can go on where it was
    ├── UsageError                 2  an option that cannot be meant that way
    │   └── InvalidPlan            2  heads that cannot be removed together
    └── ThresholdError             3  a limit such as --max-loss-increase that cannot be kept

Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadscopeError(Exception):
    """Something the user can mend: one sentence that says what and where, and a hint that says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ModelError(HeadscopeError):
    """A model folder, its configuration or its weights cannot be used."""


class UnsupportedModel(ModelError):
    """No attention head of this model can be found or tapped."""


class DataError(HeadscopeError):
    """A data file cannot be read, or its rows do not fit the task."""


class DeviceError(HeadscopeError):
    """The device that was asked for is absent, or its memory ran out."""


class OutputError(HeadscopeError):
    """A report or picture cannot be written."""


class CheckFailed(HeadscopeError):
    """At least one structure check failed; the report that says which is already written."""


class ProofFailed(HeadscopeError):
    """A pruned checkpoint does not compute what the masked model computes; nothing of it is left on disk."""


class WorkError(HeadscopeError):
    """A folder of finished work cannot be used: it belongs to another run, or a file in it is damaged."""


class RankError(HeadscopeError):
    """One of several processes of a run has ended, stands still or sees other inputs; `rank` is its number."""

    def __init__(self, rank: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"rank {rank} {message}", hint=hint)
        self.rank, self.message = rank, message


class Stopped(HeadscopeError):
    """A run was interrupted or terminated from outside; the hint says how it goes on from what it kept."""

    def __init__(self, message: str, exit_code: int, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class UsageError(HeadscopeError):
    """An option or argument that cannot be meant that way."""

    exit_code = 2


class InvalidPlan(UsageError):
    """Heads that cannot be removed together, or a number of heads that cannot be removed exactly."""


class ThresholdError(HeadscopeError):
    """A limit on what pruning may cost cannot be kept."""

    exit_code = 3


def nearest(word: str, known: Iterable[str]) -> str | None:
    """A hint that names the closest of the `known` words and lists them all, or None if there are none."""
    names = list(known)
    if not names:
        return None
    close = difflib.get_close_matches(word, names, n=1)
    listing = "known: " + ", ".join(names)
    return f"did you mean {close[0]!r}? {listing}" if close else listing
