"""Native checkpoints: whether a configuration can say what a pruned model is, so that plain transformers loads it.

It can when every site keeps the same counts and the architecture reads the width of a head apart from their number
(`head_dim`, `d_kv`). This is tried, not looked up: the counts are written into a copy of the configuration, a model is
built from it without memory, and every parameter must have the shape that the pruned model has.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headscope.cuts import KV_COUNT, QUERY_COUNT
from headscope.heads import Site
from headscope.portable import ConfigView, carried
from headscope.reasons import RAISED, first_line, quiet


def native_config(pruned: PreTrainedModel, sites: Sequence[Site]) -> PreTrainedConfig | str:
    """The configuration that describes `pruned`, whose sites are `sites`; or in words why there is none."""
    recipe = carried(pruned.config)
    counts = {(site.n_heads, site.n_kv_heads, site.d_head) for site in sites}
    if len(counts) > 1 or recipe.get("silent"):
        return "its sites keep different numbers of heads, and a configuration has one number for all"
    if recipe.get("filled"):
        return "its attention cannot count fewer heads"
    if recipe.get("arguments"):
        return "its position biases are cut for each layer, which no configuration can say"
    n_heads, n_kv_heads, d_head = counts.pop()
    config = copy.deepcopy(pruned.config)
    config.headscope = {name: recipe[name] for name in ("version", "sites")}
    if hasattr(config, "auto_map"):
        delattr(config, "auto_map")  # nothing in a native checkpoint needs code
    for part in _owning(pruned, sites, config):
        _set_counts(part, n_heads, n_kv_heads)
        _set_width(part, d_head)
    return _tried(pruned, config)


def native_counts(model: PreTrainedModel, site: Site, heads: int, kv_heads: int) -> list[int]:
    """The numbers of heads for every site, below `heads`, with which a model of this kind has a native form.

    `site` is one of its sites; whole key/value groups go, of which there were `kv_heads`.
    """
    found: list[int] = []
    for groups in range(1, kv_heads):
        count = groups * heads // kv_heads
        config = copy.deepcopy(model.config)
        config.headscope = {}
        for part in _owning(model, [site], config):
            _set_counts(part, count, groups)
            _set_width(part, site.d_head)
        described = _described(model, config)
        weight = None if isinstance(described, str) else described.get_submodule(site.output).weight
        if isinstance(weight, torch.Tensor) and count * site.d_value in weight.shape:
            found.append(count)
    return found


def reads_kv_count(model: PreTrainedModel, site: Site) -> bool:
    """Whether the configuration of a site's module has a count of key/value heads, apart from that of query heads."""
    part = _config_of(model, site.module)
    return any(KV_COUNT.fullmatch(name) and type(getattr(part, name, None)) is int for name in part.to_dict())


def _owning(model: PreTrainedModel, sites: Sequence[Site], config: PreTrainedConfig) -> list[Any]:
    """The parts of `config`, a copy of the model's, that the modules of these sites read their counts from.

    Other towers, which the probe may not have reached, keep theirs.
    """
    own = {id(_config_of(model, site.module)) for site in sites}
    return [copied for part, copied in zip(_parts(model.config), _parts(config), strict=True) if id(part) in own]


def _config_of(model: PreTrainedModel, path: str) -> Any:
    """The configuration of a module, or of the nearest one around it that has one."""
    while True:
        config = getattr(model.get_submodule(path), "config", None)
        if config is not None:
            return config.__dict__["_config"] if isinstance(config, ConfigView) else config
        path = path.rpartition(".")[0]


def _parts(config: PreTrainedConfig) -> list[Any]:
    """A configuration and those nested in it."""
    found: list[Any] = [config]
    for part in found:
        nested = [getattr(part, name, None) for name in getattr(part, "sub_configs", {})]
        found += [one for one in nested if isinstance(one, PreTrainedConfig) and one not in found]
    return found


def _set_counts(part: Any, n_heads: int, n_kv_heads: int) -> None:
    for name in list(part.to_dict()):
        if type(getattr(part, name, None)) is int:
            if KV_COUNT.fullmatch(name):
                setattr(part, name, n_kv_heads)
            elif QUERY_COUNT.fullmatch(name):
                setattr(part, name, n_heads)


def _set_width(part: Any, d_head: int) -> None:
    """Say the width of a head, unless the configuration works it out, or says it in parts: then `head_dim` is another
    number.
    """
    worked_out = isinstance(vars(type(part)).get("head_dim"), property)
    if not worked_out and not hasattr(part, "qk_rope_head_dim"):
        part.head_dim = d_head


def _tried(pruned: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedConfig | str:
    """The configuration, read back as a loader would, if the model that it describes has the pruned model's shapes."""
    described = _described(pruned, config)
    if isinstance(described, str):
        return described
    want, have = _shapes(pruned), _shapes(described)
    if want != have:
        name = next(name for name in want if have.get(name) != want[name])
        return f"{type(config).__name__} cannot say it: {name} would be {have.get(name)}, it is {want[name]}"
    return config


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The shapes of what a checkpoint holds, and of tables that a model makes for itself."""
    tensors = {**dict(model.named_buffers()), **model.state_dict()}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _described(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel | str:
    """The model that a configuration describes, without memory; or in words why there is none."""
    original = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    try:
        with quiet(), torch.device("meta"):
            read = type(config).from_dict(config.to_dict())
            return original._from_config(read, dtype=model.dtype)  # type: ignore[attr-defined]
    except RAISED as error:
        return f"{type(config).__name__} does not accept these counts: {first_line(error)}"
