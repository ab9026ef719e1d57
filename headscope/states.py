"""States: what sums hold, as a flat dictionary of tensors that can be kept in a file, sent, and added to other sums."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Tensors on the host by name, sums in float64. Whoever takes a state up owns its tensors, and may add to them."""


def under(name: str, state: State) -> State:
    """The state as a part of a larger one."""
    return {f"{name}/{key}": value for key, value in state.items()}


def within(state: State, name: str) -> State:
    """The part of a larger state that was put in under this name."""
    start = f"{name}/"
    return {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}


class Held(Protocol):
    """What one pass over the data finds, or one unit of it: sums, or numbers of each example."""

    @property
    def size(self) -> int:
        """Bytes of sums over pairs of heads, at most, of which a unit holds as much as the whole; 0 without any."""
        ...

    def clear(self) -> None:
        """Begin the next unit."""
        ...

    def state(self) -> State:
        """Everything that was found, and what happened on the way."""
        ...

    def absorb(self, state: State) -> None:
        """Add a unit's state, which is used up; units come in the order of the data."""
        ...


def packed(notes: Sequence[str]) -> Tensor:
    """Notes as bytes of JSON."""
    return torch.tensor(list(json.dumps(notes).encode()), dtype=torch.uint8)


def noted(notes: list[str], more: Tensor) -> None:
    """Add packed notes to others, each once."""
    notes += [note for note in json.loads(bytes(more.tolist())) if note not in notes]
