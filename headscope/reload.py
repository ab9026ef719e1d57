"""Loads a checkpoint in a process of its own with nothing but transformers, runs it on given inputs, and keeps what it
says. Run as a file, `python -P reload.py FOLDER CLASS DTYPE DEVICE TRUST PAD THREADS ATTENTION HASHES [INPUTS
OUTPUTS]...`, so that nothing of headscope is imported.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

HASHES = "hashes.json"


def outputs(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Every floating tensor that a model returns for `inputs`, by name, also those in tuples; caches are left out, and
    so are attention maps, of which there are as many as heads.
    """
    with torch.no_grad():
        found = dict(_tensors(model(**inputs), "output"))
    return {name: value for name, value in found.items() if not name.partition(".")[0].endswith("attentions")}


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in a model's output; those in the outermost one have their own names."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, str(key) if name == "output" else f"{name}.{key}")


def own_memory(model: Any) -> Any:
    """Weights moved from the mapped file, where they lie at any address, to addresses that torch chooses: matrix
    products round by alignment, and the comparison is to the last bit. Offloaded ones are moved whenever they are read.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        if getattr(hook, "weights_map", None) is not None:
            hook.weights_map = _Own(hook.weights_map)
    return model


class _Own(Mapping[str, Tensor]):
    """The values that accelerate keeps for a module, each time in memory of their own."""

    def __init__(self, kept: Mapping[str, Tensor]) -> None:
        self._kept = kept

    def __getitem__(self, name: str) -> Tensor:
        return self._kept[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def hashes(model: Any) -> dict[str, str]:
    """SHA-256 of the bytes of every tensor that a checkpoint of the model holds, by name."""
    found: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        if tensor.device.type == "meta":
            path, _, own = name.rpartition(".")
            tensor = model.get_submodule(path)._hf_hook.weights_map[own]
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found[name] = hashlib.sha256(raw.numpy().data).hexdigest()
    return found


def main(
    folder: str,
    auto_class: str,
    dtype: str,
    device: str,
    trust: str,
    pad: str,
    threads: str,
    attention: str,
    listing: str,
    *files: str,
) -> None:
    """Load with `auto_class`, keep a hash of each weight, run on each file of inputs, and write what it says beside."""
    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    if device == "disk":  # the model is too large for memory, and is read one module at a time
        device, spread = "cpu", {"device_map": "auto", "max_memory": {"cpu": 0}, "offload_folder": f"{listing}.weights"}
        options |= spread
    model = getattr(transformers, auto_class).from_pretrained(
        folder, dtype=getattr(torch, dtype), trust_remote_code=trust == "1", local_files_only=True, **options
    )
    if model._can_set_experts_implementation() and device == "cpu":
        model.set_experts_implementation("eager")
    if pad:
        model.config.get_text_config().pad_token_id = int(pad)
    model = own_memory((model if "device_map" in options else model.to(device)).eval())
    with open(listing, "w", encoding="utf-8") as file:
        json.dump(hashes(model), file)
    for given, said in zip(files[::2], files[1::2], strict=True):
        inputs = {name: value.to(device) for name, value in load_file(given).items()}
        flags = {name: bool(value) for name, value in inputs.items() if value.dtype == torch.bool and not value.dim()}
        found = outputs(model, inputs | flags)
        save_file({name: value.cpu().contiguous().clone() for name, value in found.items()}, said)


if __name__ == "__main__":
    main(*sys.argv[1:])
