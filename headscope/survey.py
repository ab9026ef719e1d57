"""A survey of a checkpoint from its config.json and the headers of its safetensors, without loading a weight."""

from __future__ import annotations

from dataclasses import replace

from headscope import inspection
from headscope.headers import check_config, has_safetensors, parameter_count, read_config, read_headers, value_bytes
from headscope.location import locate
from headscope.outline import outline
from headscope.provenance import Provenance
from headscope.tables import Table


def survey(model: str, by: str, tokens: int, *, revision: str | None = None) -> Table | None:
    """The report by `layer` or by `model`; None where names and shapes do not settle it and the model must be loaded.

    Raises:
        ModelError: the checkpoint cannot be used.
        UsageError: `model` names none.
    """
    location = locate(model, revision=revision)
    if location.gguf:
        return None
    config = read_config(location.folder)
    check_config(config)
    if not has_safetensors(location.folder):
        return None
    tensors = read_headers(location.folder)
    shapes = outline(config, tensors)
    if shapes is None:
        return None
    provenance = Provenance(model=model, revision=location.revision)
    size = value_bytes(tensors.values())
    if by == "layer":
        return replace(inspection.outline_layers(shapes, tokens, size, provenance), notes=location.notes)
    architecture = str((config.get("architectures") or [""])[0])
    total = parameter_count(tensors.values())
    table = inspection.outline_model(shapes, tokens, size, provenance, architecture=architecture, total=total)
    return replace(table, notes=location.notes)
