"""A stand-in for a model that is not in memory: its modules with made-up weights that take next to no memory.

Discovery asks which slice of which parameter belongs to which head, and surgery how a module runs without some; that
depends on a model's code and shapes, not on the values of its weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headscope.offload import is_offloaded
from headscope.portable import Pruned, pruned_class
from headscope.reasons import quiet

_SPREAD = 0.02
"""Standard deviation of the made-up numbers, as that of most models before training."""
_STEP = 4099
"""How far apart in the shared numbers two parameters begin: a prime, so that their rows differ."""
_ROW = 61
"""The same for two rows of one parameter, which is shorter than most rows: they overlap."""


def in_memory(model: PreTrainedModel) -> PreTrainedModel:
    """A model to look at how `model` runs: itself, or a stand-in where some of its weights are offloaded."""
    return stand_in(model) if is_offloaded(model) else model


def stand_in(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and shapes on the CPU, in evaluation mode, without the heads that `model` lost.

    All parameters, and all rows of one, are views of the same numbers, each from another place on; buffers are those of
    the model. Matrices hold small numbers about 0, and the rest (norms, biases) about 1.
    """
    kind: Any = type(model) if isinstance(model, Pruned) else pruned_class(type(model))
    with quiet(), torch.device("meta"):
        found = kind._from_config(copy.deepcopy(model.config), dtype=model.dtype).eval()
    if found._can_set_experts_implementation():
        found.set_experts_implementation("eager")
    own = list({id(parameter): parameter for parameter in found.parameters()}.values())
    size = max(_reach(parameter) for parameter in own) + _STEP * len(own)
    numbers = torch.empty(size, dtype=model.dtype)
    numbers.normal_(std=_SPREAD, generator=torch.Generator().manual_seed(0))
    made = {id(one): _view(numbers, one, start=_STEP * place) for place, one in enumerate(own)}
    for path, module in found.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
        there = model.get_submodule(path)._buffers
        for name, buffer in there.items():
            module._buffers[name] = None if buffer is None else buffer.detach().cpu()
    return found


def _view(numbers: torch.Tensor, like: nn.Parameter, *, start: int) -> nn.Parameter:
    strides = (min(_ROW, like.stride(0)), *like.stride()[1:]) if like.dim() else ()
    values = numbers.as_strided(like.shape, strides, start)
    return nn.Parameter(values if like.dim() > 1 else values + 1, requires_grad=False)


def _reach(like: torch.Tensor) -> int:
    """Numbers that `_view` spans."""
    if like.dim() < 2 or not like.numel():
        return like.numel()
    return min(_ROW, like.stride(0)) * (like.shape[0] - 1) + like[0].numel()
