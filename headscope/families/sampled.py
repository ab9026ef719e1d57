"""YOSO samples keys by hashing, with the probability that a query and a key fall into one bucket."""

from headscope.families import Kind

KIND = Kind(
    classes=("YosoSelfAttention",),
    instead="hashing stands in for a softmax",
    example="yoso",
    sizes={
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 32,
    },
)
