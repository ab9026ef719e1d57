"""The sample of the census that the default tests run: one model type for each structure of attention."""

from __future__ import annotations

LANGUAGE = (
    *("bert", "albert", "distilbert", "deberta", "deberta-v2", "modernbert", "funnel", "mpnet", "xlnet", "squeezebert"),
    *("gpt2", "gpt_neo", "gptj", "gpt_neox", "gpt_bigcode", "bloom", "mpt", "falcon", "opt", "ctrl", "codegen"),
    *("llama", "gemma2", "gemma3n_text", "phi3", "cohere2", "olmo2", "bitnet", "diffllama", "qwen3_next", "gpt_oss"),
    *("deepseek_v3", "mixtral", "jamba", "mamba2", "zamba"),
)
"""Decoders and encoders of text: separate and fused projections, groups, sinks, gates, latent projections, mixers."""
SENSES = (
    *("t5", "bart", "pegasus_x", "longt5", "led", "whisper", "speech_to_text", "wav2vec2", "wavlm", "hubert"),
    *("vit", "beit", "dinov2", "swin", "swinv2", "segformer", "mobilevit", "timesformer", "vivit", "detr", "sam"),
    *("clip", "siglip", "blip", "qwen2_5_vl", "llava", "mllama", "paligemma", "idefics3", "perceiver"),
    *("m2m_100", "time_series_transformer", "patchtst", "decision_transformer", "layoutlmv3"),
)
"""Pairs of an encoder and a decoder, and models of sounds, images, several senses, series and actions."""
LONG = frozenset(
    ("pegasus_x", "longt5", "led", "swinv2", "segformer", "mobilevit", "detr", "sam", "qwen2_5_vl", "mllama")
)
"""Those of them that take more than two seconds and stand beside others of their structure: in the slow run only."""
