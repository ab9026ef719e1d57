"""A dry run of `evaluate`: what would be done, in how much memory and about how long; the data is read, not run."""

from __future__ import annotations

from collections.abc import Sequence

from headscope.comparison import open_studies
from headscope.estimate import Extent, estimate_table, flops_per_second, judged_bytes
from headscope.footprint import METRICS, peak
from headscope.matrices import total_parameters
from headscope.metrics import choose_metric
from headscope.offload import home
from headscope.study import StudyOptions, batches
from headscope.tables import Cell, Table
from headscope.timing import SECONDS


def outlay(
    models: Sequence[str], data: str, options: StudyOptions, *, metric: str | None = None, speed: Sequence[int] = ()
) -> Table:
    """The work of `evaluate` in numbers: models, examples, tokens, seconds and bytes.

    Seconds come from parameters x tokens and the speed of a matrix product on the device, so they are a guess; bytes
    are the process with all models and the outputs of two of them for the largest batch.
    """
    studies = open_studies(models, data, options)
    first = studies[0]
    cut = batches(first)
    chosen = choose_metric(metric, first.loaded.task, first.loaded.task_name, cut)
    extent = Extent.of(cut)
    sizes = [total_parameters(study.loaded.model) for study in studies]
    rows: list[tuple[str, Cell, str]] = [
        ("models", len(studies), "count"),
        ("metric", chosen.name if chosen else None, ""),
        ("examples", len(first.examples or ()), "count"),
        ("batches", len(cut), "count"),
        ("tokens", extent.tokens, "count"),
        ("passes", len(studies), "forward passes"),
        ("speed_batches", ",".join(map(str, speed)) or None, ""),
        (
            "seconds",
            2.0 * sum(sizes) * extent.tokens / flops_per_second(home(first.loaded.model)) + SECONDS * len(speed),
            "s",
        ),
        (
            "peak_bytes",
            peak([study.loaded.model for study in studies], judged_bytes(first, extent), METRICS),
            "bytes",
        ),
    ]
    return estimate_table(rows, first, first.loaded.notes)
