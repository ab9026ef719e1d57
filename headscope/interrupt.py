"""Ctrl-C and SIGTERM on the command line: answered at once until something could be left half-done, then raised."""

from __future__ import annotations

import os
import signal
from types import FrameType

SUPERVISOR = "HEADSCOPE_SUPERVISOR"
"""The process that started this one and tells the user how the run ended."""
_PAUSE = 0.05
"""Seconds after which a signal that came within an import is looked at again."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C was pressed.

    Not KeyboardInterrupt itself: CPython remembers one that passes through `exec`, with which dataclasses are made, and
    at its end kills the process by the signal, whatever became of the exception.
    """


class Terminated(BaseException):
    """SIGTERM arrived: leave through the `with` blocks, so that nothing is left half-written."""


def speaks() -> bool:
    """Whether this process is the one that tells the user: the only one, or rank 0 of several."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def answer_at_once() -> None:
    """Let both signals end the process from now on, unless they are ignored, as Ctrl-C is under nohup.

    Large libraries are imported by then: what breaks off there may be swallowed, or fail in another way.
    """
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise):
        signal.signal(signal.SIGINT, _leave)
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _raise):
        signal.signal(signal.SIGTERM, _leave)


def raise_interrupts() -> None:
    """Let both signals raise from now on, where `answer_at_once` was called: something is to be undone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _leave:
            signal.signal(number, _raise)


def _leave(number: int, frame: FrameType | None) -> None:
    word, code = (b"interrupted", 130) if number == signal.SIGINT else (b"terminated", 143)
    if SUPERVISOR not in os.environ and speaks():
        os.write(2, b"error: " + word + b"\n")
    os._exit(code)


def _raise(number: int, frame: FrameType | None) -> None:
    if _importing(frame) and hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, lambda _, later: _raise(number, later))
        signal.setitimer(signal.ITIMER_REAL, _PAUSE)
        return
    raise Interrupted if number == signal.SIGINT else Terminated


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
