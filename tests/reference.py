"""Slow references written straight from the definitions: loops, explicit gates, plain autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn


class GateTensors:
    """Explicit gate leaves `[head]` in front of output projections, by pre-hooks of their own.

    `places` gives for each site its output projection and the head of each of its input channels (-1: none).
    """

    def __init__(self, places: Mapping[object, tuple[nn.Module, Sequence[int]]], dtype: torch.dtype) -> None:
        self.leaves: dict[object, Tensor] = {}
        self.handles = []
        for name, (module, channels) in places.items():
            owner = torch.tensor(channels)
            leaf = torch.ones(int(owner.max()) + 1, dtype=dtype, requires_grad=True)
            self.leaves[name] = leaf

            def hook(module: nn.Module, args: tuple[Tensor, ...], leaf: Tensor = leaf, owner: Tensor = owner) -> tuple:
                per_channel = torch.where(owner >= 0, leaf[owner.clamp_min(0)], torch.ones((), dtype=leaf.dtype))
                return (args[0] * per_channel, *args[1:])

            self.handles.append(module.register_forward_pre_hook(hook))

    def __enter__(self) -> GateTensors:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def gradients(self, loss: Tensor) -> dict[object, Tensor]:
        """∂loss/∂gate for every site, `[head]`; zero where the loss does not depend on it."""
        found = torch.autograd.grad(loss, list(self.leaves.values()), allow_unused=True)
        pairs = zip(self.leaves.items(), found, strict=True)
        return {name: torch.zeros_like(leaf) if value is None else value for (name, leaf), value in pairs}


def importance(gradients: Sequence[Mapping[object, Tensor]]) -> dict[object, dict[str, Tensor]]:
    """Michel et al. 2019 from the gate gradients of each example, one example at a time."""
    columns: dict[object, dict[str, Tensor]] = {}
    for name in gradients[0]:
        table = torch.stack([example[name] for example in gradients]).double()  # [example head]
        mean = table.abs().mean(dim=0)
        columns[name] = {
            "importance": mean,
            "importance_se": table.abs().std(dim=0, unbiased=True) / len(table) ** 0.5,
            "importance_layer_norm": mean / mean.pow(2).sum().sqrt(),
            "gradient_mean": table.mean(dim=0),
            "fisher": (table**2).mean(dim=0),
        }
    return columns


def only(gates: GateTensors, losses: Callable[[], Sequence[float]]) -> dict[object, Tensor]:
    """For each head the mean of the examples' losses while the gates of all other heads of its site are 0."""
    columns: dict[object, Tensor] = {}
    for name, leaf in gates.leaves.items():
        means = []
        for head in range(len(leaf)):
            with torch.no_grad():
                leaf.copy_(torch.tensor([float(other == head) for other in range(len(leaf))]))
                found = losses()
                leaf.fill_(1.0)
            means.append(sum(found) / len(found))
        columns[name] = torch.tensor(means, dtype=torch.float64)
    return columns


def ablation(gates: GateTensors, losses: Callable[[], Sequence[float]]) -> dict[object, Tensor]:
    """For each head what every example's loss gains while its gate alone is 0, `[example head]`."""
    with torch.no_grad():
        base = torch.tensor(losses(), dtype=torch.float64)
    columns: dict[object, Tensor] = {}
    for name, leaf in gates.leaves.items():
        changes = []
        for head in range(len(leaf)):
            with torch.no_grad():
                leaf[head] = 0.0
                changes.append(torch.tensor(losses(), dtype=torch.float64) - base)
                leaf[head] = 1.0
        columns[name] = torch.stack(changes, dim=1)
    return columns


def effective_rank(product: Tensor) -> float:
    """exp of the entropy of the normalised singular values of a whole matrix."""
    values = torch.linalg.svdvals(product.double())
    shares = values / values.sum()
    return float(torch.exp(-sum(share * torch.log(share) for share in shares if share > 0)))


def each_example(inputs: Mapping[str, object], run: Callable[[dict[str, object]], Tensor]) -> list[Tensor]:
    """Run a function on each example of a batch alone."""
    count = next(len(value) for value in inputs.values() if isinstance(value, Tensor))
    return [
        run({name: value[i : i + 1] if isinstance(value, Tensor) else value for name, value in inputs.items()})
        for i in range(count)
    ]


def sensitivity(gradients: Sequence[Sequence[Tensor]], positions: Sequence[int]) -> Tensor:
    """From `gradients[example][draw]`, the gate gradient `[head]` of the summed loss of drawn labels."""
    total = torch.zeros_like(gradients[0][0], dtype=torch.float64)
    for draws, count in zip(gradients, positions, strict=True):
        total += sum(draw.double() ** 2 for draw in draws) / len(draws) / count
    return total / len(gradients)


def effect(gradient_mean: Tensor, sensitivity: Tensor) -> Tensor:
    """Second-order guess of what removal does to the loss: ξ goes from 1 to 0."""
    step = -1.0
    return step * gradient_mean + 0.5 * step**2 * sensitivity


def weights(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> dict[str, float]:
    """The weight columns of one head from `[d_in d_head]`, `[d_in d_head]`, `[d_in d_value]`, `[d_value d_model]`."""
    return {
        "query_norm": float((query.double() ** 2).sum() ** 0.5),
        "key_norm": float((key.double() ** 2).sum() ** 0.5),
        "value_norm": float((value.double() ** 2).sum() ** 0.5),
        "output_norm": float((output.double() ** 2).sum() ** 0.5),
        "qk_rank": effective_rank(query.double() @ key.double().T),
        "ov_rank": effective_rank(value.double() @ output.double()),
    }


def attention(
    rows: Tensor,
    *,
    real: int,
    kind: str,
    tokens: Sequence[int] | None = None,
    special: Sequence[bool] | None = None,
    keys: int | None = None,
) -> dict[str, list[float]]:
    """Statistics of one text's map `[head query key]` by loops: `real` queries and `keys` keys (default as many) count.

    A key is visible to a query where some head gives it weight.
    """
    keys = real if keys is None else keys
    maps = rows.double().tolist()
    columns: dict[str, list[float]] = {}
    for grid in maps:
        sums: dict[str, float] = {}
        choices = 0
        for t in range(real):
            line = grid[t][:keys]
            visible = [s for s in range(keys) if any(other[t][s] > 0 for other in maps)]
            entropy = -sum(a * math.log(a) for a in line if a > 0)
            one: dict[str, float] = {"entropy": entropy, "confidence": max(line), "first": line[0]}
            one["first_uniform"] = (0 in visible) / len(visible)
            if len(visible) > 1:
                choices += 1
                sums["entropy_ratio"] = sums.get("entropy_ratio", 0.0) + entropy / math.log(len(visible))
            named: dict[str, list[int]] = {}
            if kind != "cross":
                one["distance"] = sum(a * abs(t - s) for s, a in enumerate(line))
                named = {"previous": [t - 1], "self": [t], "next": [t + 1]}
                if tokens is not None:
                    earlier = [s for s in range(min(t, keys)) if tokens[s] == tokens[t]]
                    named["duplicate"] = earlier
                    named["induction"] = [s + 1 for s in earlier]
            if special is not None:
                named["special"] = [s for s in range(keys) if special[s]]
            for name, places in named.items():
                inside = [s for s in places if 0 <= s < keys]
                one[name] = sum(line[s] for s in inside)
                one[f"{name}_uniform"] = sum(s in visible for s in inside) / len(visible)
            for name, value in one.items():
                sums[name] = sums.get(name, 0.0) + value
        for name, value in sums.items():
            columns.setdefault(name, []).append(value / (choices if name == "entropy_ratio" else real))
    return columns
