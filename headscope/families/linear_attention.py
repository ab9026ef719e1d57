"""Linear attention: delta rules, decays and feature maps in place of a softmax."""

from headscope.families import Kind

KIND = Kind(
    classes=("GatedDeltaNet", "LinearAttention", "LightningAttention", "KimiDeltaAttention"),
    names=("linear_attn",),
    instead="linear attention adds up keys and values without a softmax",
    example="minimax",
    sizes={
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 32,
        "num_local_experts": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
)
