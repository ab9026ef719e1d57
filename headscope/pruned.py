"""What came of a pruning: what was removed, what it saves and loses, and the proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headscope.card import Quality
from headscope.cost import model_summary
from headscope.heads import Site
from headscope.matrices import site_shape, total_parameters
from headscope.merging import Merge
from headscope.plan import Plan
from headscope.provenance import Provenance
from headscope.trials import Verdict
from headscope.verify import Verification

TOKENS = 512
"""The length of text that costs are given for."""


@dataclass(frozen=True)
class Cost:
    """What a model costs: parameters, MACs of attention a token, bytes of the KV cache a token, bytes of weights."""

    parameters: int
    macs_per_token: int
    kv_bytes_per_token: int
    weight_bytes: int


@dataclass(frozen=True)
class Foresight:
    """What a run would take after the plan that a dry run makes: `seconds`, without the start of the process that loads
    the files anew; bytes at the peak, of the whole run, and of the weights in that other process.
    """

    seconds: float
    peak_bytes: int
    reloaded_bytes: int


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """One pruning; `folder` is where the checkpoint lies, None where nothing was written.

    `verdict` says how it does on held-out data, None where it was not judged; `history` says what each round took.
    `merge` says which key/value heads became one, None where heads were removed instead. `provenance` is that of the
    data that chose. `foresight` says what a run would take; None where there was one.
    """

    plan: Plan
    layout: str
    merge: Merge | None = None
    before: Cost
    after: Cost
    verdict: Verdict | None = None
    verification: Verification = field(default_factory=Verification)
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    history: tuple[Mapping[str, Any], ...] = ()
    provenance: Provenance | None = None
    foresight: Foresight | None = None

    @property
    def quality(self) -> tuple[Quality, Quality] | None:
        """What the whole model and the one that is written score on held-out data; None without data."""
        return None if self.verdict is None else (self.verdict.whole, self.verdict.final)


def cost(model: PreTrainedModel, sites: Sequence[Site], value_bytes: int) -> Cost:
    """The cost of a model whose checkpoint stores numbers of `value_bytes` bytes; tied weights count once."""
    total = total_parameters(model)
    shapes = [site_shape(model, site) for site in sites]
    summary = model_summary(shapes, total, TOKENS, kv_bytes_per_value=value_bytes)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return Cost(total, int(summary["macs_per_token"]), int(summary["kv_bytes_per_token"]), weights)
