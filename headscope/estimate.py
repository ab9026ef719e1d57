"""A dry run of `inspect`: what would be done, in how much memory and about how long; the data is read, not run."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from headscope.columns import Column
from headscope.examples import Batch
from headscope.footprint import RANKINGS, peak
from headscope.inspection import notes
from headscope.losses import Distribution
from headscope.matrices import total_parameters
from headscope.objective import CHUNK_VALUES
from headscope.offload import home, is_offloaded
from headscope.patterns import BLOCK_VALUES
from headscope.scores import Need
from headscope.study import Scores, Study, StudyOptions, batches, load_scores
from headscope.tables import Cell, Table

ESTIMATE_COLUMNS = (
    Column("item", "name", "what is estimated or would be done"),
    Column("value", "", "its value", untrusted=True),
    Column("unit", "name", "the value's unit"),
)
_BENCH = 512
STREAMS = 20
"""Numbers that a layer keeps of a token for the backward pass, or makes while it runs, in widths of the model."""
HELD, COMPARED = 3, 8
"""Copies of a batch's outputs: those of two models and one in the making; and of a piece in float64 when they are
compared.
"""
COPIED = 12
"""Copies of a block of attention rows while they are measured, in float32."""
PULLED, DRAWN = 4, 6
"""Copies of a piece of the outputs when a loss is pulled back, and more of them, by float32, when labels are drawn."""


@dataclass(frozen=True)
class Extent:
    """How much some batches hold: real `tokens`, all tokens with those that only pad, the tokens of the largest batch,
    the longest example, and the predicted positions of the batch that has most; 0 without batches.
    """

    tokens: int
    padded: int
    widest: int
    longest: int
    rows: int

    @classmethod
    def of(cls, cut: Sequence[Batch]) -> Extent:
        """That of batches as they were cut."""
        sizes = [max(batch.lengths) * len(batch) for batch in cut]
        return cls(
            tokens=sum(sum(batch.lengths) for batch in cut),
            padded=sum(sizes),
            widest=max(sizes, default=0),
            longest=max((max(batch.lengths) for batch in cut), default=0),
            rows=max((int(batch.predicted.sum()) for batch in cut), default=0),
        )


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
    extent = Extent.of(cut)
    parameters = total_parameters(study.loaded.model)
    libraries = (RANKINGS,) if needs - {Need.WEIGHTS} else ()
    rows: list[tuple[str, Cell, str]] = [
        ("measures", ",".join(names), ""),
        ("heads", sum(site.n_heads for site in study.sites), "count"),
        ("sites", len(study.sites), "count"),
        ("examples", len(study.examples or ()), "count"),
        ("batches", len(cut), "count"),
        ("tokens", extent.tokens, "count"),
        ("passes", passes, "forward passes"),
        ("seconds", 2.0 * parameters * extent.tokens * passes / flops_per_second(home(study.loaded.model)), "s"),
        ("peak_bytes", peak([study.loaded.model], scoring_bytes(study, extent, needs), *libraries), "bytes"),
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
    """Bytes of activations that one token keeps alive until the backward pass; where weights are offloaded, layers run
    again for it, and only one of them keeps more than what it reads.
    """
    layers = len(study.sites)
    kept = STREAMS + layers if is_offloaded(study.loaded.model) else STREAMS * layers
    return kept * _width_bytes(study)


def _width_bytes(study: Study) -> int:
    return max(site.d_model for site in study.sites) * study.loaded.model.dtype.itemsize


def scoring_bytes(study: Study, extent: Extent, needs: Collection[Need]) -> int:
    """Bytes that the largest batch takes in a pass that gathers this evidence."""
    if set(needs) <= {Need.WEIGHTS}:
        return 0
    if set(needs) <= {Need.WEIGHTS, Need.ROWS}:
        heads = max(site.n_heads for site in study.sites)
        block = min(BLOCK_VALUES, extent.widest * extent.longest * heads)
        return extent.widest * STREAMS * _width_bytes(study) + COPIED * block * 4
    piece = min(extent.rows * classes(study), CHUNK_VALUES)
    pulled = PULLED * study.loaded.model.dtype.itemsize + DRAWN * 4 * (Need.SAMPLED in needs)
    return extent.widest * activation_bytes(study) + piece * pulled


def classes(study: Study) -> int:
    """Numbers that the model says at a predicted position."""
    loaded = study.loaded
    config, kind = loaded.model.config, loaded.task.distribution
    if loaded.task.vocabulary:
        return int(config.get_text_config().vocab_size)
    return (
        int(config.num_labels or 0) if kind is Distribution.CATEGORICAL else max(site.d_model for site in study.sites)
    )


def judged_bytes(study: Study, extent: Extent) -> int:
    """Bytes of what two models say on the largest batch, and of comparing that piece by piece in float64; or of what
    the first says while the second runs.
    """
    values, itemsize = extent.rows * classes(study), study.loaded.model.dtype.itemsize
    compared = HELD * values * itemsize + COMPARED * 8 * min(values, CHUNK_VALUES)
    return max(compared, values * itemsize + extent.widest * STREAMS * _width_bytes(study))


def flops_per_second(device: torch.device) -> float:
    """Floating-point operations a second of a matrix product."""
    matrix = torch.ones(_BENCH, _BENCH, device=device)
    result = matrix @ matrix  # the first one is slower
    start = time.perf_counter()
    for _ in range(4):
        result = matrix @ matrix
    float(result[0, 0])  # waits for the device
    return 4 * 2 * _BENCH**3 / max(time.perf_counter() - start, 1e-9)
