"""A model in the number format of its files, which need not be the one that it was measured in."""

from __future__ import annotations

from dataclasses import replace

import torch

from headscope.headers import has_safetensors, read_config, read_headers, stored_dtype
from headscope.models import LoadedModel, LoadOptions, load

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
    """The model in the number format of its files, loaded anew where it was measured in another."""
    dtype = stored_format(loaded)
    if dtype == loaded.model.dtype:
        return loaded
    return load(name, replace(options, dtype=str(dtype).removeprefix("torch."), task=loaded.task_name))
