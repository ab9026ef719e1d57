"""Examples are what a model reads at once and is judged on alone; batches hold examples of similar length, padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor

IGNORED = -100
"""The target of a position that is not predicted."""


@dataclass(frozen=True)
class Example:
    """One encoded example. `targets[p]` is what position `p` of the model's output should say, or `IGNORED`.

    `number` is its place in the seeded order of the data; random draws are keyed by it. A noisy copy has a number of
    its own, and in `drawn_from` that of the example it was made from. Values of `inputs` are lists
    (padded to the longest of a batch) or tensors (stacked).
    """

    number: int
    inputs: dict[str, Any]
    targets: tuple[float, ...]
    length: int
    labelled: bool = True
    truncated: bool = False
    drawn_from: int | None = None

    @property
    def origin(self) -> int:
        """The number of the example that this is, or is a copy of."""
        return self.number if self.drawn_from is None else self.drawn_from

    @property
    def usable(self) -> bool:
        """Whether anything is predicted."""
        return any(isinstance(target, float) or target != IGNORED for target in self.targets)


@dataclass(frozen=True)
class Batch:
    """Examples side by side: `targets` is `[example position]`, `numbers` their places in the data."""

    inputs: dict[str, Tensor]
    targets: Tensor
    numbers: tuple[int, ...]
    lengths: tuple[int, ...]
    labelled: bool = True

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def predicted(self) -> Tensor:
        """Which positions are predicted, `[example position]`; targets that are numbers always are, even -100."""
        return (self.targets != IGNORED) | self.targets.is_floating_point()

    @property
    def positions(self) -> Tensor:
        """Predicted positions of each example, `[example]`."""
        return self.predicted.sum(dim=1)

    def halves(self) -> tuple[Batch, Batch]:
        """The first and the second half of the examples."""
        middle = len(self) // 2
        return self._part(slice(0, middle)), self._part(slice(middle, None))

    def _part(self, part: slice) -> Batch:
        inputs = {name: value[part] for name, value in self.inputs.items()}
        return Batch(inputs, self.targets[part], self.numbers[part], self.lengths[part], self.labelled)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The batch on a device; floating inputs in the model's type."""
        inputs = {
            name: sent(value, device, dtype if value.is_floating_point() else value.dtype)
            for name, value in self.inputs.items()
        }
        return Batch(inputs, sent(self.targets, device), self.numbers, self.lengths, self.labelled)


@dataclass(frozen=True)
class Examples:
    """The examples of one study, in their seeded order, with what was left out or shortened on the way."""

    items: tuple[Example, ...]
    pads: dict[str, int] = field(default_factory=dict)
    """What pads each list-valued input; 0 where not named."""
    skipped: int = 0
    notes: tuple[str, ...] = ()
    name: str = ""
    digest: str = ""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def labelled(self) -> bool:
        """Whether the examples carry what a loss needs."""
        return all(example.labelled for example in self.items)

    def batches(self, size: int | None, *, tokens: int) -> list[Batch]:
        """Cut once, in a fixed order (length, then number): `size` examples each, or up to `tokens` padded tokens.

        Tensors are not padded, so that those of other shapes begin a batch of their own.
        """
        ordered = sorted(self.items, key=lambda example: (example.length, example.number))
        groups: list[list[Example]] = []
        for example in ordered:
            last = groups[-1] if groups else []
            full = len(last) >= size if size else example.length * (len(last) + 1) > tokens
            if not last or full or not stackable(last[0], example):
                groups.append([example])
            else:
                last.append(example)
        return [collate(group, self.pads) for group in groups]


def stackable(one: Example, other: Example) -> bool:
    """Whether tensors of two examples can be stacked."""
    return all(
        not isinstance(value, Tensor) or value.shape == other.inputs[name].shape for name, value in one.inputs.items()
    )


def sent(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the host on a device: float32 at most where that has no more, and for a GPU from pinned memory, so
    that the host need not wait for it.
    """
    dtype = dtype or (torch.float32 if device.type == "mps" and values.is_floating_point() else values.dtype)
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device, dtype)
    return values.to(dtype).pin_memory().to(device, non_blocking=True)


HELD_OUT = 4
"""One example in so many is held out where no data of its own is given for judging."""


def held_out(examples: Examples, seed: int, *, split: int = 1) -> tuple[Examples, Examples]:
    """Examples to choose by, and a seeded quarter to judge on; the same for both where there are fewer than four.

    Splits of other numbers are independent, so that a part can be split once more. Copies stay with their example.
    """
    if len(examples) < HELD_OUT:
        return examples, examples
    distinct = list(dict.fromkeys(one.origin for one in examples.items))
    order = numpy.random.Generator(numpy.random.Philox([seed, split])).permutation(len(distinct))
    judged = {distinct[place] for place in order[: len(distinct) // HELD_OUT]}
    choosing = tuple(one for one in examples.items if one.origin not in judged)
    judging = tuple(one for one in examples.items if one.origin in judged)
    return replace(examples, items=choosing), replace(examples, items=judging)


def collate(examples: Sequence[Example], pads: dict[str, int]) -> Batch:
    """Pad on the right and stack; positions that are only padding are never predicted."""
    inputs = {
        name: _stack([example.inputs[name] for example in examples], pads.get(name, 0)) for name in examples[0].inputs
    }
    return Batch(
        inputs=inputs,
        targets=_stack([list(example.targets) for example in examples], IGNORED),
        numbers=tuple(example.number for example in examples),
        lengths=tuple(example.length for example in examples),
        labelled=all(example.labelled for example in examples),
    )


def _stack(values: Sequence[Any], pad: int) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(list(values))
    longest = max(len(value) for value in values)
    rows = [_padded(value, longest, pad) for value in values]
    return torch.tensor(rows, dtype=torch.float64 if any(isinstance(one, float) for one in rows[0]) else torch.long)


def _padded(value: Iterable[Any], length: int, pad: int) -> list[Any]:
    values = list(value)
    return values + [pad] * (length - len(values))
