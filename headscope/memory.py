"""Running out of memory: a batch is tried in halves, down to single examples, and what is left is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from headscope.errors import DeviceError
from headscope.examples import Batch

Result = TypeVar("Result")

_SAID = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
"""What the host, devices, and the libraries of CUDA say when there is no more; the error is a plain RuntimeError."""


def in_halves(
    run: Callable[[Batch], Result], batch: Batch, notes: list[str], *, together: bool = False
) -> Iterator[tuple[Batch, Result]]:
    """Run a batch, in halves where memory runs out, down to single examples; says so once.

    Other processes that run it `together` with this one could not follow, so that it is not halved then.

    Raises:
        DeviceError: there is no memory for one example, or for what is run together.
    """
    try:
        with memory_errors(len(batch)):
            outcome = run(batch)
    except DeviceError:
        if together or len(batch) == 1:
            raise
        note = "memory ran out: batches were halved (results do not depend on the batch size)"
        if note not in notes:
            notes.append(note)
    else:
        yield batch, outcome
        return
    torch.cuda.empty_cache()  # what is free may lie in pieces that are too small
    for half in batch.halves():
        yield from in_halves(run, half, notes)


@contextlib.contextmanager
def memory_errors(examples: int | None = None) -> Iterator[None]:
    """Turn running out of device or host memory into a DeviceError; `examples` run at once, where it is about those."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise exhausted(examples) from None


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there is no more memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(said in str(error) for said in _SAID)


def exhausted(examples: int | None = None) -> DeviceError:
    """What to say then."""
    if examples is None:
        return DeviceError("out of memory", hint="a smaller --batch-size, --max-length or --dtype takes less")
    if examples == 1:
        return DeviceError("out of memory on one example", hint="use --max-length or a smaller --dtype")
    return DeviceError(f"out of memory on {examples} examples", hint="use a smaller --batch-size")
