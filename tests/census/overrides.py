"""What single model types or families need besides the rules of `shrink`, as fields to set in their configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

DROP = object()
"""Leaves a field to the configuration, which works it out from others."""
_TEXT = "(text_config)"
_MROPE = {"rope_parameters.mrope_section": [2, 3, 3]}
_VISUAL_WORDS = {"<image>": 8} | {f"IMGIMG{letter}.": 50 + place for place, letter in enumerate("ABCDEFGHIJ")}
_HIERA = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "image_size": [64, 64],
    "global_attention_blocks": [3],
    "window_positional_embedding_background_size": [2, 2],
    "window_size_per_stage": [8, 4, 4, 2],
}
_HIERA_SIZES = {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}
_PINPOINTS = [[32, 64], [64, 32]]

OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 40, "audio_token_offset": 104, "text_config.vocab_size": 300},
    "aria": {"projector_patch_to_query_dict": {16: 4}, "max_value_projector_patch_to_query_dict": 4},
    "blip-2|instructblip|instructblipvideo": {"image_token_index": 20, "num_query_tokens": 6},
    "bros": {"dim_bbox_projection": 16},
    "chameleon": {
        "vocabulary_map": _VISUAL_WORDS,
        "image_token_id": DROP,
        "vq_config.num_embeddings": 10,
        "vq_config.resolution": 64,
    },
    "clap": {
        "audio_config.patch_embeds_hidden_size": 32,
        "audio_config.hidden_size": 256,
        "audio_config.spec_size": 64,
        "audio_config.num_mel_bins": 32,
    },
    "cohere_compass_text|cohere_compass(text_config)": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dab-detr": {"query_dim": 4},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "diffusion_gemma(text_config)": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "align": {
        "vision_config.width_coefficient": 0.5,
        "vision_config.depth_coefficient": 0.5,
        "vision_config.hidden_dim": 160,
        "projection_dim": 160,
        "text_config.projection_dim": 160,
    },
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    "clvp": {"text_config.num_attention_heads": 2, "speech_config.num_attention_heads": 2},
    "depth_pro": {"intermediate_hook_ids": [1, 0], "intermediate_feature_dims": [64, 64]},
    "ernie4_5_vl_moe(text_config)": {"rope_parameters.mrope_section": [2, 2, 4]},
    "esmc": {"num_key_value_heads": 4},
    "kosmos-2|kosmos-2.5": {"latent_query_num": 4},
    "llama4": {"vision_config.intermediate_size": 256},
    "mllama": {
        "vision_config.vision_output_dim": 192,
        "text_config.num_hidden_layers": 3,
        "text_config.cross_attention_layers": [1],
    },
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "muse_spark": {"out_hidden_size": 256, "vision_config.out_hidden_size": 256, "audio_config.num_hidden_layers": 4},
    "qwen(2_5|3)_omni\\w*_thinker|qwen3_asr": {"audio_config.max_source_positions": 200},
    "qwen3_asr_encoder": {"max_source_positions": 200},
    "seggpt": {"image_size": [64, 32], "merge_index": 0},
    "step3p7": {"text_config.sliding_window": 8},
    "voxtral": {"audio_token_id": 24},
    "esm": {"pad_token_id": 1, "mask_token_id": 4},
    "emu3": {
        "vocabulary_map": {"<image>": 8, "<|extra_200|>": 9} | {f"<|visual token {i:06d}|>": 20 + i for i in range(64)},
        "image_token_id": DROP,
        "vq_config.codebook_size": 64,
        "vq_config.channel_multiplier": [1, 1, 1, 2],
    },
    "dots3_note_text|dots3_note(text_config)": {"head_dim": 24},
    "dots3_note": {"audio_config.adapter_in_dim": 64},
    "instructblipvideo": {"video_token_index": 20},
    "falcon_h1": {"mamba_d_ssm": 128},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "funnel": {"block_sizes": [1, 1, 1], "num_decoder_layers": 1},
    "gemma3n_text|gemma3n(text_config)": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    },
    "gemma3|t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "lightglue": {"depth_confidence": 1.0},
    "minicpm_ocr|minicpmv4_6|minicpmv4_7": {"image_token_id": 20, "insert_layer_id": 0},
    "minicpm_ocr": {"downsample_mode": "16x"},
    "pegasus_x": {"block_size": 8, "num_global_tokens": 4},
    "perceiver": {"num_self_attends_per_block": 2},
    "phi4_multimodal": {
        "audio_config.nemo_final_size": DROP,
        "audio_config.ext_pw_out_channel": 64,
        "audio_config.depthwise_separable_out_channel": 64,
    },
    "(minicpm_ocr|minicpmv4_7)_vision": {"insert_layer_id": 0},
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "voxtral|glmasr|audioflamingo3|musicflamingo": {"audio_config.intermediate_size": 256},
    "hunyuan_vl_text|hunyuan_vl(text_config)": {"rope_parameters.mrope_section": [2, 2, 2, 2]},
    "informer|autoformer|time_series_transformer": {"feature_size": DROP},
    "layoutlmv3|layoutlmv2": {"coordinate_size": 12, "shape_size": 8},
    "levit": {"image_size": 64, "depths": [1, 1, 1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 96},
    "llava_next|llava_next_video|llava_onevision|granite4_vision": {"image_grid_pinpoints": _PINPOINTS},
    "lw_detr": {
        "projector_scale_factors": [1.0],
        "backbone_config.num_windows": 4,
        "backbone_config.num_windows_side": 2,
    },
    "mamba2": {"head_dim": 32},
    "mistral4": {"head_dim": 16},
    "longt5": {"local_radius": 3, "global_block_size": 2},
    "mobilevit": {
        "hidden_sizes": [16, 32, 64],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
        "aspp_out_channels": 16,
    },
    "mobilevitv2": {"image_size": 256},
    "segformer": {"hidden_sizes": [16, 32, 64, 64], "num_attention_heads": [2, 2, 4, 4]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "qwen(2_5|3)_omni\\w*_thinker": {"vision_start_token_id": 30, "vision_end_token_id": 31},
    "(qwen2_vl|qwen2_5_vl|glm4v|glm_ocr|glm_image)_text": _MROPE,
    "(qwen2_vl|qwen2_5_vl|glm4v|glm46v|glm_ocr|glm_image|paddleocr_vl|qwen2_5_omni_thinker)(text_config)": _MROPE,
    "glm4v_moe_text|(glm4v_moe|glmga)(text_config)": {"rope_parameters.mrope_section": [1, 2, 1]},
    "qwen4_exp_text|qwen4_exp(text_config)": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 50,
    },
    "reformer": {
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [8, 16],
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "sam|sam_hq": {
        "prompt_encoder_config.image_embedding_size": 4,
        "vision_config.output_channels": 64,
        "vision_config.num_pos_feats": 32,
    },
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": {f"backbone_config.{name}": value for name, value in _HIERA.items()} | _HIERA_SIZES,
    "sam2|sam2_video|edgetam_video": {
        f"vision_config.{name}": value
        for name, value in ({f"backbone_config.{name}": value for name, value in _HIERA.items()} | _HIERA_SIZES).items()
    }
    | {"prompt_encoder_config.image_size": 64, "prompt_encoder_config.patch_size": 16},
    "sam_hq": {"mask_decoder_config.vit_dim": 64},
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2]},
    "swin2sr": {"num_heads": [2] * 6, "num_layers": DROP, "hidden_size": DROP, "depths": [1, 1], "embed_dim": 32},
    "textnet": {"stem_out_channels": 32},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
    "vibevoice\\w*": {"num_filters": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "hybrid_layer_ids": DROP},
}
"""For all types whose whole name matches; `type(text_config)` sets fields of that part of its configuration."""


def changed(model_type: str, values: dict[str, Any]) -> dict[str, Any]:
    """The small configuration with a type's own settings; nested fields are named `part.field`."""
    for pattern, settings in OVERRIDES.items():
        for choice in _choices(pattern):
            types, in_text = choice.removesuffix(_TEXT), choice.endswith(_TEXT)
            if re.fullmatch(types, model_type):
                for name, value in settings.items():
                    _set(values, f"text_config.{name}" if in_text else name, value)
    return values


def _choices(pattern: str) -> list[str]:
    """The alternatives of a pattern, `|` outside of brackets between them."""
    return re.split(r"\|(?![^(]*\))", pattern)


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *parts, last = name.split(".")
    target: Any = values
    for part in parts:
        if not isinstance(target.get(part), Mapping):
            return
        target = target[part]
    if value is DROP:
        target.pop(last, None)
    else:
        target[last] = value
