"""How checkpoints name their attention: for each known model type the tensors, the config fields and the stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from headscope.heads import AttentionKind


@dataclass(frozen=True)
class Names:
    """The four projections inside a layer; one name for query, key and value means that they are fused.

    `conv` marks GPT-2's layout, whose weights are stored as [in, out].
    """

    query: str
    key: str
    value: str
    output: str
    conv: bool = False


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Where the configuration keeps the sizes of a tower; names joined by | mean the same, `section` is a nested part.

    Without `kv_heads` every head has its own keys and values; where `kv_required` the architecture's default is
    another number, so the field must be there. Without `head_dim` the width is divided by the heads.
    """

    heads: str
    width: str
    depth: str
    kv_heads: str = ""
    kv_required: bool = False
    head_dim: str = ""
    section: str = ""


@dataclass(frozen=True)
class Tower:
    """One attention module in each layer of one stack; `layers` is the pattern of what stands before the number."""

    stack: str
    kind: AttentionKind
    layers: str
    names: Names
    fields: Fields


class Window(Enum):
    """What a family does with the field `sliding_window`."""

    NONE = auto()
    """It has no windows."""
    ALL = auto()
    """A window in every layer, if the field is a number."""
    SWITCHED = auto()
    """Only if use_sliding_window is true, and then as layer_types says."""
    TYPED = auto()
    """As layer_types says."""
    MODERNBERT = auto()
    """`local_attention` keys around each query, except in every n-th layer."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Model types with the same names; an architecture is a class prefix (by model type) with one of the endings."""

    classes: Mapping[str, str]
    endings: tuple[str, ...]
    towers: tuple[Tower, ...]
    window: Window = Window.NONE
    is_decoder: bool | None = None
    """The value that the configuration's is_decoder must have, where it decides about causality."""


SELF, CAUSAL, CROSS = AttentionKind.SELF, AttentionKind.CAUSAL, AttentionKind.CROSS

TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
ENCODER = ("Model", "ForMaskedLM", "ForPreTraining", "ForMultipleChoice", "ForNextSentencePrediction", *TASKS)
DECODER = ("Model", "ForCausalLM", "LMHeadModel", *TASKS)
BOTH = ("Model", "ForConditionalGeneration", "MTModel", "ForSequenceClassification", "ForQuestionAnswering")
PIXELS = ("Model", "ForImageClassification", "ForMaskedImageModeling", "ForImageClassificationWithTeacher")
SOUNDS = ("Model", "ForCTC", "ForSequenceClassification", "ForAudioClassification", "ForPreTraining", "ForXVector")

BERT_NAMES = Names("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
VIT_NAMES = Names(
    "attention.attention.query", "attention.attention.key", "attention.attention.value", "attention.output.dense"
)


def _projections(module: str, output: str) -> Names:
    return Names(f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj", f"{module}.{output}")


def _fused(module: str, fused: str, output: str) -> Names:
    return Names(f"{module}.{fused}", f"{module}.{fused}", f"{module}.{fused}", f"{module}.{output}")


def _lin(module: str) -> Names:
    return Names(f"{module}.q_lin", f"{module}.k_lin", f"{module}.v_lin", f"{module}.out_lin")


def _t5(module: str) -> Names:
    return Names(f"{module}.q", f"{module}.k", f"{module}.v", f"{module}.o")


PLAIN = Fields(heads="num_attention_heads", width="hidden_size", depth="num_hidden_layers")
SIZED = replace(PLAIN, head_dim="head_dim")
GROUPED = replace(SIZED, kv_heads="num_key_value_heads")
GROUPED_REQUIRED = replace(GROUPED, kv_required=True)
GPT = Fields(heads="n_head|num_attention_heads", width="n_embd|hidden_size", depth="n_layer|num_hidden_layers")
BLOOM = replace(GPT, width="hidden_size|n_embed")
DISTILBERT = Fields(heads="n_heads|num_attention_heads", width="dim|hidden_size", depth="n_layers|num_hidden_layers")
BART_ENCODER = Fields(heads="encoder_attention_heads", width="d_model", depth="encoder_layers")
BART_DECODER = Fields(heads="decoder_attention_heads", width="d_model", depth="decoder_layers")
T5_ENCODER = Fields(heads="num_heads", width="d_model", depth="num_layers", head_dim="d_kv")
T5_DECODER = replace(T5_ENCODER, depth="num_decoder_layers")
CLIP_TEXT = replace(PLAIN, section="text_config")
CLIP_VISION = replace(PLAIN, section="vision_config")

BERT_LAYERS = r"encoder\.layer"
LLAMA_NAMES = _projections("self_attn", "o_proj")
BART_NAMES = _projections("self_attn", "out_proj")
BART_CROSS = _projections("encoder_attn", "out_proj")
BART = (
    Tower("encoder", SELF, r"encoder\.layers", BART_NAMES, BART_ENCODER),
    Tower("decoder", CAUSAL, r"decoder\.layers", BART_NAMES, BART_DECODER),
    Tower("decoder", CROSS, r"decoder\.layers", BART_CROSS, BART_DECODER),
)
T5 = (
    Tower("encoder", SELF, r"encoder\.block", _t5("layer.0.SelfAttention"), T5_ENCODER),
    Tower("decoder", CAUSAL, r"decoder\.block", _t5("layer.0.SelfAttention"), T5_DECODER),
    Tower("decoder", CROSS, r"decoder\.block", _t5("layer.1.EncDecAttention"), T5_DECODER),
)
BERT_SELF = Tower("encoder", SELF, BERT_LAYERS, BERT_NAMES, PLAIN)
BERT_CAUSAL = Tower("decoder", CAUSAL, BERT_LAYERS, BERT_NAMES, PLAIN)
CLIP_LAYERS = r"(?:text_model\.|vision_model\.)?encoder\.layers"
VISION = Tower("vision", SELF, r"vision_model\.encoder\.layers", BART_NAMES, CLIP_VISION)
TEXT_LAYERS = r"text_model\.encoder\.layers"

T5S = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}
BERTS = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"} | {
    "electra": "Electra", "ernie": "Ernie", "data2vec-text": "Data2VecText", "megatron-bert": "MegatronBert",
    "roberta-prelayernorm": "RobertaPreLayerNorm", "esm": "Esm",
}  # fmt: skip
BARTS = {"bart": "Bart", "mbart": "MBart", "pegasus": "Pegasus", "marian": "Marian", "m2m_100": "M2M100"} | {
    "blenderbot": "Blenderbot", "blenderbot-small": "BlenderbotSmall", "plbart": "PLBart", "whisper": "Whisper",
}  # fmt: skip
LLAMAS = {"llama": "Llama", "olmo": "Olmo", "olmo2": "Olmo2", "olmoe": "Olmoe", "granite": "Granite"} | {
    "cohere": "Cohere", "apertus": "Apertus", "arcee": "Arcee", "nemotron": "Nemotron",
}  # fmt: skip
LLAMAS_REQUIRED = {"gemma": "Gemma", "glm": "Glm", "glm4": "Glm4", "seed_oss": "SeedOss", "stablelm": "StableLm"}
MISTRALS = {"mistral": "Mistral", "mixtral": "Mixtral", "starcoder2": "Starcoder2"}
QWENS = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "smollm3": "SmolLM3"}
TYPED_OPTIONAL = {"cohere2": "Cohere2", "olmo3": "Olmo3"}
TYPED_REQUIRED = {"gemma2": "Gemma2", "gemma3_text": "Gemma3Text", "gpt_oss": "GptOss"} | {
    "exaone4": "Exaone4", "ministral": "Ministral",
}  # fmt: skip


def _causal(
    classes: Mapping[str, str], names: Names, fields: Fields, *, layers: str = "layers", window: Window = Window.NONE
) -> Family:
    tower = Tower("decoder", CAUSAL, layers, names, fields)
    return Family(classes=classes, endings=DECODER, towers=(tower,), window=window)


def _family(classes: Mapping[str, str], endings: tuple[str, ...], *towers: Tower) -> Family:
    return Family(classes=classes, endings=endings, towers=towers)


FAMILIES = (
    Family(classes=BERTS, endings=ENCODER, towers=(BERT_SELF,), is_decoder=False),
    Family(classes=BERTS, endings=("LMHeadModel", "ForCausalLM"), towers=(BERT_CAUSAL,), is_decoder=True),
    _family(
        {"distilbert": "DistilBert"},
        ENCODER,
        Tower("encoder", SELF, r"transformer\.layer", _lin("attention"), DISTILBERT),
    ),
    Family(
        classes={"modernbert": "ModernBert"},
        endings=ENCODER,
        towers=(Tower("encoder", SELF, "layers", _fused("attn", "Wqkv", "Wo"), PLAIN),),
        window=Window.MODERNBERT,
    ),
    _causal({"gpt2": "GPT2"}, replace(_fused("attn", "c_attn", "c_proj"), conv=True), GPT, layers="h"),
    _causal({"gptj": "GPTJ"}, _projections("attn", "out_proj"), GPT, layers="h"),
    _causal({"gpt_neox": "GPTNeoX"}, _fused("attention", "query_key_value", "dense"), PLAIN),
    _causal({"bloom": "Bloom"}, _fused("self_attention", "query_key_value", "dense"), BLOOM, layers="h"),
    _causal({"opt": "OPT"}, BART_NAMES, PLAIN, layers=r"decoder\.layers"),
    _causal({"phi": "Phi"}, _projections("self_attn", "dense"), GROUPED),
    _causal({"phi3": "Phi3"}, _fused("self_attn", "qkv_proj", "o_proj"), GROUPED, window=Window.ALL),
    _causal(LLAMAS, LLAMA_NAMES, GROUPED),
    _causal(LLAMAS_REQUIRED, LLAMA_NAMES, GROUPED_REQUIRED),
    _causal(MISTRALS, LLAMA_NAMES, GROUPED_REQUIRED, window=Window.ALL),
    _causal(QWENS, LLAMA_NAMES, GROUPED_REQUIRED, window=Window.SWITCHED),
    _causal(TYPED_OPTIONAL, LLAMA_NAMES, GROUPED, window=Window.TYPED),
    _causal(TYPED_REQUIRED, LLAMA_NAMES, GROUPED_REQUIRED, window=Window.TYPED),
    _family(BARTS, BOTH, *BART),
    _family(T5S, BOTH, *T5),
    _family(T5S, ("EncoderModel",), T5[0]),
    _family(
        {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2"}, PIXELS, Tower("vision", SELF, BERT_LAYERS, VIT_NAMES, SIZED)
    ),
    _family({"audio-spectrogram-transformer": "AST"}, SOUNDS, Tower("audio", SELF, BERT_LAYERS, VIT_NAMES, SIZED)),
    _family(
        {"wav2vec2": "Wav2Vec2", "hubert": "Hubert"},
        SOUNDS,
        Tower("audio", SELF, r"encoder\.layers", _projections("attention", "out_proj"), PLAIN),
    ),
    _family({"clip": "CLIP"}, ("Model",), VISION, Tower("decoder", CAUSAL, TEXT_LAYERS, BART_NAMES, CLIP_TEXT)),
    _family({"siglip": "Siglip"}, ("Model",), VISION, Tower("encoder", SELF, TEXT_LAYERS, BART_NAMES, CLIP_TEXT)),
    _family(
        {"clip_text_model": "CLIPText"},
        ("Model", "ModelWithProjection"),
        Tower("decoder", CAUSAL, CLIP_LAYERS, BART_NAMES, PLAIN),
    ),
    _family(
        {"clip_vision_model": "CLIPVision", "siglip_vision_model": "SiglipVision"},
        ("Model", "ModelWithProjection"),
        Tower("vision", SELF, CLIP_LAYERS, BART_NAMES, PLAIN),
    ),
    _family({"siglip_text_model": "SiglipText"}, ("Model",), Tower("encoder", SELF, CLIP_LAYERS, BART_NAMES, PLAIN)),
)
"""Only model types whose checkpoints were compared with the loaded model; all others must be loaded."""


def family(model_type: object, architecture: object, is_decoder: object) -> Family | None:
    """The family of a checkpoint's model_type, first architecture and is_decoder, or None if it is not known."""
    for known in FAMILIES:
        prefix = known.classes.get(model_type) if isinstance(model_type, str) else None
        named = prefix is not None and any(architecture == prefix + ending for ending in known.endings)
        if named and known.is_decoder in (None, is_decoder):
            return known
    return None
