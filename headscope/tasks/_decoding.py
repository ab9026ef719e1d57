"""What a decoder behind an encoder reads while it is judged: the targets before each position."""

from __future__ import annotations

from typing import Any

from headscope.examples import Batch
from headscope.tasks import moved_right


def prepare(model: Any, batch: Batch) -> dict[str, Any]:
    """The decoder's input: the targets moved right behind the start token."""
    inputs = dict(batch.inputs)
    labels = batch.targets.long()
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    inputs["decoder_input_ids"] = make(labels=labels) if make else moved_right(model.config, labels)
    inputs.pop("token_type_ids", None)
    return inputs
