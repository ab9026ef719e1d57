"""The columns of `evaluate`'s report: how well a model does, how far from the first it is, its cost and speed."""

from __future__ import annotations

from headscope.columns import Column

COLUMNS = (
    Column("model", "name", "the model as given", untrusted=True),
    Column("loss", "nats", "mean task loss over examples (squared error for regression); empty without labels"),
    Column("metric", "", "the metric that metric_name says; empty where none is defined"),
    Column(
        "metric_name",
        "name",
        "accuracy; f1 (macro) where one class has more than 80 % of the labels, or an example several labels; "
        "perplexity and token-accuracy pool the tokens of all examples; exact-match; pearson, r2 or mse",
    ),
    Column(
        "divergence",
        "nats",
        "mean over examples, and over their predicted positions, of KL(first model || this one); embeddings: 1 - cos",
    ),
    Column("parameters", "count", "parameters of the model, tied ones once"),
    Column("macs_per_token", "count", "multiply-accumulates of all attention for each token at --tokens"),
    Column("kv_bytes_per_token", "bytes", "what the KV cache keeps for each token, as the checkpoint stores numbers"),
    Column("disk_bytes", "bytes", "size of the files with the weights that are loaded"),
    Column("examples", "count", "examples that the model was judged on"),
)
BATCH_SIZE = Column("batch_size", "count", "examples at once, each of --tokens tokens")
SPEED_COLUMNS = (
    Column("latency_ms", "ms", "median time of one forward pass; the models take turns"),
    Column("latency_iqr_ms", "ms", "distance between the quartiles of the times"),
    Column("throughput", "1/s", "examples a second at the median"),
    Column("speedup", "1", "the first model's latency over this one's"),
    Column("speedup_predicted", "1", "the first model's multiply-accumulates of a forward pass over this one's"),
)


def columns_of(*, speed: bool) -> tuple[Column, ...]:
    """The columns in order, with those of times where they are asked for."""
    return (COLUMNS[0], BATCH_SIZE, *COLUMNS[1:], *SPEED_COLUMNS) if speed else COLUMNS
