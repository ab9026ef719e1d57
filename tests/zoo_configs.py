"""The table behind the zoo: one tiny configuration per attention structure, with the sites and heads it must show.

Sizes differ pairwise as far as an architecture lets them, so that a mixed-up axis cannot pass: 5 heads of 6 or 8 where
every head has its own key and value, 8 query heads of 10 in 2 groups where they are shared, and a hidden width other
than heads times width where the configuration can say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Counts = int | dict[str, int]
"""One number for all sites, or one for each `stack.kind`; 0 = differs between layers, not checked."""


@dataclass(frozen=True)
class Recipe:
    """What to build (names in transformers, so that importing this file imports no model) and what must be found."""

    model_type: str
    model_class: str
    config: dict[str, Any]
    stacks: dict[str, int]
    n_heads: Counts
    n_kv_heads: Counts
    d_head: Counts
    d_value: Counts
    inputs: str = "text"
    parts: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """Configurations inside the configuration, such as the two towers of CLIP: field -> model type, sizes."""


TOKENS = {"vocab_size": 53, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCK = {"num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 37}
TEXT = TOKENS | BLOCK | {"hidden_size": 30, "max_position_embeddings": 47}
GPT = TOKENS | {"n_embd": 30, "n_layer": 2, "n_head": 5, "n_inner": 37, "n_positions": 47}
GROUPED = TEXT | {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 80}
NARROW = GROUPED | {"hidden_size": 24, "head_dim": 10}
IMAGE = BLOCK | {"hidden_size": 30, "image_size": 12, "patch_size": 4, "num_labels": 4}
SEQ2SEQ = TOKENS | {
    "d_model": 40, "encoder_layers": 2, "encoder_attention_heads": 5, "encoder_ffn_dim": 37,
    "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 41, "decoder_start_token_id": 1,
}  # fmt: skip
SEQ2SEQ_STACKS = {"encoder.self": 2, "decoder.causal": 3, "decoder.cross": 3}
SEQ2SEQ_HEADS = {"encoder.self": 5, "decoder.causal": 4, "decoder.cross": 4}
SEQ2SEQ_WIDTHS = {"encoder.self": 8, "decoder.causal": 10, "decoder.cross": 10}


def encoder(model_type: str, model_class: str, *, layers: int = 2, d_head: int = 6, **config: Any) -> Recipe:
    """A bidirectional text model with 5 heads."""
    return Recipe(model_type, model_class, TEXT | config, {"encoder.self": layers}, 5, 5, d_head, d_head)


def decoder(
    model_type: str,
    model_class: str,
    config: dict[str, Any],
    *,
    heads: tuple[int, int] = (5, 5),
    d_head: int = 6,
    d_value: int | None = None,
    layers: int = 2,
) -> Recipe:
    """A causal text model with `heads` query and key/value heads."""
    d_value = d_head if d_value is None else d_value
    return Recipe(model_type, model_class, config, {"decoder.causal": layers}, *heads, d_head, d_value)


def grouped(model_type: str, model_class: str, *, n_kv_heads: int = 2, narrow: bool = True, **config: Any) -> Recipe:
    """A causal text model with 8 query heads of 10 that share key/value heads; `narrow`: hidden width 24, not 80."""
    config = (NARROW if narrow else GROUPED) | {"num_key_value_heads": n_kv_heads} | config
    return decoder(model_type, model_class, config, heads=(8, n_kv_heads), d_head=10)


def seq2seq(model_type: str, model_class: str, *, inputs: str = "text", **config: Any) -> Recipe:
    """An encoder-decoder with 2 encoder layers of 5 heads of 8 and 3 decoder layers of 4 heads of 10."""
    config = SEQ2SEQ | config
    heads, widths = SEQ2SEQ_HEADS, SEQ2SEQ_WIDTHS
    return Recipe(model_type, model_class, config, SEQ2SEQ_STACKS, heads, heads, widths, widths, inputs=inputs)


def vision(model_type: str, model_class: str, **config: Any) -> Recipe:
    """A bidirectional image model with 5 heads of 6."""
    return Recipe(model_type, model_class, IMAGE | config, {"vision.self": 2}, 5, 5, 6, 6, inputs="image")


def towers(model_type: str, text_stack: str, text: dict[str, Any], **config: Any) -> Recipe:
    """A text tower of 2 layers with 5 heads of 6 beside an image tower of 3 layers with 4 heads of 7, which attention
    pools in SigLIP.
    """
    image = IMAGE | {"hidden_size": 28, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 41}
    parts = {
        "text_config": (f"{model_type}_text_model", TEXT | text),
        "vision_config": (f"{model_type}_vision_model", image),
    }
    heads, widths = ({text_stack: own, "vision.self": other, "vision.cross": other} for own, other in ((5, 4), (6, 7)))
    stacks = {text_stack: 2, "vision.self": 3} | ({"vision.cross": 1} if model_type == "siglip" else {})
    name = {"clip": "CLIPModel", "siglip": "SiglipModel"}[model_type]
    return Recipe(model_type, name, config, stacks, heads, heads, widths, widths, inputs="image-text", parts=parts)


ENCODERS = {
    "bert": encoder("bert", "BertForSequenceClassification", num_labels=4),
    "roberta": encoder("roberta", "RobertaForMaskedLM"),
    "distilbert": Recipe(
        "distilbert",
        "DistilBertForMaskedLM",
        TOKENS | {"dim": 30, "n_layers": 2, "n_heads": 5, "hidden_dim": 37, "max_position_embeddings": 47},
        {"encoder.self": 2},
        *(5, 5, 6, 6),
    ),
    "albert": encoder("albert", "AlbertForMaskedLM", layers=4, num_hidden_layers=4, embedding_size=13),
    "albert-groups": encoder(
        "albert", "AlbertForMaskedLM", layers=4, num_hidden_layers=4, num_hidden_groups=2, embedding_size=13
    ),
    "electra": encoder("electra", "ElectraForSequenceClassification", embedding_size=13, num_labels=4),
    "deberta": encoder(
        "deberta", "DebertaForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"],
        max_relative_positions=17, num_labels=4,
    ),
    "deberta-v2": encoder(
        "deberta-v2", "DebertaV2ForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=4, share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False, num_labels=4,
    ),
    "deberta-v2-position": encoder(
        "deberta-v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=4, share_att_key=False,
    ),
    "mpnet": encoder("mpnet", "MPNetForSequenceClassification", num_labels=4),
    "modernbert": encoder(
        "modernbert", "ModernBertForMaskedLM", d_head=8, hidden_size=40, local_attention=6,
        layer_types=["full_attention", "sliding_attention"], cls_token_id=1, sep_token_id=2,
    ),
    "convbert": Recipe(
        "convbert",
        "ConvBertForMaskedLM",
        TEXT | {"num_attention_heads": 10, "hidden_size": 60, "embedding_size": 13, "head_ratio": 2}
        | {"conv_kernel_size": 3},
        {"encoder.self": 2},
        *(5, 5, 6, 6),
    ),
}  # fmt: skip

DECODERS = {
    "gpt2": decoder("gpt2", "GPT2LMHeadModel", GPT),
    "gpt_neo": decoder(
        "gpt_neo", "GPTNeoForCausalLM",
        TEXT | {"num_layers": 2, "num_heads": 5, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "gptj": decoder("gptj", "GPTJForCausalLM", GPT | {"n_embd": 40, "rotary_dim": 4}, d_head=8),
    "gpt_neox": decoder(
        "gpt_neox", "GPTNeoXForCausalLM", TEXT | {"hidden_size": 40, "partial_rotary_factor": 0.5}, d_head=8
    ),
    "codegen": decoder(
        "codegen", "CodeGenForCausalLM", GPT | {"n_embd": 48, "n_head": 8, "rotary_dim": 4}, heads=(8, 8)
    ),
    "gpt_bigcode": decoder("gpt_bigcode", "GPTBigCodeForCausalLM", GPT, heads=(5, 1)),
    "opt": decoder("opt", "OPTForCausalLM", TEXT | {"ffn_dim": 37, "word_embed_proj_dim": 13}),
    "bloom": decoder("bloom", "BloomForCausalLM", TOKENS | {"hidden_size": 30, "n_layer": 2, "n_head": 5}),
    "falcon-mqa": decoder(
        "falcon", "FalconForCausalLM", TEXT | {"hidden_size": 40, "ffn_hidden_size": 37}, heads=(5, 1), d_head=8
    ),
    "falcon-gqa": decoder(
        "falcon", "FalconForCausalLM",
        GROUPED | {"num_kv_heads": 2, "ffn_hidden_size": 37, "new_decoder_architecture": True},
        heads=(8, 2), d_head=10,
    ),
    "falcon-alibi": decoder(
        "falcon", "FalconForCausalLM",
        TEXT | {"ffn_hidden_size": 37, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    ),
    "mpt": decoder(
        "mpt", "MptForCausalLM", TOKENS | {"d_model": 30, "n_heads": 5, "n_layers": 2, "max_seq_len": 47}
    ),
    "llama": grouped("llama", "LlamaForCausalLM"),
    "llama-mqa": grouped("llama", "LlamaForCausalLM", n_kv_heads=1),
    "mistral": grouped("mistral", "MistralForCausalLM", sliding_window=4),
    "mixtral": grouped("mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "qwen2": grouped("qwen2", "Qwen2ForCausalLM", narrow=False),
    "qwen3": grouped("qwen3", "Qwen3ForCausalLM"),
    "qwen3_next": grouped(
        "qwen3_next", "Qwen3NextForCausalLM", num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "full_attention"], partial_rotary_factor=0.4,
        linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=7, linear_value_head_dim=11,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=19, shared_expert_intermediate_size=17,
    ),
    "gemma2": grouped(
        "gemma2", "Gemma2ForCausalLM", sliding_window=4, query_pre_attn_scalar=10, attn_logit_softcapping=3.0
    ),
    "gemma3_text": grouped(
        "gemma3_text", "Gemma3ForCausalLM", sliding_window=4, query_pre_attn_scalar=10,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "phi3": grouped("phi3", "Phi3ForCausalLM", narrow=False),
    "phi": decoder("phi", "PhiForCausalLM", TEXT | {"hidden_size": 40}, d_head=8),
    "cohere": grouped("cohere", "CohereForCausalLM", narrow=False, use_qk_norm=True, logit_scale=1.0),
    "olmo2": grouped("olmo2", "Olmo2ForCausalLM", narrow=False),
    "stablelm": grouped(
        "stablelm", "StableLmForCausalLM", narrow=False, use_qkv_bias=True, qk_layernorm=True,
        partial_rotary_factor=0.4,
    ),
    "starcoder2": grouped("starcoder2", "Starcoder2ForCausalLM", narrow=False),
    "gpt_oss": grouped(
        "gpt_oss", "GptOssForCausalLM", sliding_window=4, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "bitnet": grouped("bitnet", "BitNetForCausalLM", narrow=False),
    "deepseek_v3": decoder(
        "deepseek_v3", "DeepseekV3ForCausalLM",
        TEXT
        | {"q_lora_rank": 19, "kv_lora_rank": 17, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 23}
        | {"num_key_value_heads": 5, "first_k_dense_replace": 1, "num_mtp_layers": 0},
        d_head=10, d_value=7,
    ),
}  # fmt: skip

SEQ2SEQS = {
    "t5": Recipe(
        "t5",
        "T5ForConditionalGeneration",
        TOKENS
        | {"d_model": 24, "d_kv": 6, "num_heads": 5, "d_ff": 37, "num_layers": 2, "num_decoder_layers": 3}
        | {"relative_attention_num_buckets": 8, "decoder_start_token_id": 0},
        SEQ2SEQ_STACKS,
        *(5, 5, 6, 6),
    ),
    "bart": seq2seq("bart", "BartForConditionalGeneration", max_position_embeddings=47, forced_eos_token_id=2),
    "marian": seq2seq("marian", "MarianMTModel", max_position_embeddings=47, forced_eos_token_id=2),
    "whisper": seq2seq(
        "whisper", "WhisperForConditionalGeneration", inputs="spectrogram", num_mel_bins=11, max_source_positions=13,
        max_target_positions=47, begin_suppress_tokens=None,
    ),
    "speech_to_text": seq2seq(
        "speech_to_text", "Speech2TextForConditionalGeneration", inputs="frames", input_feat_per_channel=11,
        max_source_positions=29, max_target_positions=47, conv_channels=22, conv_kernel_sizes=(3, 3),
    ),
}  # fmt: skip

OTHERS = {
    "vit": vision("vit", "ViTForImageClassification"),
    "deit": vision("deit", "DeiTForImageClassification"),
    "dinov2": vision("dinov2", "Dinov2ForImageClassification", mlp_ratio=3),
    "swin": Recipe(
        "swin",
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 20, "depths": [2, 2], "num_heads": [4, 5], "window_size": 4}
        | {"num_labels": 4},
        {"vision.self": 4},
        *(0, 0, 0, 0),
        inputs="image",
    ),
    "clip": towers("clip", "decoder.causal", {"hidden_act": "quick_gelu"}, projection_dim=17),
    "siglip": towers("siglip", "encoder.self", {"projection_size": 28}),
    "wav2vec2": Recipe(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        TEXT
        | {"conv_dim": (11, 13), "conv_stride": (5, 2), "conv_kernel": (10, 3), "feat_extract_norm": "layer"}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False},
        {"audio.self": 2},
        *(5, 5, 6, 6),
        inputs="wave",
    ),
}

RECIPES = ENCODERS | DECODERS | SEQ2SEQS | OTHERS
