"""Writing the weights of an offloaded model, one tensor in memory at a time: the files, and their split, are those that
transformers writes of the same model in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import get_torch_storage_size, split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from headscope.errors import UnsupportedModel
from headscope.headers import INDEX, WEIGHTS
from headscope.offload import VARIABLE, retie, value
from headscope.tensor_files import write_tensors


def write_weights(model: PreTrainedModel, folder: Path, *, max_shard_size: str, original: bool) -> None:
    """Write the weights of `model` into files of `folder` of at most `max_shard_size` each, with an index for several.

    `original` names and cuts tensors as the model's own checkpoint does, where transformers turned them into others.

    Raises:
        UnsupportedModel: a tensor of the files is made of several of the model.
        OSError: a file cannot be written.
    """
    retie(model)
    tensors = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        tensors.pop(name, None)
    tensors = remove_tied_weights_from_state_dict(tensors, model)
    stored = _Stored(model, tensors, original=original)
    name, _, suffix = WEIGHTS.rpartition(".")
    split = split_state_dict_into_shards_factory(
        dict(stored.tensors),
        get_storage_size=get_torch_storage_size,
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,  # parts of one tensor share a file
        filename_pattern=f"{name}{{suffix}}.{suffix}",
        max_shard_size=max_shard_size,
    )
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: stored.tensors[name] for name in names}, stored.read)
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class _Stored:
    """The tensors of a checkpoint, by name and without values, each made of one tensor of the model."""

    def __init__(self, model: PreTrainedModel, own: Mapping[str, Tensor], *, original: bool) -> None:
        self._model, self._own, self._original = model, own, original
        self.tensors = self._converted(own)
        same = {id(tensor): name for name, tensor in own.items()}
        self._source = {name: same.get(id(tensor), "") for name, tensor in self.tensors.items()}
        self._last: tuple[str, Mapping[str, Tensor]] = ("", {})
        if "" in self._source.values():
            self._find_sources()

    def _converted(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return revert_weight_conversion(self._model, dict(own)) if self._original else own

    def _find_sources(self) -> None:
        """For each tensor that is not one of the model's under another name, the one that it is a part or form of."""
        for name, tensor in self._own.items():
            if name not in self._source.values():
                found = self._converted({name: tensor})
                whole = [part for part, made in found.items() if made.shape == self.tensors[part].shape]
                self._source |= dict.fromkeys(whole, name)
        if "" in self._source.values():
            name = next(name for name, source in self._source.items() if not source)
            raise UnsupportedModel(
                f"{type(self._model).__name__}: {name} of its checkpoint is made of several tensors that are offloaded",
                hint=f"allow it more memory by {VARIABLE}, or use --device cpu on a machine with more memory",
            )

    def read(self, name: str) -> Tensor:
        """The values of one tensor of the checkpoint; the source of several is read once where they come in a row."""
        source = self._source[name]
        if self.tensors[name] is self._own.get(source):
            return value(self._model, source)
        if self._last[0] != source:
            self._last = (source, self._converted({source: value(self._model, source)}))
        return self._last[1][name]
