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
    precise = torch.promote_types(block.rows.dtype, torch.float32)
    seen = block.visible.sum(dim=-1).to(precise)  # [sequence query]
    several = (seen > 1).unsqueeze(1)
    mass, entropy, largest, mean_key = _spread(block)
    ratio = entropy / seen.clamp_min(2).log().unsqueeze(1)
    each = {"queries": torch.ones_like(mass), "choices": several, "entropy": entropy, "confidence": largest}
    each["entropy_ratio"] = torch.where(several, ratio, 0)
    for name, (on, uniform) in _masses(block, seen).items():
        each |= {name: on, f"{name}_uniform": uniform.unsqueeze(1)}
    if block.site.id.kind is not AttentionKind.CROSS:
        each["distance"] = _distance(block, mass, mean_key)
    table = torch.stack([values.expand(mass.shape).double() for values in each.values()])  # [name sequence head query]
    return dict(zip(each, (table * block.real.unsqueeze(1)).sum(dim=-1), strict=True))


def _spread(block: RowBlock) -> tuple[Tensor, ...]:
    """Mass of each query's attention (below one where a sink takes the rest), entropy, largest value and Σ_s A·s.

    `[sequence head query]` each. Heads are read one after another, so that a head's rows stay in the processor's cache.
    With the logits at hand no logarithm of a map is needed: log A = logits + log max A.
    """
    tiny = torch.finfo(block.rows.dtype).tiny
    found: list[tuple[Tensor, ...]] = []
    keys = torch.arange(block.rows.shape[-1], device=block.rows.device, dtype=block.rows.dtype)
    for head in range(block.rows.shape[1]):
        rows = block.rows[:, head]
        mass, largest = rows.sum(dim=-1), rows.amax(dim=-1)
        if block.logits is None:
            entropy = -(rows * rows.clamp_min(tiny).log_()).sum(dim=-1)
        else:
            logits = block.logits[:, head].to(rows.dtype)
            entropy = -largest.clamp_min(tiny).log() * mass - (logits * rows).sum(dim=-1)
        found.append((mass, entropy, largest, rows @ keys))
    return tuple(torch.stack(values, dim=1) for values in zip(*found, strict=True))


def _distance(block: RowBlock, mass: Tensor, mean_key: Tensor) -> Float[Tensor, "sequence head query"]:
    """Σ_s A·|t − s|; where no key lies ahead, t·Σ_s A − Σ_s A·s, which needs no table."""
    rows = block.rows
    keys = torch.arange(rows.shape[-1], device=rows.device, dtype=rows.dtype)
    queries = block.positions.to(rows.dtype)
    if block.site.id.kind is AttentionKind.CAUSAL:
        return queries * mass - mean_key
    return torch.einsum("shqk,qk->shq", rows, (queries[:, None] - keys).abs())  # s: sequence


def _masses(block: RowBlock, seen: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mass on named keys `[sequence head query]`, and what uniform attention would put there `[sequence query]`."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    rows, share = block.rows, 1.0 / seen.clamp_min(1)  # uniform attention on each visible key
    visible = block.visible.expand(rows.shape[0], -1, -1)
    if block.site.id.kind is not AttentionKind.CROSS:
        near = _near(rows, block.positions)  # [sequence head query offset]
        even = _near(visible.unsqueeze(1), block.positions)[:, 0] * share.unsqueeze(-1)
        for name, offset in _OFFSETS.items():
            found[name] = near[..., NEAR + offset], even[..., NEAR + offset]
        found["local"] = near.sum(dim=-1), even.sum(dim=-1)
    found["first"] = (rows[..., 0], visible[..., 0] * share)
    if block.special is not None:
        found["special"] = _columns(block.special, rows, visible, share)
    if block.query_tokens is not None and block.key_tokens is not None:
        same = block.query_tokens[:, :, None] == block.key_tokens[:, None, :]
        sparse = _is_host(same) and int(same.count_nonzero()) * 8 < same.numel()
        found |= _repeats_looked_up(block, same, share) if sparse else _repeats_summed(block, same, share)
    return found


def _is_host(table: Tensor) -> bool:
    """Whether places may be counted and looked up: a GPU would be waited for, and sums all of them as quickly."""
    return table.device.type == "cpu"


def _columns(chosen: Tensor, rows: Tensor, visible: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Mass on chosen keys `[sequence key]` of every query, and its uniform value."""
    if len(chosen) == 1 and _is_host(chosen):
        places = chosen[0].nonzero()[:, 0]
        return rows[..., places].sum(dim=-1), visible[..., places].sum(dim=-1) * share
    table = chosen.to(rows.dtype)
    return torch.einsum("shqk,sk->shq", rows, table), (visible & chosen[:, None, :]).sum(dim=-1) * share  # s: sequence


def _near(rows: Tensor, positions: Tensor) -> Tensor:
    """Mass on the keys up to `NEAR` positions from each query, by offset along the last axis; 0 where there is none."""
    target = positions[:, None] + torch.arange(-NEAR, NEAR + 1, device=rows.device)
    inside = (target >= 0) & (target < rows.shape[-1])
    index = target.clamp(0, rows.shape[-1] - 1)
    return rows.gather(-1, index.expand(*rows.shape[:2], -1, -1)) * inside


def _repeats_summed(block: RowBlock, same: Tensor, share: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mass on earlier keys that hold the query's token and on keys right after such a one, and its uniform value."""
    earlier = same & (torch.arange(same.shape[-1], device=same.device) < block.positions[:, None])
    after = torch.zeros_like(earlier)
    after[..., 1:] = earlier[..., :-1]
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, table in {"duplicate": earlier & block.visible, "induction": after & block.visible}.items():
        mass = torch.einsum("shqk,sqk->shq", block.rows, table.to(block.rows.dtype))  # s: sequence
        found[name] = mass, table.sum(dim=-1) * share
    return found


def _repeats_looked_up(block: RowBlock, same: Tensor, share: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The same where few keys hold the query's token, and reading only those is quicker."""
    sequence, query, key = same.nonzero(as_tuple=True)
    kept = key < block.positions[query]
    sequence, query, key = sequence[kept], query[kept], key[kept]
    n_sequences, n_heads, n_queries, n_keys = block.rows.shape
    visible = block.visible.expand(n_sequences, -1, -1)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, step in {"duplicate": 0, "induction": 1}.items():
        place = (key + step).clamp_max(n_keys - 1)
        counted = (visible[sequence, query, place] & (key + step < n_keys)).to(block.rows.dtype)[:, None]
        values = torch.cat((block.rows[sequence, :, query, place] * counted, counted), dim=1)  # [place head+1]
        flat = values.new_zeros(n_sequences * n_queries, n_heads + 1)
        flat.index_add_(0, sequence * n_queries + query, values)
        table = flat.view(n_sequences, n_queries, -1)
        found[name] = table[..., :-1].transpose(1, 2), table[..., -1] * share
    return found


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
