"""Timing: how long models take for one batch, by taking turns, beside what counting their matrix products predicts."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from headscope.errors import DeviceError
from headscope.examples import Example, Examples, collate
from headscope.memory import memory_errors
from headscope.objective import model_inputs
from headscope.offload import home
from headscope.tasks import Task

SECONDS = 10.0
"""About how long one batch size is measured, all models together, within these numbers of rounds:"""
FEWEST, MOST = 5, 50


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeated run of one model on one batch."""

    batch_size: int
    seconds: tuple[float, ...]

    @property
    def latency(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The distance between the quartiles, in seconds."""
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    @property
    def throughput(self) -> float:
        """Examples a second."""
        return self.batch_size / self.latency


def take_turns(
    candidates: Sequence[Callable[[], object]], device: torch.device, *, seconds: float = SECONDS
) -> list[tuple[float, ...]]:
    """Seconds of each run of each candidate in the order A B A B, after two rounds to warm up.

    Whatever else the machine does meets all of them alike.
    """

    def turn() -> list[float]:
        return [_timed(candidate, device) for candidate in candidates]

    turn()
    rounds = min(MOST, max(FEWEST, math.ceil(seconds / max(sum(turn()), 1e-9))))
    return list(zip(*(turn() for _ in range(rounds)), strict=True))


def _timed(candidate: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    candidate()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    """Until everything that the device was told to do is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()  # a balanced model may lie on several
    elif device.type == "mps":
        torch.mps.synchronize()


def time_models(
    models: Sequence[PreTrainedModel], task: Task, examples: Examples, *, size: int, tokens: int
) -> list[Timing] | None:
    """One timing a model on the same batch of `size` examples of `tokens` tokens; None where memory runs out."""
    inputs = [made_up(model, task, examples, size=size, tokens=tokens) for model in models]
    runs = [lambda pair=pair: pair[0](**pair[1]) for pair in zip(models, inputs, strict=True)]
    try:
        with torch.inference_mode(), memory_errors():
            return [Timing(size, seconds) for seconds in take_turns(runs, home(models[0]))]
    except DeviceError:
        return None


def made_up(model: PreTrainedModel, task: Task, examples: Examples, *, size: int, tokens: int) -> dict[str, Any]:
    """What `model.forward` takes for `size` copies of the longest example, its tokens repeated to `tokens`.

    A target text gets as many tokens as the source. Images and sounds keep their size, and transcripts their length.
    """
    longest = max(examples.items, key=lambda example: (example.length, -example.number))
    batch = collate([_resized(longest, task, tokens)] * size, examples.pads).to(home(model), model.dtype)
    return model_inputs(model, task, batch)


def _resized(example: Example, task: Task, tokens: int) -> Example:
    if task.reads == "sounds":
        return example
    inputs = {name: _repeated(values, tokens) for name, values in example.inputs.items()}
    targets = _repeated(list(example.targets), tokens) if task.vocabulary else example.targets
    return replace(example, inputs=inputs, targets=tuple(targets), length=tokens)


def _repeated(values: Any, count: int) -> Any:
    """A list repeated or cut to `count` entries, whose last stays last (models pool there); tensors as they are."""
    if not isinstance(values, list):
        return values
    return [*(values * math.ceil(count / len(values)))[: count - 1], values[-1]]


def matrix_macs(model: PreTrainedModel, inputs: dict[str, Any]) -> int:
    """Multiply-accumulates of all matrix products and convolutions of one forward pass, attention's included.

    They are counted while the model runs with eager attention, whose products show.
    """
    with torch.no_grad(), _eager(model), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops() // 2


@contextlib.contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Run with eager attention, and put back what was set."""
    before = str(model.config._attn_implementation)
    if before == "eager":
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
