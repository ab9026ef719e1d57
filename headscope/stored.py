"""A model in the number format of its files, which need not be the one that it was measured in."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from headscope.devices import resolve_dtype
from headscope.headers import has_safetensors, parameter_count, read_config, read_headers, stored_dtype
from headscope.location import locate
from headscope.models import LoadedModel, LoadOptions, load
from headscope.offload import is_offloaded, max_memory

DTYPES = ("float16", "bfloat16", "float32", "float64")


def stored_format(loaded: LoadedModel) -> torch.dtype:
    """The number format of a model's files; where they hold none that can be computed in, the loaded model's own."""
    folder = loaded.location.folder
    if loaded.location.gguf:
        return torch.float32
    if has_safetensors(folder):
        dtype = stored_dtype(read_headers(folder).values())
    else:
        config = read_config(folder)
        dtype = str(config.get("dtype", config.get("torch_dtype", "float32"))).removeprefix("torch.")
    return getattr(torch, dtype) if dtype in DTYPES else loaded.model.dtype


def as_stored(name: str, loaded: LoadedModel, options: LoadOptions) -> LoadedModel:
    """The model in the number format of its files, loaded anew where it was measured in another.

    Of an offloaded model all weights are left on the disk then, so that surgery and proof see one like the other. A pad
    token that was given to the model for the data stays.
    """
    dtype, offloaded = stored_format(loaded), is_offloaded(loaded.model)
    if dtype == loaded.model.dtype and offloaded is options.on_disk:
        return loaded
    wanted = replace(options, dtype=str(dtype).removeprefix("torch."), task=loaded.task_name, on_disk=offloaded)
    found = load(name, wanted)
    config, pad = found.model.config.get_text_config(), pad_token(loaded.model.config)
    if pad_token(config) != pad:
        config.pad_token_id = pad
    return found


def pad_token(config: PreTrainedConfig) -> int | None:
    """The pad token of a configuration; None where it has none, or no text."""
    return getattr(config.get_text_config(), "pad_token_id", None)


def sparing(name: str, options: LoadOptions) -> LoadOptions:
    """The options to load a model that is run but a few times: no part of it stays in memory if it has no room whole.

    Raises:
        ModelError: there is no such model.
        UsageError: the memory that is allowed is no list of budgets.
    """
    budget = max_memory() if options.device == "balanced" else None
    folder = locate(
        name, revision=options.revision, allow_pickle=options.allow_pickle, code=options.trust_remote_code
    ).folder
    if budget is None or not has_safetensors(folder):
        return options
    size = parameter_count(read_headers(folder).values()) * resolve_dtype(options.dtype, options.device).itemsize
    return replace(options, on_disk=size > sum(budget.values()))
