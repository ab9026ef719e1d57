"""Names of stacks and numbers of layers: `encoder`, `decoder`, `vision` or `audio` for each attention module."""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel

from headscope.heads import AttentionKind

_SOUND = ("input_values", "input_features")


class StackNames:
    """Says which stack a module path belongs to (definitions: encoder and decoder in an encoder-decoder; else vision or
    audio for a tower that reads images or sound; else decoder if causal and encoder if not).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._towers = {
            path: str(module.main_input_name)
            for path, module in model.named_modules()
            if isinstance(module, PreTrainedModel)
        }
        self._pair = _encoder_and_decoder(model)
        self._owners: dict[str, str] = {}

    def stack(self, path: str, kind: AttentionKind) -> str:
        """The stack of the module at `path`; towers that would share a name get their module's name in front."""
        tower = max((prefix for prefix in self._towers if _within(path, prefix)), key=len, default="")
        name = self._name(path, tower, kind)
        owner = self._owners.setdefault(name, tower)
        if owner == tower or (self._pair and name in ("encoder", "decoder")):
            return name
        return f"{tower.rpartition('.')[2] or 'model'}.{name}"

    def _name(self, path: str, tower: str, kind: AttentionKind) -> str:
        for name, prefix in self._pair.items():
            if _within(path, prefix):
                return name
        main = self._towers.get(tower, "")
        if "pixel" in main:
            return "vision"
        if main in _SOUND:
            return "audio"
        return "encoder" if kind is AttentionKind.SELF else "decoder"

    @staticmethod
    def layers(paths: list[str]) -> list[int]:
        """Layer numbers: those in the module paths where these are distinct and rising, else the order of running."""
        numbers = [re.search(r"\.(\d+)(?:\.|$)", f".{path}") for path in paths]
        layers = [int(found[1]) for found in numbers if found]
        if len(layers) == len(paths) and all(a < b for a, b in zip(layers, layers[1:], strict=False)):
            return layers
        return list(range(len(paths)))


def _encoder_and_decoder(model: PreTrainedModel) -> dict[str, str]:
    """Where the two stacks of an encoder-decoder live, by name; empty for other models."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return {}
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[str, str] = {}
    for name in ("encoder", "decoder"):
        stack = getattr(model, f"get_{name}", lambda: None)()
        if isinstance(stack, nn.Module) and paths.get(id(stack)):
            found[name] = paths[id(stack)]
    if len(found) == 2 and found["encoder"] != found["decoder"]:
        return found
    return {name: path for name, path in _by_module_name(model).items()}


def _by_module_name(model: PreTrainedModel) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, _ in model.named_modules():
        last = path.rpartition(".")[2]
        if last in ("encoder", "decoder"):
            found.setdefault(last, path)
    return found


def _within(path: str, prefix: str) -> bool:
    return prefix == "" or path == prefix or path.startswith(prefix + ".")
