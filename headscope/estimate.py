"""A dry run of `inspect`: what would be done, in how much memory and about how long; the data is read, not run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from headscope.columns import Column
from headscope.footprint import peak
from headscope.inspection import notes
from headscope.matrices import total_parameters
from headscope.offload import home
from headscope.scores import Need
from headscope.study import Scores, Study, StudyOptions, batches, load_scores
from headscope.tables import Cell, Table

ESTIMATE_COLUMNS = (
    Column("item", "name", "what is estimated or would be done"),
    Column("value", "", "its value", untrusted=True),
    Column("unit", "name", "the value's unit"),
)
_BENCH = 512


def estimate(model: str, data: str | None, options: StudyOptions, measures: Sequence[str] | None) -> Table:
    """The work of `inspect` in numbers: heads, examples, tokens, passes, seconds and bytes.

    Seconds come from parameters x tokens x passes and the speed of a matrix product on the device, so they are a guess
    that leaves out attention maps and start-up; bytes are the process as it is and what the largest batch adds.
    """
    study = Study.open(model, data, options)
    names = tuple(study.default_measures() if measures is None else measures)
    needs = {need for score in load_scores(names).values() for need in score.needs}
    passes = 0.0
    if study.examples is not None and needs - {Need.WEIGHTS}:
        passes = 1.0 + (Need.GRADIENT in needs) + (options.draws if Need.SAMPLED in needs else 0)
        heads = sum(site.n_heads for site in study.sites)
        passes += heads if Need.ALONE in needs else 0
        passes += 1 + _ablation_share(study) * heads if Need.ABLATED in needs else 0
    cut = batches(study) if study.examples is not None else []
    tokens = sum(sum(batch.lengths) for batch in cut)
    parameters = total_parameters(study.loaded.model)
    widest = max((max(batch.lengths) * len(batch) for batch in cut), default=0)
    rows: list[tuple[str, Cell, str]] = [
        ("measures", ",".join(names), ""),
        ("heads", sum(site.n_heads for site in study.sites), "count"),
        ("sites", len(study.sites), "count"),
        ("examples", len(study.examples or ()), "count"),
        ("batches", len(cut), "count"),
        ("tokens", tokens, "count"),
        ("passes", passes, "forward passes"),
        ("seconds", 2.0 * parameters * tokens * passes / flops_per_second(home(study.loaded.model)), "s"),
        ("peak_bytes", peak([study.loaded.model], widest * activation_bytes(study)), "bytes"),
    ]
    return estimate_table(rows, study, notes(study, Scores(names, {})))


def _ablation_share(study: Study) -> float:
    """About how much of a forward pass an ablation runs: what is behind the head's layer, of the examples it is run on.

    A budget also takes a backward pass, which is left out, being one for all heads.
    """
    budget, examples = study.options.budget, len(study.examples or ())
    return 0.55 * (1.0 if budget is None or budget >= examples else budget / examples)


def estimate_table(rows: Iterable[tuple[str, Cell, str]], study: Study, notes: tuple[str, ...]) -> Table:
    """A report of items, values and units."""
    cells: tuple[dict[str, Cell], ...] = tuple(
        {"item": item, "value": value, "unit": unit} for item, value, unit in rows
    )
    return Table("estimate", ESTIMATE_COLUMNS, cells, "", study.provenance(), notes)


def activation_bytes(study: Study) -> int:
    """Bytes of activations that one token keeps alive until the backward pass: about 20 streams a layer."""
    site = max(study.sites, key=lambda site: site.d_model)
    return 20 * site.d_model * len(study.sites) * study.loaded.model.dtype.itemsize


def flops_per_second(device: torch.device) -> float:
    """Floating-point operations a second of a matrix product."""
    matrix = torch.ones(_BENCH, _BENCH, device=device)
    result = matrix @ matrix  # the first one is slower
    start = time.perf_counter()
    for _ in range(4):
        result = matrix @ matrix
    float(result[0, 0])  # waits for the device
    return 4 * 2 * _BENCH**3 / max(time.perf_counter() - start, 1e-9)
