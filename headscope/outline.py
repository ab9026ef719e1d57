"""The attention sites of a checkpoint as far as config, tensor names and shapes settle them; no weight is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headscope.cost import SiteShape, parameters_per_head
from headscope.headers import TensorInfo
from headscope.heads import AttentionKind, SiteId
from headscope.naming import Family, Fields, Tower, Window, family

ATTENTION = re.compile(r"attn|attention|query|key|value|qkv|(?:^|[._])[qkvo]_?(?:proj|lin)\b|\.[qkvo]\.", re.IGNORECASE)
"""Names that may belong to attention: each must be explained, or the outline is not certain."""
EXTRAS = re.compile(
    r"""(?:^|\.)(?:
        [a-z]{0,9}_?(?:self_|encoder_)?(?:attention|attn)_?(?:layer_?)?norm\.(?:weight|bias)
      | attention\.(?:output\.)?(?:LayerNorm|ln)\.(?:weight|bias|gamma|beta)
      | (?:self_attn|attn)\.[qk]_(?:norm|layernorm)\.(?:weight|bias)
      | self_attn\.sinks
      | (?:SelfAttention|EncDecAttention)\.relative_attention_bias\.weight
      | (?:attn|attention)\.(?:bias|masked_bias)
      | (?:self_attn|attention)\.rotary_emb\.inv_freq
      | attention\.self\.rotary_embeddings\.inv_freq
    )$""",
    re.VERBOSE,
)
"""What stands beside the projections and is no q, k, v or o slice: norms, sinks, bias tables, mask buffers."""
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
DOUBTS = (
    "quantization_config",
    "auto_map",
    "transformers_weights",
    "pruned_heads",
    "add_cross_attention",
    "use_bidirectional_attention",
    "num_kv_shared_layers",
    "attention_chunk_size",
    "linear_attn_config",
)
"""Fields that, when set, let a model differ from its names and shapes."""
LONGEST_NAME = 512


@dataclass(frozen=True)
class _Sizes:
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    n_layers: int


Windows = Sequence[int | None]
"""For each layer the most keys that a query sees; None: the whole text."""
_Parts = dict[tuple[str, str], tuple[int, ...]]
"""Shapes in one layer by projection name and `weight` or `bias`."""


def outline(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> tuple[SiteShape, ...] | None:
    """The sites by stack, kind and layer, or None where the model must be loaded to know them.

    Sizes come from the config and every tensor that may belong to attention must agree with them. Query/key norms,
    attention sinks and tables of relative positions are allowed but belong to no slice and are not counted.
    """
    known = _family(config)
    if known is None or any(len(name) > LONGEST_NAME for name in tensors):
        return None
    sites: list[SiteShape] = []
    used: set[str] = set()
    roots: set[str] = set()
    for tower in known.towers:
        found = _tower(tower, known, config, tensors)
        if found is None:
            return None
        shapes, names, root = found
        sites += shapes
        used |= names
        roots.add(root)
    if len(roots) != 1 or any(not _explained(info) for name, info in tensors.items() if name not in used):
        return None
    return tuple(sites)


def _family(config: Mapping[str, Any]) -> Family | None:
    """The naming rules for this configuration, unless something in it makes them uncertain."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        return None
    parts = [config] + [part for name, part in config.items() if name.endswith("_config") and isinstance(part, dict)]
    if any(part.get(name) for part in parts for name in DOUBTS):
        return None
    if any(part.get("is_causal") is not None for part in parts):
        return None
    known = family(config.get("model_type"), architectures[0], config.get("is_decoder", False))
    if known is None:
        return None
    crossing = any(tower.kind is AttentionKind.CROSS for tower in known.towers)
    if crossing and config.get("is_encoder_decoder", True) is not True:
        return None
    return known


def _explained(info: TensorInfo) -> bool:
    if ATTENTION.search(info.name) is None:
        return True
    if EXTRAS.search(info.name) is None:
        return False
    return "norm" not in info.name.lower() or len(info.shape) == 1


def _tower(
    tower: Tower, known: Family, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[list[SiteShape], set[str], str] | None:
    """The sites of one tower, the tensors they use and what stands before the layers' names."""
    section = config.get(tower.fields.section) if tower.fields.section else config
    sizes = _sizes(section, tower.fields) if isinstance(section, dict) else None
    if not isinstance(section, dict) or sizes is None:
        return None
    windows = _windows(known.window, section, sizes.n_layers)
    found = _layers(tower, tensors)
    if windows is None or found is None:
        return None
    layers, names, root = found
    if len(layers) != sizes.n_layers or any(layer not in layers for layer in range(sizes.n_layers)):
        return None
    shapes: list[SiteShape] = []
    for layer, window in enumerate(windows):
        if not _consistent(tower, sizes, layers[layer]):
            return None
        shapes.append(_shape(tower, layer, sizes, parts=layers[layer], window=window))
    return shapes, names, root


def _sizes(config: Mapping[str, Any], fields: Fields) -> _Sizes | None:
    heads, width, depth = (_number(config, names) for names in (fields.heads, fields.width, fields.depth))
    if depth is None and fields.depth == "num_decoder_layers" and config.get("num_decoder_layers") is None:
        depth = _number(config, "num_layers")
    if heads is None or width is None or depth is None:
        return None
    kv_heads = _optional(config, fields.kv_heads, heads, required=fields.kv_required)
    d_head = _optional(config, fields.head_dim, width // heads)
    if kv_heads is None or d_head is None or heads % kv_heads:
        return None
    whole = bool(fields.head_dim and config.get(fields.head_dim)) or width % heads == 0
    return _Sizes(heads, kv_heads, d_head, width, depth) if whole and d_head else None


def _number(config: Mapping[str, Any], names: str) -> int | None:
    """The positive whole number under these names (joined by |), or None if absent or contradictory."""
    values = [config[name] for name in names.split("|") if name in config]
    if not values or any(type(value) is not int or value < 1 or value != values[0] for value in values):
        return None
    return values[0]


def _optional(config: Mapping[str, Any], name: str, default: int, *, required: bool = False) -> int | None:
    if not name or (config.get(name) is None and not (required and name not in config)):
        return default
    return _number(config, name)


def _windows(rule: Window, config: Mapping[str, Any], n_layers: int) -> Windows | None:
    """The window of each layer, or None if that is uncertain."""
    types = config.get("layer_types")
    if types is not None and not _layer_types(types, n_layers):
        return None
    if rule is Window.MODERNBERT:
        return _modernbert_windows(config, types, n_layers)
    size, switch = config.get("sliding_window"), config.get("use_sliding_window")
    typed = types is not None and "sliding_attention" in types
    if size is None or (rule is Window.SWITCHED and switch in (None, False)):
        return None if typed else [None] * n_layers
    if type(size) is not int or size < 1 or rule is Window.NONE:
        return None
    if rule is Window.ALL:
        return [size] * n_layers if types is None and switch is None else None
    if types is None or (rule is Window.TYPED and switch is False):
        return None
    if rule is Window.SWITCHED and (
        switch is not True or config.get("model_type") not in ("qwen2", "qwen3", "smollm3")
    ):
        return None
    return [size if kind == "sliding_attention" else None for kind in types]


def _layer_types(types: object, n_layers: int) -> bool:
    known = ("full_attention", "sliding_attention")
    return isinstance(types, list) and len(types) == n_layers and all(kind in known for kind in types)


def _modernbert_windows(config: Mapping[str, Any], types: list[str] | None, n_layers: int) -> Windows | None:
    """A query sees `local_attention // 2` keys on either side and itself."""
    size = _number(config, "local_attention")
    if types is None:
        every = _number(config, "global_attn_every_n_layers")
        if every is None:
            return None
        types = ["sliding_attention" if layer % every else "full_attention" for layer in range(n_layers)]
    if size is None or config.get("sliding_window") not in (None, size // 2):
        return None
    return [2 * (size // 2) + 1 if kind == "sliding_attention" else None for kind in types]


def _layers(tower: Tower, tensors: Mapping[str, TensorInfo]) -> tuple[dict[int, _Parts], set[str], str] | None:
    """The shapes of the projections by layer, their full names, and the one prefix they share."""
    names = tower.names
    parts = "|".join(re.escape(part) for part in {names.query, names.key, names.value, names.output})
    pattern = re.compile(rf"((?:\w+\.)*?){tower.layers}\.(0|[1-9]\d{{0,5}})\.({parts})\.(weight|bias)")
    layers: dict[int, _Parts] = {}
    used: set[str] = set()
    roots: set[str] = set()
    for name, info in tensors.items():
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if info.dtype not in FLOATS:
            return None
        root, layer, part, what = match.groups()
        layers.setdefault(int(layer), {})[part, what] = info.shape
        used.add(name)
        roots.add(root)
    return (layers, used, roots.pop()) if len(roots) == 1 else None


def _consistent(tower: Tower, sizes: _Sizes, parts: _Parts) -> bool:
    """Whether the projections of one layer are all there, with the shapes that the sizes demand."""
    names = tower.names
    own, grouped = sizes.n_heads * sizes.d_head, sizes.n_kv_heads * sizes.d_head
    wanted = {names.query: own, names.key: grouped, names.value: grouped}
    if names.query == names.key == names.value:
        wanted = {names.query: own + 2 * grouped}
    for part, rows in wanted.items():
        if not _projects(parts, part, rows, columns=sizes.d_model, conv=names.conv):
            return False
    return _projects(parts, names.output, sizes.d_model, columns=own, conv=names.conv)


def _projects(parts: _Parts, part: str, rows: int, *, columns: int, conv: bool) -> bool:
    weight = (columns, rows) if conv else (rows, columns)
    return parts.get((part, "weight")) == weight and parts.get((part, "bias"), (rows,)) == (rows,)


def _shape(tower: Tower, layer: int, sizes: _Sizes, *, parts: _Parts, window: int | None) -> SiteShape:
    names = tower.names
    return SiteShape(
        id=SiteId(tower.stack, tower.kind, layer),
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        d_head=sizes.d_head,
        d_value=sizes.d_head,
        d_model=sizes.d_model,
        window=window,
        keeps_cache=tower.kind is not AttentionKind.SELF,
        parameters_per_head=parameters_per_head(
            sizes.n_heads,
            sizes.n_kv_heads,
            d_in=sizes.d_model,
            d_head=sizes.d_head,
            d_value=sizes.d_head,
            d_out=sizes.d_model,
            query_bias=(names.query, "bias") in parts,
            key_bias=(names.key, "bias") in parts,
            value_bias=(names.value, "bias") in parts,
        ),
    )
