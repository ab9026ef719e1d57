"""Outlines against the sample checkpoints, against what tiny models do when they run, and costs worked by hand."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification
from transformers.modeling_utils import AttentionInterface

from headscope.cost import site_kv_values, site_macs
from headscope.headers import TensorInfo, check_config, check_sizes, read_config, read_headers
from headscope.heads import AttentionKind
from headscope.outline import outline

SAMPLES = Path(__file__).parents[1] / "sample_inputs"
SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 20, "vocab_size": 50,
    "n_embd": 32, "n_head": 4, "n_layer": 3, "dim": 32, "n_heads": 4, "n_layers": 3, "hidden_dim": 20, "d_model": 32,
    "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 8,
    "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 2, "d_ff": 20,
    "d_kv": 5, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "embedding_size": 32,
    "word_embed_proj_dim": 32, "ffn_dim": 20, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "decoder_start_token_id": 1, "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "conv_dim": (8, 8), "conv_stride": (2, 2),
    "conv_kernel": (3, 3), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "image_size": 8,
    "patch_size": 4, "rotary_dim": 4, "max_source_positions": 8, "max_target_positions": 16, "num_mel_bins": 8,
    "max_length": 24, "pool_type": "mean", "projection_dim": 12,
    "local_attention": 4, "sliding_window": 5,
}  # fmt: skip
TOWER = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
TEXT_SELF = "bert roberta camembert xlm-roberta electra ernie data2vec-text megatron-bert roberta-prelayernorm esm"
TEXT_CAUSAL = (
    "gpt2 gptj gpt_neox bloom opt phi phi3 llama olmo olmo2 olmoe granite cohere apertus arcee nemotron gemma glm glm4 "
    "seed_oss stablelm mistral mixtral starcoder2 qwen2 qwen3 qwen2_moe qwen3_moe smollm3 cohere2 olmo3 gemma2 "
    "gemma3_text gpt_oss exaone4 ministral clip_text_model"
)
PAIRS = "bart mbart pegasus marian m2m_100 blenderbot blenderbot-small plbart whisper t5 mt5 umt5"
TYPES = f"{TEXT_SELF} distilbert modernbert {TEXT_CAUSAL} {PAIRS} clip"
OTHERS = "vit deit dinov2 audio-spectrogram-transformer wav2vec2 hubert clip_vision_model"


def sample(name):
    config, tensors = read_config(SAMPLES / name), read_headers(SAMPLES / name)
    check_config(config)
    check_sizes(config, tensors)
    return config, tensors


def tiny(model_type, tmp_path, auto=AutoModel, **changes):
    """A random model of this type, saved, with what its folder says."""
    torch.manual_seed(7)
    made = CONFIG_MAPPING[model_type]
    if model_type in ("clip", "siglip"):
        part = {name: SIZES[name] for name in TOWER}
        vision = part | {"num_hidden_layers": 2, "image_size": 8, "patch_size": 4, "vision_use_head": False}
        config = made(text_config=part | {"vocab_size": 50}, vision_config=vision | changes)
    else:
        known = made().to_dict()
        config = made(**{name: value for name, value in SIZES.items() if name in known} | changes)
    model = auto.from_config(config).eval()
    model.save_pretrained(tmp_path)
    loaded = read_config(tmp_path)
    check_config(loaded)
    tensors = read_headers(tmp_path)
    check_sizes(loaded, tensors)
    return model, loaded, tensors


def inputs(model, tokens):
    made = {"input_ids": tokens, "pixel_values": torch.randn(1, 3, 8, 8)}
    made["input_values"] = torch.randn(1, 400)
    made["input_features"] = torch.randn(1, 8, 16)
    if type(model).__name__ == "ASTModel":
        made["input_values"] = torch.randn(1, 24, 8)
    names = [model.main_input_name] + ["pixel_values"] * (model.config.model_type in ("clip", "siglip"))
    chosen = {name: made[name] for name in names}
    if model.config.is_encoder_decoder:
        chosen["decoder_input_ids"] = tokens
    return chosen


def observed(model, monkeypatch):
    """(query heads, key/value heads, head size, window) of each attention call in one forward pass."""
    calls = []
    stock = AttentionInterface.get_interface

    def spying(self, *args):
        function = stock(self, *args)

        def spy(module, query, key, value, *rest, **named):
            calls.append((query.shape[1], key.shape[1], query.shape[-1], named.get("sliding_window")))
            return function(module, query, key, value, *rest, **named)

        return spy

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(AttentionInterface, "get_interface", spying)
        model(**inputs(model, torch.arange(3, 13)[None]))
    return calls


def looks_ahead(model):
    """Whether the first position's output depends on the last token."""
    tokens = torch.arange(3, 13)[None]
    other = tokens.clone()
    other[0, -1] = 40
    with torch.no_grad():
        outputs = [model(input_ids=each).last_hidden_state[0, 0] for each in (tokens, other)]
    return not torch.equal(*outputs)


@pytest.mark.parametrize("model_type", f"{TYPES} {OTHERS}".split())
def test_outline_is_what_a_forward_pass_shows(model_type, tmp_path, monkeypatch):
    model, config, tensors = tiny(model_type, tmp_path)
    sites = outline(config, tensors)
    assert sites is not None
    calls = observed(model, monkeypatch)
    if model_type not in ("bloom", "megatron-bert"):  # these do not call the attention interface
        found = sorted((site.n_heads, site.n_kv_heads, site.d_head) for site in sites)
        assert found == sorted(call[:3] for call in calls)
    if model_type in f"{TEXT_SELF} distilbert modernbert {TEXT_CAUSAL}".split():
        ahead = looks_ahead(model)
        assert {site.id.kind for site in sites} == {AttentionKind.SELF if ahead else AttentionKind.CAUSAL}
        assert {site.id.stack for site in sites} == {"encoder" if ahead else "decoder"}
        windows = [window and (2 * window - 1 if ahead else window) for *_, window in calls]
        assert not calls or [site.window for site in sites] == windows
    assert sum(site.parameters for site in sites) == projections(model)


def projections(model):
    """Numbers in all projections of a loaded model's attention, without the outputs' biases."""
    return sum(value.numel() for name, value in model.named_parameters() if projection(name.split(".")))


def projection(parts):
    inside = any("attention" in part.lower() or "attn" in part.lower() for part in parts[:-1])
    if not inside or "norm" in parts[-2].lower() or parts[-2] in ("ln", "relative_attention_bias"):
        return False
    output = parts[-2] in ("o", "o_proj", "out_proj", "out_lin", "c_proj", "Wo", "dense")
    return parts[-1] == "weight" or (parts[-1] == "bias" and not output)


def labels(sites):
    return [str(site.id) for site in sites]


def test_samples():
    """All numbers worked by hand from the sizes in the samples' configurations."""
    bert = outline(*sample("sentiment-minilm"))
    assert labels(bert) == [f"encoder.self.{layer}" for layer in range(6)]
    # a head of 384/12 = 32: four slices of 384·32 = 12288, three biases of 32
    assert {site.parameters_per_head for site in bert} == {(4 * 12288 + 96,) * 12}
    llama = outline(*sample("llama-gqa-web"))
    assert labels(llama) == [f"decoder.causal.{layer}" for layer in range(4)]
    # q and o: 2·192·32 = 12288 each head; k and v as much again at every second head
    assert {site.parameters_per_head for site in llama} == {(24576, 12288) * 4}
    # 192·(8·32 + 4·32 + 4·32) + 8·32·192 + 100·8·64 = 98304 + 49152 + 51200
    assert [site_macs(site, 100) for site in llama] == [198656] * 4
    t5 = outline(*sample("t5-g2p"))
    decoder = [f"decoder.{kind}.{layer}" for kind in ("causal", "cross") for layer in range(3)]
    assert labels(t5) == [f"encoder.self.{layer}" for layer in range(3)] + decoder
    assert {site.parameters_per_head for site in t5} == {(4 * 128 * 24,) * 8}
    assert [site_kv_values(site) for site in t5] == [0] * 3 + [8 * 48] * 6
    vit = outline(*sample("vit-digits"))
    assert labels(vit) == [f"vision.self.{layer}" for layer in range(4)]
    assert {site.parameters_per_head for site in vit} == {(4 * 64 * 8 + 24,) * 8}


def test_towers_are_named_by_what_they_read(tmp_path):
    _, config, tensors = tiny("clip", tmp_path)
    text = [f"decoder.causal.{layer}" for layer in range(3)]
    assert labels(outline(config, tensors)) == ["vision.self.0", "vision.self.1", *text]
    _, config, tensors = tiny("siglip", tmp_path)
    text = [f"encoder.self.{layer}" for layer in range(3)]
    assert labels(outline(config, tensors)) == ["vision.self.0", "vision.self.1", *text]


def test_pooling_attention_of_siglip_needs_the_model(tmp_path):
    _, config, tensors = tiny("siglip", tmp_path, vision_use_head=True)
    assert outline(config, tensors) is None


def test_architectures_with_a_head(tmp_path):
    _, config, tensors = tiny("gpt2", tmp_path, AutoModelForCausalLM)
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert labels(outline(config, tensors)) == ["decoder.causal.0", "decoder.causal.1", "decoder.causal.2"]
    _, config, tensors = tiny("bert", tmp_path, AutoModelForCausalLM, is_decoder=True)
    assert labels(outline(config, tensors)) == ["decoder.causal.0", "decoder.causal.1", "decoder.causal.2"]
    assert outline(config | {"is_decoder": False}, tensors) is None
    _, config, tensors = tiny("dinov2", tmp_path, AutoModelForImageClassification)
    assert labels(outline(config, tensors)) == ["vision.self.0", "vision.self.1", "vision.self.2"]


def test_old_buffers_are_no_parameters():
    config, tensors = sample("llama-gqa-web")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert outline(config, {**tensors, name: TensorInfo(name, "F32", (16,), "x")}) == outline(config, tensors)


@pytest.mark.parametrize("model_type", ["albert", "deberta-v2", "qwen3_next", "mamba", "falcon", None, "unheard-of"])
def test_model_types_that_must_be_loaded(model_type):
    config, tensors = sample("llama-gqa-web")
    assert outline(config | {"model_type": model_type}, tensors) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaBiModel"]}, {"architectures": None}, {"architectures": []}, {"architectures": [3]},
        {"architectures": ["LlamaModel", "LlamaForCausalLM"]}, {"model_type": "mistral"}, {"model_type": ["llama"]},
        {"num_attention_heads": 16}, {"num_attention_heads": None}, {"num_key_value_heads": 8}, {"head_dim": 16},
        {"num_key_value_heads": None}, {"head_dim": None}, {"hidden_size": 256}, {"num_hidden_layers": 3},
        {"num_hidden_layers": 5}, {"num_hidden_layers": True}, {"quantization_config": {"bits": 4}},
        {"auto_map": {"AutoModel": "x.Y"}}, {"is_causal": False}, {"layer_types": ["linear_attention"] * 4},
        {"layer_types": ["full_attention"] * 3}, {"layer_types": 3}, {"sliding_window": 16},
        {"pruned_heads": {"0": [1]}}, {"add_cross_attention": True},
    ],
)  # fmt: skip
def test_any_doubt_about_the_configuration(changes):
    config, tensors = sample("llama-gqa-web")
    assert outline(config, tensors) is not None
    assert outline(config | changes, tensors) is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.1.self_attn.k_proj.weight", None),
        ("model.layers.1.self_attn.k_proj.weight", {"shape": (64, 192)}),
        ("model.layers.1.self_attn.o_proj.weight", {"shape": (256, 192)}),
        ("model.layers.1.self_attn.q_proj.weight", {"dtype": "I8"}),
        ("model.layers.1.self_attn.q_proj.bias", {"shape": (8,)}),
        ("model.layers.1.self_attn.q_norm.weight", {"shape": (8, 32)}),
        ("model.layers.1.self_attn.gate_proj.weight", {}),
        ("model.layers.1.self_attn.lambda_q", {}),
        ("model.layers.4.self_attn.q_proj.weight", {}),
        ("model.layers.01.self_attn.q_proj.weight", {}),
        ("draft.layers.0.self_attn.q_proj.weight", {}),
        ("model.layers.0.cross_attention.query.weight", {}),
        ("model." + "x" * 600, {}),
    ],
)
def test_any_doubt_about_a_tensor(name, change):
    config, tensors = sample("llama-gqa-web")
    altered = {key: info for key, info in tensors.items() if key != name}
    if change is not None:
        altered[name] = dataclasses.replace(TensorInfo(name, "F32", (256, 192), "x"), **change)
    assert outline(config, altered) is None


def test_fields_of_one_meaning_that_disagree(tmp_path):
    _, config, tensors = tiny("gpt2", tmp_path)
    assert outline(config, tensors) is not None
    assert outline(config | {"num_attention_heads": 4}, tensors) == outline(config, tensors)
    assert outline(config | {"num_attention_heads": 8}, tensors) is None


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 7}, (7, 7, 7)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": False}, (None, None, None)),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7, 7)),
        ("gemma2", {"sliding_window": 7}, (7, None, 7)),
        ("modernbert", {"local_attention": 6}, (None, 7, 7)),
    ],
)
def test_windows_by_layer(model_type, changes, windows, tmp_path):
    _, config, tensors = tiny(model_type, tmp_path, **changes)
    assert tuple(site.window for site in outline(config, tensors)) == windows


def test_windows_of_an_old_modernbert(tmp_path):
    _, config, tensors = tiny("modernbert", tmp_path, local_attention=6)
    old = {name: value for name, value in config.items() if name != "layer_types"}
    sites = outline(old | {"global_attn_every_n_layers": 2}, tensors)
    assert [site.window for site in sites] == [None, 7, None]
    assert outline(old | {"global_attn_every_n_layers": None}, tensors) is None


def test_windows_without_their_layers_need_the_model(tmp_path):
    _, config, tensors = tiny("gemma2", tmp_path, sliding_window=7)
    assert outline({name: value for name, value in config.items() if name != "layer_types"}, tensors) is None
