"""What attention costs: parameters of each head, multiply-accumulates and KV-cache values a token, from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headscope.heads import SiteId


@dataclass(frozen=True, kw_only=True)
class SiteShape:
    """The sizes of one site: all that its cost depends on.

    `d_model` is the width of the stream the queries come from, `d_source` that of keys and values (0: the same);
    `parameters_per_head` counts k/v slices at the first head of each group; `window` is the number of keys that a
    query sees at most; `keeps_cache` says whether keys and values stay for the next token. `n_computed` and
    `n_kv_computed` are the heads that a module runs on which cannot count fewer (0: those that there are).
    """

    id: SiteId
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    d_model: int
    parameters_per_head: tuple[int, ...]
    keeps_cache: bool
    d_source: int = 0
    window: int | None = None
    n_computed: int = 0
    n_kv_computed: int = 0

    @property
    def parameters(self) -> int:
        """Parameters of all heads of the site, without the output projection's bias, which belongs to no head."""
        return sum(self.parameters_per_head)


def parameters_per_head(
    n_heads: int,
    n_kv_heads: int,
    *,
    d_in: int,
    d_head: int,
    d_value: int,
    d_out: int,
    query_bias: bool,
    key_bias: bool,
    value_bias: bool,
    d_source: int = 0,
) -> tuple[int, ...]:
    """Parameters of each query head: its q and o slices, and the k/v slices of its group at the group's first head.

    One head of BERT-base: `parameters_per_head(1, 1, d_in=768, d_head=64, ...)` = 4·768·64 + 3·64 = 196800.
    """
    source = d_source or d_in
    own = d_in * d_head + d_value * d_out + (d_head if query_bias else 0)
    shared = source * (d_head + d_value) + (d_head if key_bias else 0) + (d_value if value_bias else 0)
    group = n_heads // n_kv_heads
    return tuple(own + (shared if head % group == 0 else 0) for head in range(n_heads))


def site_macs(shape: SiteShape, tokens: int) -> int:
    """Multiply-accumulates a token at `tokens` tokens: projections, scores and mixing; causality is not discounted.

    `D·H·d + S·K·(d + dv) + H·dv·D + min(T, W)·H·(d + dv)` with `S` the width of the keys' source. Cross-attention is
    counted with as many source tokens as query tokens.
    """
    source = shape.d_source or shape.d_model
    seen = tokens if shape.window is None else min(tokens, shape.window)
    both = shape.d_head + shape.d_value
    heads, kv_heads = shape.n_computed or shape.n_heads, shape.n_kv_computed or shape.n_kv_heads
    queries = shape.d_model * heads * shape.d_head
    keys_and_values = source * kv_heads * both
    output = heads * shape.d_value * shape.d_model
    return queries + keys_and_values + output + seen * heads * both


def site_kv_values(shape: SiteShape) -> int:
    """Numbers that the KV cache keeps for each token; 0 where nothing is generated."""
    return (shape.n_kv_computed or shape.n_kv_heads) * (shape.d_head + shape.d_value) if shape.keeps_cache else 0


def model_summary(
    shapes: Sequence[SiteShape], total_parameters: int, tokens: int, *, kv_bytes_per_value: int
) -> dict[str, str | int | float]:
    """The counts and costs of all sites together, under the column names of `inspect --by model`."""
    attention_parameters = sum(shape.parameters for shape in shapes)
    sizes = list(dict.fromkeys(shape.d_head for shape in shapes))
    return {
        "sites": len(shapes),
        "heads": sum(shape.n_heads for shape in shapes),
        "kv_heads": sum(shape.n_kv_heads for shape in shapes),
        "head_dim": sizes[0] if len(sizes) == 1 else "/".join(str(size) for size in sizes),
        "attention": _sharing(shapes),
        "attention_parameters": attention_parameters,
        "attention_share": attention_parameters / total_parameters if total_parameters else 0.0,
        "macs_per_token": sum(site_macs(shape, tokens) for shape in shapes),
        "kv_bytes_per_token": sum(site_kv_values(shape) for shape in shapes) * kv_bytes_per_value,
    }


def _sharing(shapes: Sequence[SiteShape]) -> str:
    if all(shape.n_kv_heads == shape.n_heads for shape in shapes):
        return "MHA"
    return "MQA" if all(shape.n_kv_heads == 1 < shape.n_heads for shape in shapes) else "GQA"
