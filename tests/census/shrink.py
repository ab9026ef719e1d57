"""Shrinks the default configuration of any model type by rules on the names of its fields, to a few thousand numbers.

Widths that must agree across parts of a model (towers, projections) agree because equal names, wherever they stand,
become equal sizes: 64 channels, 4 heads of 16, 2 key/value heads where there were fewer than query heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, INNER, VOCABULARY, IMAGE, PATCH = 64, 4, 2, 16, 96, 99, 32, 8
POSITIONS, LAYERS, EXPERTS, STAGE_WIDTH, STAGE_IMAGE = 128, 2, 4, 32, 64

_KV = re.compile(r"(num|n)_(\w+_)?(key_value|kv)_(\w+_)?heads|num_kv_heads|kv_n_heads|multi_query_group_num")
_COUNT = re.compile(r"((num|n)_)?(\w+_)?heads?(_per_stage)?|\w*attention_heads\w*|heads")
_LAYERS = re.compile(
    r"(num_)?(\w+_)?(hidden_)?layers|(num_)?n?_?layers?|depth|n_layers?|layers|num_blocks|(\w+_)?depth|l_layers|num_stacks"
)
_TOKEN = re.compile(
    r"(\w+_)?(token|bos|eos|pad|cls|sep|mask|unk)_(id|index|ids)|(im|vision)_(start|end|newline|patch)_id"
)
_INNER = re.compile(
    r"(\w+_)?(intermediate|ffn|mlp|ff|feed_?forward)_?(hidden_)?(size|dim|width)?|n_inner|d_ff|dff|d_inner|dim_ff"
    r"|dim_feedforward|(\w+_)?dim_feedforward|linear_units|\w+_linear_units|feedforward_\w+"
)
_HEAD_WIDTH = re.compile(r"(\w+_)?head_dim|d_kv|d_head|dim_head|(\w+_)?dim_head|attention_head_size|kv_channels")
_WIDTH = re.compile(
    r"(\w+_)?(hidden|embed|embedding|model|projection|proj|output|text|vision|latent|audio|classifier_proj"
    r"|word_embed_proj|pooler_output|feature|input|entity_emb|cross|backbone|visual_embedding|codebook|condition|encoder_hidden|vector_quantization_hidden)_?(size|dim|dimension|width)"
    r"|d_model|n_embd|dim|emb_dim|embedding_size|hidden_size|d_latents|(\w+_)?hidden_size(_\w+)?|lru_width|dim_model"
    r"|hidden_dim|project_dim|(\w+_)?embed_dims?|fpn_(hidden|feature)_size|mask_dim|(\w+_)?embeds_hidden_size"
)


@dataclass(frozen=True)
class Rule:
    """Fields with a name, and what becomes of their value; `None` values and flags are left alone before."""

    name: re.Pattern[str]
    value: Callable[[Any], Any]


def _most(size: int) -> Callable[[Any], Any]:
    return lambda value: min(value, size) if isinstance(value, int) else value


def _fixed(size: Any) -> Callable[[Any], Any]:
    return lambda value: size if isinstance(value, int) else value


def _rule(pattern: str | re.Pattern[str], value: Callable[[Any], Any]) -> Rule:
    return Rule(re.compile(pattern), value)


RULES = (
    _rule(r"(\w+_)?vocab_size\w*", _most(VOCABULARY)),
    _rule(r"q_lora_rank", _fixed(24)),
    _rule(r"kv_lora_rank", _fixed(16)),
    _rule(r"qk_nope_head_dim|v_head_dim", _fixed(HEAD_WIDTH)),
    _rule(r"qk_rope_head_dim|rotary_dim", _fixed(8)),
    _rule(r"qk_head_dim", _fixed(24)),
    _rule(r"index_head_dim", _fixed(16)),
    _rule(r"(mamba|ssm)\w*_(d_)?state\w*|state_size|ssm_state_size", _most(8)),
    _rule(r"mamba_d_head|mamba_head_dim|mamba_headdim", _fixed(32)),
    _rule(r"(mamba_)?(n|num)_groups|mamba_ngroups|n_group|topk_group|num_expert_group", _most(1)),
    _rule(r"linear_num_key_heads", _fixed(2)),
    _rule(r"linear_num_value_heads", _fixed(4)),
    _rule(r"moe_(\w+_)?intermediate_size|expert_ffn_hidden_size|shared_expert\w*_size|moe_hidden_size", _fixed(32)),
    _rule(r"n_routed_experts|(moe_)?num_(local_)?experts|zero_expert_num", _most(EXPERTS)),
    _rule(r"num_experts_per_(tok|token)|moe_topk?(_k)?|moe_top_k|moe_k", _most(2)),
    _rule(r"first_k_dense_replace|num_nextn_predict_layers", _most(1)),
    _rule(r"max_source_positions|max_target_positions", _most(64)),
    _rule(
        r"(\w+_)?(max_)?position_embeddings|n_positions|max_seq(uence)?_len(gth)?|n_ctx|model_max_length",
        _most(POSITIONS),
    ),
    _rule(r"sliding_window(_size)?|local_attention|attention_window(_size)?|attention_chunk_size", _most(8)),
    _rule(_KV, _most(KV_HEADS)),
    _rule(r"cross_attention_frequency|num_(\w+_)?per_\w+", lambda value: value),
    _rule(_HEAD_WIDTH, _fixed(HEAD_WIDTH)),
    _rule(_COUNT, _most(HEADS)),
    _rule(r"num_feature_levels|num_residual_layers|(\w+_)?postnet_layers|(\w+_)?prenet_layers", lambda value: value),
    _rule(_LAYERS, _most(LAYERS)),
    _rule(_INNER, _fixed(INNER)),
    _rule(_WIDTH, _fixed(WIDTH)),
    _rule(r"image_size|crop_size|img_size|pretrain_image_size|train_size", _most(IMAGE)),
    _rule(r"patch_size", _most(PATCH)),
    _rule(r"num_mel_bins|n_mels|n_mel_bins|input_feat_per_channel", _most(16)),
    _rule(r"num_queries|num_query_tokens|num_latents|resampler_n_latents|(\w+_)?num_latents", _most(6)),
    _rule(r"num_conv_pos_embeddings", _most(16)),
    _rule(r"num_pos_feats", _fixed(WIDTH // 2)),
    _rule(r"intra_bottleneck_size", _fixed(WIDTH)),
    _rule(r"upsample_groups", _fixed(WIDTH)),
    _rule(r"upsample_initial_channel", _fixed(WIDTH)),
    _rule(r"num_filters", _most(8)),
    _rule(r"base_channels", _most(32)),
    _rule(r"codebook_size|num_embeddings", _most(VOCABULARY)),
    _rule(r"encoder_hash_byte_group_vocab", _most(VOCABULARY)),
    _rule(r"num_conv_pos_embedding_groups", _most(2)),
)


@dataclass
class Shrinker:
    """Shrinks one configuration; token ids that meant the same stay the same everywhere in it."""

    tokens: dict[int, int] = field(default_factory=dict)

    def shrunk(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a configuration (or of a part of it) in small."""
        if values.get("model_type") in WHOLE or values.get("model_type") == "timm_backbone":
            return dict(values if values["model_type"] in WHOLE else BACKBONE)
        kept = layers_kept(values)
        found: dict[str, Any] = {}
        staged = any(isinstance(values.get(name), list) for name in ("depths", "hidden_sizes", "embed_dims"))
        for name, value in values.items():
            found[name] = self._field(name, value, values, kept=kept, staged=staged)
        found.pop("stage_names", None)
        if "out_indices" in found and layer_total(values) is not None and not staged:
            found |= _outputs(len(found["out_indices"] or [0]), len(kept))
        return found | _agreed(found)

    def _field(self, name: str, value: Any, values: Mapping[str, Any], *, kept: list[int], staged: bool) -> Any:
        if isinstance(value, bool):
            return value
        if value is None:
            return MISSING.get(name)
        if isinstance(value, dict) and name == "per_layer_config":
            whole = {int(layer): part for layer, part in value.items()}
            return {place: self.shrunk(whole[layer]) for place, layer in enumerate(kept) if layer in whole}
        if isinstance(value, dict):
            return self._part(name, value)
        if isinstance(value, (list, tuple)):
            return self._list(name, list(value), values, kept=kept)
        if _TOKEN.fullmatch(name) and isinstance(value, int):
            return self._token(value)
        if not isinstance(value, int):
            return value
        if _is_layer_count(name, value, values):
            return len(kept)
        if staged:
            return _stage(name, value)
        return ruled(name, value)

    def _part(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        if name in ("rope_parameters", "rope_scaling"):
            return rope(value)
        if "model_type" in value or name.endswith("_config"):
            return self.shrunk(value)
        return value

    def _list(self, name: str, value: list[Any], values: Mapping[str, Any], *, kept: list[int]) -> list[Any]:
        if value and all(isinstance(item, dict) for item in value):
            return value
        if _TOKEN.fullmatch(name):
            return [self._token(item) if isinstance(item, int) else item for item in value]
        total = layer_total(values)
        if total is not None and len(value) == total and name not in _STAGES:
            return [value[place] for place in kept]
        if re.search(r"ind(ices|exe?s)|_idxs?$|_layers$", name) and all(type(item) is int for item in value) and total:
            return sorted({item * len(kept) // (total + 1) if item >= 0 else item for item in value})
        if name == "vision_feature_layer":
            return [max(min(item, 1), -2) for item in value]
        if name in _STAGES and value:
            return _STAGES[name](len(value))
        return value

    def _token(self, value: int) -> int:
        if 0 <= value < 3:
            return value
        return self.tokens.setdefault(value, 3 + len(self.tokens))


WHOLE = ("hgnet_v2", "efficientloftr", "levit")
"""Parts that stay as they are: convolutions whose sizes hang together in their own way, and no attention."""
BACKBONE = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_indices": [1, 2, 3, 4],
}  # fmt: skip
"""Stands in for backbones of the package timm."""
MISSING = {"prediction_length": 6, "context_length": 24, "vocab_size": VOCABULARY, "num_experts_per_tok": 2}
"""What is set where a default configuration leaves it open."""

_STAGES: dict[str, Callable[[int], list[int]]] = {
    "depths": lambda n: [1] * (n - 1) + [2],
    "num_heads": lambda n: [2 * 2**stage for stage in range(n)],
    "num_attention_heads": lambda n: [2 * 2**stage for stage in range(n)],
    "hidden_sizes": lambda n: [STAGE_WIDTH * 2**stage for stage in range(n)],
    "embed_dims": lambda n: [STAGE_WIDTH * 2**stage for stage in range(n)],
    "embed_dim": lambda n: [STAGE_WIDTH * 2**stage for stage in range(n)],
    "backbone_feature_sizes": lambda n: [WIDTH] * n,
    "image_size": lambda n: [IMAGE] * n,
    "embed_dim_per_stage": lambda n: [STAGE_WIDTH * 2**stage for stage in range(n)],
    "backbone_channel_list": lambda n: [STAGE_WIDTH * 2**stage for stage in range(n)][::-1],
    "num_attention_heads_per_stage": lambda n: [2 * 2**stage for stage in range(n)],
    "blocks_per_stage": lambda n: [1] * (n - 1) + [2],
    "window_size_per_stage": lambda n: [2] * n,
    "conv_dim": lambda n: [32, 32],
    "conv_stride": lambda n: [8, 5],
    "conv_kernel": lambda n: [10, 8],
    "encoder_in_channels": lambda n: [STAGE_WIDTH * 2 * 2**stage for stage in range(n)],
    "decoder_in_channels": lambda n: [WIDTH] * n,
}


def _outputs(count: int, layers: int) -> dict[str, Any]:
    """The last stages of a backbone whose stages are its layers."""
    stages = list(range(layers - count + 1, layers + 1))
    return {"out_indices": stages, "out_features": [f"stage{stage}" for stage in stages]}


def _agreed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that follow from others: rotary width of latent attention, head width where it is left open."""
    if isinstance(found.get("depths"), list) and isinstance(found.get("embed_dim"), int):
        return {"hidden_size": found["embed_dim"] * 2 ** (len(found["depths"]) - 1)}
    if found.get("kv_lora_rank"):
        agreed: dict[str, Any] = {name: HEADS for name in found if _KV.fullmatch(name)}
        if "qk_rope_head_dim" not in found:
            return agreed
        agreed["head_dim"] = rotary = found["qk_rope_head_dim"]
        if "qk_head_dim" in found:
            agreed["qk_head_dim"] = found["qk_nope_head_dim"] + rotary
        if (found.get("rope_parameters") or {}).get("mrope_section"):
            agreed["rope_parameters"] = found["rope_parameters"] | {"mrope_section": [1, 2, 1]}
        return agreed
    if "head_dim" in found and found["head_dim"] is None:
        return {"head_dim": HEAD_WIDTH}
    return {}


def _stage(name: str, value: int) -> int:
    """Models of stages halve the picture and double the width from one to the next."""
    if re.fullmatch(r"embed_dim|embedding_size|hidden_size", name):
        return STAGE_WIDTH
    if name == "window_size":
        return 2
    if name in ("image_size", "img_size"):
        return STAGE_IMAGE
    return ruled(name, value)


def ruled(name: str, value: int) -> int:
    """What the first rule for a field makes of it; unchanged without a rule."""
    if value <= 0:
        return value
    return next((rule.value(value) for rule in RULES if rule.name.fullmatch(name)), value)


def layer_total(values: Mapping[str, Any]) -> int | None:
    """The number of layers that a configuration's per-layer lists count; none where they come in stages."""
    if any(isinstance(values.get(name), list) for name in ("depths", "num_heads", "hidden_sizes", "blocks_per_stage")):
        return None
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "decoder_layers")
    return next((values[name] for name in names if type(values.get(name)) is int), None)


def layers_kept(values: Mapping[str, Any]) -> list[int]:
    """Layers that between them show every value of every per-layer list, at least two."""
    total = layer_total(values)
    if total is None:
        return list(range(LAYERS))
    lists = [value for name, value in values.items() if isinstance(value, (list, tuple)) and len(value) == total]
    seen: set[tuple[int, str]] = set()
    kept: list[int] = []
    for place in range(total):
        shown = {(number, str(items[place])) for number, items in enumerate(lists)}
        if shown - seen:
            kept.append(place)
            seen |= shown
    kept = kept if len(kept) < 9 else kept[:2]
    wanted = max(LAYERS, len(values.get("out_indices") or ()))
    more = [place for place in range(total) if place not in kept][: max(0, wanted - len(kept))]
    return sorted(kept + more)


def _is_layer_count(name: str, value: int, values: Mapping[str, Any]) -> bool:
    return name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "decoder_layers") and (
        value == layer_total(values)
    )


def rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters for heads of 16: sections of the rotation sum to 8, factors are one a frequency."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found[name] = rope(value)
        elif name == "mrope_section" and value:
            found[name] = [2, 3, 3] if len(value) == 3 else [4] * len(value)
        elif name in ("short_factor", "long_factor") and value:
            found[name] = list(value[: HEAD_WIDTH // 2])
        elif name == "original_max_position_embeddings" and value:
            found[name] = POSITIONS // 2
        else:
            found[name] = value
    return found
