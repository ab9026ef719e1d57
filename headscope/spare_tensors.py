"""Tensors of a checkpoint that its model does not use: carried into a pruned one where that is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from headscope.headers import INDEX, WEIGHTS, has_safetensors, read_headers

SHARD = "model-spare.safetensors"
_WHOLE = "model-main.safetensors"


def carry_spare(source: Path, names: Sequence[str], target: Path) -> tuple[str, ...]:
    """Add those of these tensors that stand in the safetensors of `source` to the checkpoint `target`; which they were.

    They become a shard of their own, so that the others are neither read nor written again.
    """
    if not names or not has_safetensors(source):
        return ()
    stored, there = read_headers(source), read_headers(target)
    kept = [name for name in names if name in stored and name not in there]
    if not kept:
        return ()
    found: dict[str, Any] = {}
    for file in sorted({stored[name].file for name in kept}):
        with safe_open(source / file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name).clone() for name in kept if stored[name].file == file}
    save_file(found, target / SHARD, {"format": "pt"})
    _list(target, kept)
    return tuple(kept)


def _list(target: Path, names: Sequence[str]) -> None:
    """Let the index of a checkpoint, made where there is none, name the spare shard."""
    index = target / INDEX
    if not index.exists():
        (target / WEIGHTS).rename(target / _WHOLE)
        where = dict.fromkeys(_names(target / _WHOLE), _WHOLE)
        document: dict[str, Any] = {"metadata": {}, "weight_map": where}
    else:
        document = json.loads(index.read_text(encoding="utf-8"))
    document["weight_map"] |= dict.fromkeys(names, SHARD)
    files = sorted(set(document["weight_map"].values()))
    document["metadata"]["total_size"] = sum((target / file).stat().st_size for file in files)
    index.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())
