"""What each head attends to: entropy, distance, mass on named positions, and the role that these add up to.

Every column is a mean over a text's real queries first and then over texts, so that long texts weigh no more than
short ones, and padding nothing (definitions: Attention maps).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.columns import Column
from headscope.heads import AttentionKind, Site
from headscope.scores import Evidence, Means, Need, RowBlock, Score
from headscope.shapes import Float

MASSES = ("previous", "self", "next", "first", "special", "duplicate", "induction")
ROLES = (*MASSES, "local", "broad", "mixed")
NEAR = 3
"""Positions on either side that count as local."""
_OFFSETS = {"previous": -1, "self": 0, "next": 1}

Sums = dict[str, Tensor]


def rows(block: RowBlock) -> Sums:
    """Sums over the block's real queries, `[sequence head]` each in float64, and how many queries they are."""
    seen = block.visible.sum(dim=-1)  # [sequence query]
    several = seen > 1
    ones = torch.ones(block.rows.shape[:3], device=block.rows.device)
    mass = block.rows.sum(dim=-1)  # below one where a sink takes the rest
    entropy, largest = _entropy(block, mass)
    ratio = entropy / seen.clamp_min(2).log().unsqueeze(1)
    sums = {
        "queries": _total(ones, block.real),
        "choices": _total(ones, block.real & several),
        "entropy": _total(entropy, block.real),
        "entropy_ratio": _total(ratio, block.real & several),
        "confidence": _total(largest, block.real),
    }
    for name, (on, uniform) in _masses(block, seen).items():
        sums[name] = _total(on, block.real)
        sums[f"{name}_uniform"] = _total(uniform.unsqueeze(1).expand(-1, on.shape[1], -1), block.real)
    if block.site.id.kind is not AttentionKind.CROSS:
        sums["distance"] = _total(_distance(block, mass), block.real)
    return sums


def _total(values: Float[Tensor, "sequence head query"], counted: Tensor) -> Float[Tensor, "sequence head"]:
    return (values.double() * counted.unsqueeze(1)).sum(dim=-1)


def _entropy(block: RowBlock, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy of each query's attention and its largest value, `[sequence head query]`.

    With the logits at hand no logarithm of a map is needed: log A = logits + log max A.
    """
    rows = block.rows
    largest = rows.amax(dim=-1)
    tiny = torch.finfo(rows.dtype).tiny
    if block.logits is None:
        return -(rows * rows.clamp_min(tiny).log_()).sum(dim=-1), largest
    spread = torch.einsum("shqk,shqk->shq", block.logits.to(rows.dtype), rows)  # s: sequence
    return -largest.clamp_min(tiny).log() * mass - spread, largest


def _distance(block: RowBlock, mass: Tensor) -> Float[Tensor, "sequence head query"]:
    """Σ_s A·|t − s|; where no key lies ahead, t·Σ_s A − Σ_s A·s, which needs no table."""
    rows = block.rows
    keys = torch.arange(rows.shape[-1], device=rows.device, dtype=rows.dtype)
    queries = block.positions.to(rows.dtype)
    if block.site.id.kind is AttentionKind.CAUSAL:
        return queries * mass - rows @ keys
    return torch.einsum("shqk,qk->shq", rows, (queries[:, None] - keys).abs())  # s: sequence


def _masses(block: RowBlock, seen: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mass on named keys `[sequence head query]`, and what uniform attention would put there `[sequence query]`."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    rows, share = block.rows, 1.0 / seen.clamp_min(1)  # uniform attention on each visible key
    visible = block.visible.expand(rows.shape[0], -1, -1)
    if block.site.id.kind is not AttentionKind.CROSS:
        near = {offset: _beside(rows, block.positions, offset) for offset in range(-NEAR, NEAR + 1)}
        even = {offset: _beside(visible.unsqueeze(1), block.positions, offset)[:, 0] * share for offset in near}
        found |= {name: (near[offset], even[offset]) for name, offset in _OFFSETS.items()}
        found["local"] = (sum(near.values(), torch.zeros(())), sum(even.values(), torch.zeros(())))
    found["first"] = (rows[..., 0], visible[..., 0] * share)
    if block.special is not None:
        found["special"] = _columns(block.special, rows, visible, share)
    if block.query_tokens is not None and block.key_tokens is not None:
        for name, table in _repeats(block).items():
            found[name] = _on(table & visible, rows, share)
    return found


def _columns(chosen: Tensor, rows: Tensor, visible: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Mass on chosen keys `[sequence key]` of every query, and its uniform value."""
    if len(chosen) == 1:
        places = chosen[0].nonzero()[:, 0]
        return rows[..., places].sum(dim=-1), visible[..., places].sum(dim=-1) * share
    table = chosen.to(rows.dtype)
    return torch.einsum("shqk,sk->shq", rows, table), (visible & chosen[:, None, :]).sum(dim=-1) * share  # s: sequence


def _on(table: Tensor, rows: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Mass on the keys of a table `[sequence query key]`, and its uniform value; sparse tables are looked up."""
    count = table.sum(dim=-1)
    if int(count.sum()) * 8 > table.numel():
        mass = torch.einsum("shqk,sqk->shq", rows, table.to(rows.dtype))  # s: sequence
        return mass, count * share
    sequence, query, key = table.nonzero(as_tuple=True)
    flat = torch.zeros(table.shape[0] * table.shape[1], rows.shape[1], dtype=rows.dtype, device=rows.device)
    flat.index_add_(0, sequence * table.shape[1] + query, rows[sequence, :, query, key])
    return flat.view(table.shape[0], table.shape[1], -1).transpose(1, 2), count * share


def _beside(rows: Tensor, positions: Tensor, offset: int) -> Tensor:
    """Mass on the key `offset` positions from each query, 0 where there is none."""
    target = positions + offset
    inside = (target >= 0) & (target < rows.shape[-1])
    index = target.clamp(0, rows.shape[-1] - 1)
    picked = rows.gather(-1, index.view(1, 1, -1, 1).expand(*rows.shape[:3], 1)).squeeze(-1)
    return picked * inside


def _repeats(block: RowBlock) -> dict[str, Tensor]:
    """Earlier keys that hold the query's token, and keys right after such a one, `[sequence query key]`."""
    assert block.query_tokens is not None and block.key_tokens is not None
    keys = torch.arange(block.key_tokens.shape[1], device=block.rows.device)
    same = block.query_tokens[:, :, None] == block.key_tokens[:, None, :]
    earlier = same & (keys < block.positions[:, None])
    after = torch.zeros_like(earlier)
    after[..., 1:] = earlier[..., :-1]
    return {"duplicate": earlier, "induction": after}


def moments(evidence: Evidence) -> dict[str, Tensor]:
    """Means over each text's queries, `[batch head]`; NaN where a text has none that counts."""
    sums = evidence.rows
    assert sums is not None
    found = {name: total / sums["queries"] for name, total in sums.items() if name not in ("queries", "choices")}
    found["entropy_ratio"] = sums["entropy_ratio"] / sums["choices"]
    return found


def finish(site: Site, means: Means) -> dict[str, Tensor]:
    """The columns, `[head]` each; the role as its place in `ROLES`."""
    missing = torch.full((site.n_heads,), torch.nan, dtype=torch.float64)
    names = ["entropy", "entropy_ratio", "distance", "confidence"]
    names += [name for mass in MASSES for name in (mass, f"{mass}_uniform")]
    found = {name: means.values.get(name, missing) for name in names}
    local = means.values.get("local", missing), means.values.get("local_uniform", missing)
    found["role"] = _role(found, *local)
    return found


def _role(found: dict[str, Tensor], local: Tensor, local_uniform: Tensor) -> Tensor:
    """The first mass of at least one half that is at least three times its uniform value, else broad, else mixed."""
    role = torch.full_like(local, float(ROLES.index("mixed")))
    role[found["entropy_ratio"] > 0.9] = ROLES.index("broad")
    role[(local >= 0.9) & (local >= 3 * local_uniform)] = ROLES.index("local")
    for name in reversed(MASSES):
        role[(found[name] >= 0.5) & (found[name] >= 3 * found[f"{name}_uniform"])] = ROLES.index(name)
    return role


def _mass_columns() -> tuple[Column, ...]:
    meanings = {
        "previous": ("the token before the query", "Voita et al. 2019, Analyzing Multi-Head Self-Attention"),
        "self": ("the query's own token", ""),
        "next": ("the token after the query", "Clark et al. 2019, What Does BERT Look At?"),
        "first": ("the first real token", "Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks"),
        "special": ("special tokens of the tokenizer", "Clark et al. 2019, What Does BERT Look At?"),
        "duplicate": (
            "earlier positions that hold the query's token",
            "Wang et al. 2023, Interpretability in the Wild",
        ),
        "induction": (
            "positions right after an earlier one with the query's token",
            "Olsson et al. 2022, In-context Learning and Induction Heads",
        ),
    }
    columns: list[Column] = []
    for name in MASSES:
        meaning, source = meanings[name]
        columns.append(Column(name, "probability", f"mean attention on {meaning}", source))
        columns.append(
            Column(f"{name}_uniform", "probability", f"{name} if attention were uniform over the visible keys")
        )
    return tuple(columns)


SCORE = Score(
    title="attention",
    columns=(
        Column("entropy", "nats", "mean entropy of a query's attention"),
        Column(
            "entropy_ratio", "1", "entropy over the log of the number of visible keys; queries with one key left out"
        ),
        Column("distance", "tokens", "mean of Σ_s A·|t − s|; self and causal attention only"),
        Column("confidence", "probability", "mean of the largest attention of a query", "Voita et al. 2019"),
        *_mass_columns(),
        Column(
            "role",
            "name",
            "the first of the masses that is at least 0.5 and three times its uniform value; local: 90 % within ±3; "
            "broad: entropy_ratio above 0.9; else mixed",
            labels=ROLES,
        ),
    ),
    needs=frozenset({Need.ROWS}),
    moments=moments,
    finish=finish,
    rows=rows,
)
