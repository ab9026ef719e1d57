"""What other libraries raise for broken files of strangers, and what they print about them."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from headscope.interrupt import raise_interrupts

RAISED = (
    *(OSError, ValueError, RuntimeError, KeyError, IndexError, ImportError, TypeError, AttributeError, AssertionError),
    *(SafetensorError, pickle.UnpicklingError, EOFError, StrictDataclassError),
)
"""What transformers raises for checkpoints that it cannot load."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__  # what a configuration's own check said
    lines = [line.strip() for line in str(error).strip().split("\n") if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


class NoBareErrors:
    """Turns what compiled libraries raise for broken files, a bare `Exception` or a panic, into a ValueError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and (kind is Exception or kind.__name__ == "PanicException"):
            raise ValueError(str(error)) from error


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Compiled libraries print nowhere in this block: what they say, past Python, is text of a file as it stands there,
    and standard output is for data.
    """
    raise_interrupts()
    with contextlib.ExitStack() as stack:
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):  # it is closed
                kept = os.dup(descriptor)
                stack.callback(os.close, kept)
                stack.callback(os.dup2, kept, descriptor)
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
        yield
