"""What the weight files of a checkpoint hold, against what its model needs: nothing made up, nothing from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headscope.errors import ModelError, UsageError
from headscope.headers import (
    CONFIG_LIMIT,
    TensorInfo,
    check_config,
    check_sizes,
    has_safetensors,
    read_config,
    read_headers,
)
from headscope.jsonfiles import inside, json_object, quote, read
from headscope.location import Location
from headscope.manifest import changed_files, read_manifest
from headscope.numbers import check_recipe
from headscope.offload import stored
from headscope.parallel import local

_PICKLE_INDEX = "pytorch_model.bin.index.json"


def check_files(location: Location, *, allow_pickle: bool) -> dict[str, Any]:
    """The configuration of a checkpoint whose files are there, stay in its folder and have sizes that agree.

    Raises:
        UsageError: the folder's name is no text.
        ModelError: one is missing, unsafe or contradicts another.
    """
    folder = location.folder
    if not _is_utf8(os.fsencode(folder)):
        raise UsageError(f"{location.name}: its name is not UTF-8, and no weights can be read there", hint="rename it")
    config = read_config(folder)
    check_config(config)
    if "headscope" in config:
        check_recipe(config["headscope"])
    if config.get("transformers_weights") is not None:
        named = quote(config["transformers_weights"])
        raise ModelError(f"{location.name}: config.json has its weights read from {named}", hint="remove that field")
    if has_safetensors(folder):
        tensors = read_headers(folder)
        check_sizes(config, tensors)
        if "headscope" in config:
            _check_recipe_sizes(config["headscope"], tensors)
    elif allow_pickle:
        _check_pickles(folder)
    else:
        read_headers(folder)  # says why not
    if config.get("pruned_heads"):
        raise ModelError(
            f"{location.name}: config.json has pruned_heads, which transformers 5 ignores",
            hint="write a rectangular checkpoint with the transformers 4 that pruned it",
        )
    return config


def _check_recipe_sizes(recipe: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse shapes that no stored tensor has, before anything of that size is allocated.

    Raises:
        ModelError: naming the parameter.
    """
    stored = {info.shape for info in tensors.values()}
    for path, shape in recipe.get("parameters", {}).items():
        if tuple(shape) not in stored:
            raise ModelError(f"config.json: headscope.parameters gives {quote(path)} a shape that no stored tensor has")
    widths = {0, *(size for shape in stored for size in shape)}
    for path, output in recipe.get("silent", {}).items():
        if output["width"] not in widths:
            raise ModelError(f"config.json: headscope.silent gives {quote(path)} a width that no stored tensor has")


def changed_since_written(folder: Path) -> list[str]:
    """A note where a pruned checkpoint's files are not those that were proved; up to 2 GiB, larger ones unread."""
    manifest = read_manifest(folder)
    if manifest is None or sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 2 * 1024**3:
        return []
    files = {name: digest for name, digest in manifest["files"].items() if not name.endswith(".md")}
    changed = changed_files(folder, {"files": files})
    if not changed:
        return []
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return [f"{quote(changed[0])}{more}: changed since headscope proved this checkpoint (hashes in headscope.json)"]


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _check_pickles(folder: Path) -> None:
    """Pickled weights, whole or in shards, must lie in the folder."""
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if (folder / _PICKLE_INDEX).is_file():
        data, _ = read(inside(folder, _PICKLE_INDEX), CONFIG_LIMIT)
        where = json_object(data, folder / _PICKLE_INDEX).get("weight_map")
        shards = where.values() if isinstance(where, dict) else ()
        for name in shards:
            if name not in pickles:
                raise ModelError(f"{folder / _PICKLE_INDEX}: {quote(name)} is no pytorch_model*.bin of the folder")
    if not pickles:
        read_headers(folder)  # says what is missing
    for name in pickles:
        inside(folder, name)


def check_keys(location: Location, model: PreTrainedModel, info: Mapping[str, Any], *, headless: bool) -> list[str]:
    """Refuse a model with made-up weights; note weights of the file that the model does not use.

    A model that is wanted without its head (`headless`) may lack the pooling layer.

    Raises:
        ModelError: a parameter is missing or has another shape.
    """
    mismatched, missing = sorted(map(str, info["mismatched_keys"])), sorted(info["missing_keys"])
    if mismatched:
        raise ModelError(f"{location.name}: {mismatched[0]} has another shape than config.json says")
    missing = [key for key in missing if not (headless and "pooler" in key)]
    if missing:
        prefix = model.base_model_prefix
        has_base = isinstance(getattr(model, prefix, None), nn.Module)
        if has_base and not headless and all(not key.startswith(f"{prefix}.") for key in missing):
            raise ModelError(
                f"{location.name}: the task head is not in this checkpoint ({missing[0]} is missing), "
                "scores would be of a random head",
                hint="use a fine-tuned checkpoint, or --task embedding for the model without a head",
            )
        raise ModelError(f"{location.name}: {missing[0]} is missing ({len(missing)} in all), it would be random")
    unexpected = sorted(info["unexpected_keys"])
    if not unexpected:
        return []
    plural = "tensor of the checkpoint is" if len(unexpected) == 1 else "tensors of the checkpoint are"
    return [f"{len(unexpected)} {plural} not used by this task, such as {unexpected[0]}"]


def non_finite(model: nn.Module) -> dict[str, int]:
    """Parameters that hold NaN or infinity, with how many."""
    found: dict[str, int] = {}
    for name, _ in model.named_parameters():
        path, _, own = name.rpartition(".")
        parameter = stored(model.get_submodule(path), own)
        if parameter.is_floating_point() and parameter.device.type != "meta":
            values = local(parameter)
            wide = values.numel() and values.dtype.itemsize > 1
            if wide and torch.isfinite(torch.stack(torch.aminmax(values))).all():
                continue  # NaN would be both; and unlike a mask, the two take no memory
            count = int((~torch.isfinite(values)).sum())
            if count:
                found[name] = count
    return found


def dense() -> Any:
    """Weights of a GGUF file as ordinary matrices, whatever packages are installed."""
    from transformers import GgufConfig

    return GgufConfig(dequantize=True)


def undo_quantisation(model: Any) -> None:
    """Dense weights are no longer quantised: let the model be saved and trained like any other."""
    model.hf_quantizer = None  # type: ignore[assignment]
    model.is_quantized = False  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
