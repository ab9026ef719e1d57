"""Recurrences: gated linear recurrent units, short convolutions and the receptance of RWKV."""

from headscope.families import Kind

KIND = Kind(
    classes=("RecurrentBlock", "RwkvSelfAttention", "xLSTMLayer", "xLSTMBlock", "ShortConv"),
    names=("temporal_block", "rwkv"),
    instead="a recurrence or short convolution passes tokens on",
    example="rwkv",
    sizes={"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32},
)
