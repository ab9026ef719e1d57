"""Writing the recipe in a configuration: how a pruned model differs from the one described, and which heads it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headscope.heads import Site, SiteId
from headscope.numbers import VERSION, Counts
from headscope.plan import Plan
from headscope.portable import ConfigView, Silent, carried

_FOLLOWING = ("nx", "nf", "in_features", "out_features", "num_embeddings", "embedding_dim", "normalized_shape")
"""Sizes that follow from a parameter's shape (`portable.resize`)."""


@dataclass(frozen=True)
class Snapshot:
    """The shapes of all parameters and the plain counts of all modules of a model, by path."""

    shapes: Mapping[str, tuple[int, ...]]
    counts: Mapping[str, Counts]


def snapshot(model: nn.Module) -> Snapshot:
    """What surgery may change about a model."""
    return Snapshot(
        {path: tuple(parameter.shape) for path, parameter in model.named_parameters(remove_duplicate=False)},
        {path: _counts(module) for path, module in model.named_modules(remove_duplicate=False)},
    )


def _counts(module: nn.Module) -> Counts:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _FOLLOWING and _is_count(value)
    }


def _is_count(value: object) -> bool:
    return type(value) is int or (isinstance(value, tuple) and bool(value) and all(type(one) is int for one in value))


def recipe(model: PreTrainedModel, before: Snapshot) -> dict[str, Any]:
    """What `portable.restore` needs to turn the described model into this one, given how the model looked before
    surgery; a recipe that it carried then is continued.
    """
    earlier = carried(model.config)
    after = snapshot(model)
    parameters = dict(earlier.get("parameters", {}))
    parameters |= {path: list(shape) for path, shape in after.shapes.items() if before.shapes.get(path) != shape}
    attributes = {path: dict(counts) for path, counts in earlier.get("attributes", {}).items()}
    settings: dict[str, Counts] = {}
    arguments: dict[str, Any] = {}
    silent: dict[str, Any] = {}
    filled: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Silent):
            silent[path] = module.output
            attributes.pop(path, None)
            continue
        counts, old = after.counts[path], before.counts.get(path, {})
        if changed := {name: value for name, value in counts.items() if old.get(name, value) != value}:
            attributes.setdefault(path, {}).update(changed)
        if isinstance(config := getattr(module, "config", None), ConfigView):
            settings[path] = dict(config.__dict__["_counts"])
        if "headscope_arguments" in module.__dict__:
            arguments[path] = module.__dict__["headscope_arguments"]
        if "headscope_filled" in module.__dict__:
            filled[path] = module.__dict__["headscope_filled"]
    entries = {"parameters": parameters, "attributes": attributes, "settings": settings, "arguments": arguments}
    return {name: entry for name, entry in (entries | {"silent": silent, "filled": filled}).items() if entry}


def numbering(
    model: PreTrainedModel,
    sites: Sequence[Site],
    plan: Plan,
    *,
    physical: bool,
    kv_kept: Mapping[SiteId, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """The `sites` entry after a plan, with sites that lost their last head in an earlier one.

    Without `physical`, removed heads are still there with nothing to say. `kv_kept` are places of the key/value heads
    that sites keep; in others they are those that the heads that are left read.
    """
    known = {entry["id"]: entry for entry in carried(model.config).get("sites", ())}
    present = {str(site.id) for site in sites}
    entries = [entry for label, entry in known.items() if label not in present]
    for site in sites:
        label, kept = str(site.id), set(plan.kept(site.id))
        earlier = known.get(label, {})
        entry: Counts = {"id": label, "module": site.module, "call": site.call}
        entry["heads"] = earlier.get("heads", site.n_heads)
        entry["kv_heads"] = earlier.get("kv_heads", site.n_kv_heads)
        if physical:
            left = [place for place, head in enumerate(site.heads) if head.index in kept]
            entry["kept"] = [site.heads[place].index for place in left]
            kv_left = (kv_kept or {}).get(site.id, {site.kv_head(place) for place in left})
            entry["kv_kept"] = sorted({site.kv_number(place * site.group_size) for place in kv_left})
        else:
            masked = {head.index for head in site.heads} - kept | set(earlier.get("masked", ()))
            entry |= {"masked": sorted(masked)} if masked else {}
            entry |= {name: earlier[name] for name in ("kept", "kv_kept") if name in earlier}
        entries.append(entry)
    return {"version": VERSION, "sites": entries}
