"""What the attention rows of real queries sum to on data: 1, or less where sinks take mass outside the keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.examples import Batch
from headscope.heads import ParameterSlice, Role, Site, SiteId
from headscope.losses import wide
from headscope.memory import memory_errors
from headscope.objective import Objective
from headscope.reading import RowReader
from headscope.scores import RowBlock
from headscope.study import Study, batches
from headscope.texts import Texts

EXAMPLES = 32
"""Examples that the check looks at, at most."""
TOLERANCE = 1e-4
"""How far from 1 a row may sum; in half precision as far as one step of its numbers at 1 (float16: 1e-3)."""


@dataclass(frozen=True)
class RowSums:
    """The least and largest sum of a row of one site, the mean mass that sinks take (None without sinks), and whether
    these sums are in order: within `tolerance` of 1, which sinks may lower only while they are switched on.
    """

    least: float
    largest: float
    sink: float | None
    tolerance: float
    passed: bool

    @property
    def detail(self) -> str:
        """What was found, in words."""
        where = f"rows sum to {self.least:.7g} to {self.largest:.7g}"
        if not self.passed:
            return where + (", not 1" if self.sink is None else " with sinks switched off, not 1")
        worst = max(abs(self.least - 1), abs(self.largest - 1))
        if self.sink is None:
            return f"rows sum to 1 within {worst:.2g}"
        return f"sinks take {self.sink:.2g} of the attention; without them rows sum to 1 within {worst:.2g}"


def row_sums(study: Study) -> dict[SiteId, RowSums]:
    """Sums of the real queries' rows at every site, as the model's own eager attention gives them.

    Where a site has sinks, the model runs a second time with all sinks switched off: then its rows must sum to 1.
    A site whose rows were not seen is left out.
    """
    model = study.loaded.model
    gathered = _run(study)
    sinks = {site.id: pieces for site in study.sites if (pieces := _sinks(site))}
    dry = gathered
    if sinks:
        with switched_off(model, [piece for pieces in sinks.values() for piece in pieces]):
            dry = _run(study)
    found: dict[SiteId, RowSums] = {}
    for site in gathered.least:
        tolerance = max(TOLERANCE, torch.finfo(gathered.dtype[site]).eps)
        least, largest = (dry if site in sinks else gathered).range(site)
        passed = 1 - tolerance <= least and largest <= 1 + tolerance
        sink = None
        if site in sinks:
            passed = passed and gathered.largest[site] <= 1 + tolerance and isfinite(gathered.least[site])
            sink = 1 - gathered.mass[site] / gathered.examples[site]
        found[site] = RowSums(least, largest, sink, tolerance, passed)
    return found


def _sinks(site: Site) -> list[ParameterSlice]:
    """The slices that are sinks: a number a head that joins the softmax as a key without a value."""
    return [piece for piece in site.slices_of(Role.EXTRA) if "sink" in piece.name]


@contextlib.contextmanager
def switched_off(model: PreTrainedModel, sinks: list[ParameterSlice]) -> Iterator[None]:
    """Run with sinks that draw no attention, and put back their values."""
    parameters = {piece.path: model.get_parameter(piece.path) for piece in sinks}
    before = {path: parameter.detach().clone() for path, parameter in parameters.items()}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(torch.finfo(parameter.dtype).min / 2)
    try:
        yield
    finally:
        with torch.no_grad():
            for path, parameter in parameters.items():
                parameter.copy_(before[path])


@contextlib.contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run with the model's own eager attention, and put back what was set: fused kernels show no rows to check."""
    before = str(model.config._attn_implementation)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _Gathered:
    """Least and largest sum of a row, and the mean row sum of each example added over the examples, by site."""

    def __init__(self) -> None:
        self.least: dict[SiteId, float] = {}
        self.largest: dict[SiteId, float] = {}
        self.dtype: dict[SiteId, torch.dtype] = {}
        self.mass: dict[SiteId, float] = {}
        self.examples: dict[SiteId, int] = {}

    def range(self, site: SiteId) -> tuple[float, float]:
        """The least and largest sum of a row."""
        return self.least[site], self.largest[site]

    def see(self, block: RowBlock) -> dict[str, Tensor]:
        """Note the extremes of a block; sums over its real queries go on to be added by example."""
        total, site = wide(block.rows).sum(dim=-1), block.site.id  # [sequence head query]
        real = block.real[:, None].expand_as(total)
        if bool(real.any()):
            known = total[real].nan_to_num(nan=inf)
            self.least[site] = min(self.least.get(site, inf), float(known.min()))
            self.largest[site] = max(self.largest.get(site, -inf), float(known.max()))
            self.dtype[site] = block.rows.dtype
        return {"mass": total.masked_fill(~real, 0).sum(dim=-1), "queries": real.sum(dim=-1)}

    def add(self, sums: dict[SiteId, dict[str, Tensor]]) -> None:
        """Add the means over each example's queries, after a batch."""
        for site, found in sums.items():
            means = (found["mass"].double().cpu() / found["queries"].clamp_min(1).cpu()).mean(dim=1)
            self.mass[site] = self.mass.get(site, 0.0) + float(means.sum())
            self.examples[site] = self.examples.get(site, 0) + len(means)


def _run(study: Study) -> _Gathered:
    """One pass over the examples."""
    model, gathered = study.loaded.model, _Gathered()
    objective = Objective(model, study.loaded.task, study.sites)
    reader = RowReader(model, study.sites, [gathered.see], replace=True)

    def begin(inputs: dict[str, Any], batch: Batch) -> None:
        reader.start(Texts.of(inputs, batch), len(batch))

    objective.on_inputs = begin
    with torch.no_grad(), eager_attention(model), reader.reading():
        for batch in batches(study):
            with memory_errors(len(batch)):
                objective.forward(batch)
            gathered.add(reader.sums)
    return gathered
