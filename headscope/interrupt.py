"""Ctrl-C in the first and last moments of the command line, when there is no `try` around what runs: still one line."""

from __future__ import annotations

import os
import signal
from types import FrameType


def answer_at_once() -> None:
    """Let Ctrl-C end the process with exit code 130 from now on, unless it is ignored, as under nohup."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)
