"""A copy of a model in a wider number format, in which equal computations are seen to be equal."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from headscope.devices import free_memory
from headscope.matrices import total_parameters
from headscope.offload import is_kept_away, is_offloaded

SHARE = 0.5
"""The share of the free memory that a copy in a wider format may take."""


@dataclass(frozen=True)
class Widened:
    """A copy in float64 on the CPU; where memory is short one in float32 or none, and then a note says so."""

    model: PreTrainedModel | None
    note: str = ""


def widened(model: PreTrainedModel) -> Widened:
    """The copy of a model in the widest format that there is memory for."""
    if is_offloaded(model):
        return Widened(_read_wider(model))
    size, room = total_parameters(model), SHARE * free_memory()
    note = ""
    if 8 * size > room:
        format = "float32" if 4 * size <= room else str(model.dtype).removeprefix("torch.")
        note = f"not proved in float64, for which memory is short, but in {format}"
    if 4 * size > room:
        return Widened(None, note)
    wide = copy.deepcopy(model).cpu()
    wide = wide.double() if 8 * size <= room else wide.float()
    if wide._can_set_experts_implementation():
        wide.set_experts_implementation("eager")
    return Widened(wide, note)


def _read_wider(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of an offloaded model that reads the same files: each weight is widened when its module is about to run.

    accelerate gives what it reads the number format of the empty parameter that is to hold it.
    """
    wide = copy.deepcopy(model)
    for module in wide.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                away = is_kept_away(module, name)
                values = torch.empty_like(parameter, dtype=torch.float64) if away else parameter.detach().double()
                module._parameters[name] = nn.Parameter(values, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.double()
    return wide
