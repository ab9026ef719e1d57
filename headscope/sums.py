"""Sums of what each example gives, in float64 and apart for two random halves, and the means and rankings they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headscope.examples import Batch, sent
from headscope.heads import Site, SiteId
from headscope.objective import Outcome
from headscope.scores import Evidence, Means, Score
from headscope.states import State, within

Rows = Mapping[SiteId, Mapping[str, Tensor]]
"""What the scores summed over attention rows, `[batch head]` by site and name."""


class ScoreSums:
    """Sums over the examples of every moment of every score, which do not depend on how examples were batched.

    The seeded order of the data is random, so examples of odd and even number are two random halves. An example that
    has no value for a moment (NaN) is left out of that moment's mean.
    """

    def __init__(self, scores: Mapping[str, Score]) -> None:
        self.scores = scores
        self.counts = [0, 0]
        self.whole: dict[SiteId, dict[str, Tensor]] = {}
        """What is known of all examples together only, `[head]` by name; halves do not have it."""
        self._totals: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}

    @property
    def count(self) -> int:
        """Examples added so far."""
        return sum(self.counts)

    def add(self, batch: Batch, outcome: Outcome, sites: Sequence[Site], rows: Rows) -> None:
        """Add the examples of a batch."""
        for number in batch.numbers:
            self.counts[number % 2] += 1
        odd = torch.tensor([number % 2 for number in batch.numbers], dtype=torch.float64)
        halves, positions = _Placed(torch.stack((1 - odd, odd))), _Placed(batch.positions)
        for site in sites:
            gate, sampled = _host(outcome.gate.get(site.id)), _host(outcome.sampled.get(site.id))
            read, alone, ablated = rows.get(site.id), outcome.alone.get(site.id), outcome.ablated.get(site.id)
            counted = batch.positions if sampled is None else positions.on(sampled.device)
            evidence = Evidence(site, counted, gate, sampled, read, alone, ablated)
            moments: dict[str, Tensor] = {}
            for score in self.scores.values():
                moments |= score.moments(evidence)
            self._add(site, moments, halves)

    def _add(self, site: Site, moments: Mapping[str, Tensor], halves: _Placed) -> None:
        kept = self._totals.setdefault(str(site.id), {})
        for name, values in moments.items():
            if name not in kept:
                blank = torch.zeros(2, site.n_heads, dtype=torch.float64, device=values.device)
                kept[name] = (blank, blank.clone())
            total, seen = kept[name]
            present, half = values.isfinite(), halves.on(values.device)  # a product, for a GPU adds in the same order
            total += half @ values.double().where(present, 0.0)
            seen += half @ present.double()

    def state(self) -> State:
        """Totals, `[half head]`, and how many examples stand in them, by site and moment; without what is `whole`."""
        found: State = {"counts": torch.tensor(self.counts, dtype=torch.float64)}
        for site, kept in self._totals.items():
            for name, (total, seen) in kept.items():
                found[f"total/{site}/{name}"], found[f"seen/{site}/{name}"] = total.cpu(), seen.cpu()
        return found

    def absorb(self, state: State) -> None:
        """Add the totals of other examples."""
        self.counts = [count + int(more) for count, more in zip(self.counts, state["counts"], strict=True)]
        for key, total in within(state, "total").items():
            site, _, name = key.rpartition("/")
            kept, seen = self._totals.setdefault(site, {}), state[f"seen/{key}"]
            before = kept.get(name)
            kept[name] = (total, seen) if before is None else (before[0] + total, before[1] + seen)

    def means(self, site: SiteId, half: int | None = None) -> dict[str, Tensor]:
        """Means over all examples or those of one half, `[head]` by moment; NaN where no example has a value."""
        part = slice(None) if half is None else slice(half, half + 1)
        kept = self._totals.get(str(site), {})
        means = {name: (total[part].sum(dim=0) / seen[part].sum(dim=0)).cpu() for name, (total, seen) in kept.items()}
        return means | (self.whole.get(site, {}) if half is None else {})

    def stability(self, score: Score, sites: Sequence[Site]) -> float:
        """Spearman correlation of the two halves' rankings of all heads; NaN where a half is empty or all are equal."""
        if min(self.counts) == 0:
            return float("nan")
        halves: list[list[float]] = [[], []]
        for index, ranking in enumerate(halves):
            for site in sites:
                means = Means(self.counts[index], self.means(site.id, index))
                ranking += score.finish(site, means)[score.ranks].tolist()
        return spearman(*halves)


class _Placed:
    """A tensor of the host on each device that asks for it, sent there once."""

    def __init__(self, values: Tensor) -> None:
        self._values = {values.device: values}
        self._host = values

    def on(self, device: torch.device) -> Tensor:
        """The tensor on a device."""
        if device not in self._values:
            self._values[device] = sent(self._host, device)
        return self._values[device]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; NaN where one side is constant, a value is, or there are fewer than two heads."""
    from scipy.stats import rankdata, spearmanr

    if any(value != value for value in (*first, *second)):
        return float("nan")
    if len(first) < 2 or len(set(rankdata(first))) == 1 or len(set(rankdata(second))) == 1:
        return float("nan")
    return float(spearmanr(first, second)[0])  # type: ignore[arg-type]


def _host(tensor: Tensor | None) -> Tensor | None:
    """Off devices without float64."""
    return tensor.cpu() if tensor is not None and tensor.device.type == "mps" else tensor
