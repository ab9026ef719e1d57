"""States: what sums hold, as a flat dictionary of tensors that can be kept in a file, sent, and added to other sums."""

from __future__ import annotations

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
