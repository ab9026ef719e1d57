"""What other libraries raise for broken files of strangers."""

from __future__ import annotations

import pickle

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

RAISED = (
    *(OSError, ValueError, RuntimeError, KeyError, IndexError, ImportError, TypeError, AttributeError, AssertionError),
    *(SafetensorError, pickle.UnpicklingError, EOFError, StrictDataclassError),
)
"""What transformers raises for checkpoints that it cannot load."""


class NoBareErrors:
    """Turns what compiled libraries raise for broken files, a bare `Exception` or a panic, into a ValueError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and (kind is Exception or kind.__name__ == "PanicException"):
            raise ValueError(str(error)) from error
