"""Fingerprints: everything that a unit's sums depend on, by name, so that no sum of another run is ever taken up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from os.path import commonprefix

import torch

from headscope.data import DataOptions
from headscope.examples import Batch
from headscope.models import LoadedModel
from headscope.offload import home
from headscope.provenance import Provenance

Fingerprint = dict[str, str]

PACKAGES = ("headscope", "torch", "transformers")
"""Those whose version may change a number."""
_NO_MATTER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of a configuration that say where a model came from, or what stands in a fingerprint by itself."""
_SHOWN = 60
"""Characters of a value that an error shows."""


def of_model(loaded: LoadedModel, provenance: Provenance) -> Fingerprint:
    """The model: the bytes of its weights, its configuration, and how it runs."""
    config = {name: value for name, value in loaded.model.config.to_dict().items() if name not in _NO_MATTER}
    code = _code(loaded)
    return {
        "model": loaded.location.digest(None),
        **({"code of the model": code} if code else {}),
        "revision": provenance.revision,
        "task": provenance.task,
        "dtype": provenance.dtype,
        "attention": provenance.attention,
        "device": home(loaded.model).type,
        "config": _digest(json.dumps(config, sort_keys=True, default=str)),
    }


def of_data(batches: Sequence[Batch], options: DataOptions, provenance: Provenance) -> Fingerprint:
    """The data: its bytes, how it was read, and every number of the batches that the model sees."""
    total = hashlib.sha256()
    for batch in batches:
        total.update(repr(batch.numbers).encode())
        for name, values in sorted({**batch.inputs, "targets": batch.targets}.items()):
            total.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            total.update(values.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    read = {f"{name} of the data" if name == "seed" else name: str(value) for name, value in asdict(options).items()}
    return {"data": provenance.data_digest, **read, "batches": total.hexdigest()}


def of_versions(provenance: Provenance) -> Fingerprint:
    """The versions of what computes."""
    return {f"version of {name}": provenance.versions.get(name, "") for name in PACKAGES}


def of_measures(measures: Mapping[str, str], **settings: object) -> Fingerprint:
    """What is measured, and the settings of it."""
    found = {"measures": ", ".join(measures), "measured pairs": _digest(json.dumps(measures))}
    return found | {name: str(value) for name, value in settings.items()}


def difference(old: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """The first thing in which two fingerprints differ; None if they are the same."""
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name) != new.get(name):
            before, after = (found.get(name, "nothing") for found in (old, new))
            same = len(commonprefix([before, after]))
            start = 0 if same < _SHOWN else same - _SHOWN // 2
            return f"{name} is {_shown(after, start)!r} and was {_shown(before, start)!r}"
    return None


def _shown(text: str, start: int) -> str:
    return "…" * (start > 0) + text[start : start + _SHOWN]


def _code(loaded: LoadedModel) -> str:
    """Digest of the code that came with a model and runs it; empty where that of transformers does."""
    if not type(loaded.model).__module__.startswith("transformers_modules."):
        return ""
    files = sorted(loaded.location.folder.glob("*.py"))
    return _digest(json.dumps([(file.name, file.read_bytes().hex()) for file in files]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
