"""Slow references for pairs of heads, from the definitions: loops over pairs, stored maps and stored activations.

A measure's reference has its name and compares two heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NAN = float("nan")
Map = list[list[list[float]]]
"""One head's attention: by text, real query and key; rows sum to one (a sink's share is one more key)."""


def table(heads: Sequence[int], value: Callable[[int, int], float]) -> Tensor:
    """A value for every pair, `[head head]`."""
    return torch.tensor([[value(a, b) for b in heads] for a in heads], dtype=torch.float64)


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """Jensen-Shannon divergence in nats."""
    total = 0.0
    for one, other in zip(p, q, strict=True):
        middle = (one + other) / 2
        total += one * math.log(one / middle) / 2 if one > 0 else 0.0
        total += other * math.log(other / middle) / 2 if other > 0 else 0.0
    return total


def over_texts(value: Callable[[Sequence[float], Sequence[float]], float], first: Map, second: Map) -> float:
    """The mean over a text's queries, then over texts."""
    means = []
    for rows, others in zip(first, second, strict=True):
        means.append(sum(value(p, q) for p, q in zip(rows, others, strict=True)) / len(rows))
    return sum(means) / len(means)


def attention(first: Map, second: Map) -> float:
    """One minus the Jensen-Shannon distance."""
    return 1 - math.sqrt(max(0.0, over_texts(divergence, first, second)) / math.log(2))


def hellinger(first: Map, second: Map) -> float:
    """Mean overlap."""
    return over_texts(lambda p, q: sum(math.sqrt(a * b) for a, b in zip(p, q, strict=True)), first, second)


def output(first: Tensor, second: Tensor) -> float:
    """Linear CKA of two heads' written vectors, `[token d_model]` each."""
    a, b = first - first.mean(dim=0), second - second.mean(dim=0)
    return float((a.T @ b).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm()))


def cosine(first: Tensor, second: Tensor) -> float:
    """Mean cosine of two heads' written vectors, `[token d_model]` each."""
    found = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(first, second, strict=True) if a.norm() * b.norm()]
    return sum(found) / len(found) if found else NAN


def circuit(first: Tensor, second: Tensor) -> float:
    """Cosine of two whole matrices."""
    return float((first * second).sum() / (first.norm() * second.norm()))


def qk(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> float:
    """Of `W_q W_kᵀ`, from the two matrices of each head."""
    return circuit(first[0] @ first[1].T, second[0] @ second[1].T)


def ov(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> float:
    """Of `W_v W_o`, from the two matrices of each head."""
    return circuit(first[0] @ first[1], second[0] @ second[1])


class Written:
    """What each head writes, by the output projection itself: its input with only that head's channels, less the bias.

    `places` gives the projection of each site, and the head of each input channel; `written[i]` is
    `[head example token d_model]` of every call.
    """

    def __init__(self, places: Sequence[tuple[nn.Module, Sequence[int], int]]) -> None:
        self.calls: list[list[Tensor]] = [[] for _ in places]
        self.handles: list[Any] = []
        for number, (module, channels, call) in enumerate(places):
            turns = sum(other is module for other, _, _ in places)
            self.handles.append(module.register_forward_pre_hook(self._hook(number, channels, call, turns)))

    def _hook(self, number: int, channels: Sequence[int], call: int, turns: int) -> Callable[..., None]:
        owner, seen = torch.tensor(channels), [0]

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            mine, seen[0] = seen[0] % turns == call, seen[0] + 1
            if mine:
                with torch.no_grad():
                    nothing = module.forward(torch.zeros_like(args[0]))
                    heads = range(int(owner.max()) + 1)
                    each = [module.forward(args[0] * (owner == head)) - nothing for head in heads]
                self.calls[number].append(torch.stack(each))

        return hook

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
