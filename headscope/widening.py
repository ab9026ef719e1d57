"""A copy of a model in a wider number format, in which equal computations are seen to be equal."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from transformers import PreTrainedModel

from headscope.devices import free_memory
from headscope.matrices import total_parameters

SHARE = 0.5
"""The share of the free memory that a copy in a wider format may take."""


@dataclass(frozen=True)
class Widened:
    """A copy in float64 on the CPU; where memory is short one in float32 or none, and then a note says so."""

    model: PreTrainedModel | None
    note: str = ""


def widened(model: PreTrainedModel) -> Widened:
    """The copy of a model in the widest format that there is memory for."""
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
