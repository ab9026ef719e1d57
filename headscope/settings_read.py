"""Which settings modules read from their configuration while a model runs, seen by one run on made-up inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from headscope.discovery import evaluating
from headscope.inputs import probe_inputs


class _Reading:
    """A configuration that remembers which of its settings are read."""

    def __init__(self, config: Any) -> None:
        self.__dict__["_config"], self.__dict__["names"] = config, set()

    def __getattr__(self, name: str) -> Any:
        self.__dict__["names"].add(name)
        return getattr(self.__dict__["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_config"], name, value)


def settings_read(model: PreTrainedModel, paths: Iterable[str]) -> dict[str, set[str]]:
    """The settings that each module reads from its configuration while the model runs, by module path."""
    inputs = probe_inputs(model)
    modules = {path: model.get_submodule(path) for path in paths}
    readers = {path: _Reading(module.config) for path, module in modules.items() if hasattr(module, "config")}
    for path, reader in readers.items():
        modules[path].config = reader  # type: ignore[assignment]
    try:
        with torch.no_grad(), evaluating(model):
            model(**inputs)
    finally:
        for path, reader in readers.items():
            modules[path].config = reader.__dict__["_config"]
    return {path: readers[path].__dict__["names"] if path in readers else set() for path in modules}
