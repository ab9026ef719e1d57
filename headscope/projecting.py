"""Output projections: which head feeds each index of the parameter that multiplies an attention's context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscope.geometry import Geometry, head_numbers
from headscope.ownership import depends, fed_by


@dataclass(frozen=True, eq=False)
class Projection:
    """One product of a parameter and a tensor during the probe: a call of a linear module, or (where `product` is kept)
    of a function that was given the parameter.
    """

    time: int
    module: nn.Module
    name: str
    input: Tensor
    product: Tensor | None = None

    @property
    def channel_axis(self) -> int:
        """The axis of the input that holds the channels."""
        return 1 if isinstance(self.module, (nn.Conv1d, nn.Conv2d)) else -1

    @property
    def parameter(self) -> Tensor:
        """What the input is multiplied with."""
        value = getattr(self.module, self.name)
        assert isinstance(value, Tensor)
        return value

    def reads(self, leaf: Tensor) -> bool:
        """Whether what is multiplied was computed from `leaf`."""
        return depends(self.input, leaf)


@dataclass(frozen=True)
class Feeding:
    """The head that feeds each index along `axis` of a projection's parameter; `mixed` where that is no single one."""

    axis: int
    owners: tuple[int, ...]
    mixed: bool


def feed(output: Projection, leaf: Tensor, shape: Geometry) -> Feeding:
    """How the heads of a context, replaced by `leaf`, feed the projection that reads it."""
    numbers = head_numbers(leaf, shape.n_heads, shape.head_axis)
    if output.product is None:
        touch = fed_by(output.input, leaf, numbers, shape.n_heads)[output.channel_axis]
        owners = touch.owners()
        counts = {owners.count(head) for head in range(shape.n_heads)}
        mixed = not touch.clean or len(counts) > 1 or 0 in counts
        return Feeding(0 if isinstance(output.module, Conv1D) else 1, owners, mixed)
    pulled = _pulled(output.product, output.parameter)
    found = [] if pulled is None else fed_by(pulled, leaf, numbers, shape.n_heads)
    for axis, touch in enumerate(found):
        owners = touch.owners()
        if touch.clean and set(owners) - {-1} == set(range(shape.n_heads)):
            return Feeding(axis, owners, mixed=False)
    return Feeding(0, (-1,) * output.parameter.shape[0], mixed=True)


def _pulled(product: Tensor, parameter: Tensor) -> Tensor | None:
    """The gradient of a product from its parameter, which is linear in the other factor."""
    ones = torch.ones_like(product)
    return torch.autograd.grad(product, parameter, ones, create_graph=True, retain_graph=True, allow_unused=True)[0]
