"""A dry run of a curve: what would be done, in how much memory and about how long; the data is read, not run."""

from __future__ import annotations

from headscope.counts import total_heads
from headscope.criteria import load_criterion
from headscope.curves import RANDOM, Tracing
from headscope.estimate import Extent, estimate_table, flops_per_second, judged_bytes, scoring_bytes
from headscope.footprint import METRICS, RANKINGS, peak
from headscope.foresight import fitting_bytes, kept_bytes
from headscope.matrices import total_parameters
from headscope.noisy import copies_of
from headscope.offload import home
from headscope.pruning import PruneOptions
from headscope.scores import Need
from headscope.study import batches
from headscope.tables import Cell, Table

_SCORING = 3.0
"""Forward and backward pass of the scores that go with every curve, in forward passes, and one for those asked for."""


def curve_outlay(model: str, data: str | None, options: PruneOptions) -> Table:
    """The work of a curve in numbers: series, heads removed, examples, forward passes, seconds and bytes.

    Numbers of heads are those of a random order, which differ from others only where units are of different sizes. A
    repair counts as one pass for each site. Seconds come from parameters x tokens and the speed of a matrix product on
    the device, so they are a guess, and too low for the criterion ablation; bytes are the process as it is, what a
    repair keeps, and the largest batch.
    """
    tracing = Tracing.open(model, data, options)
    study, judging = tracing.study, tracing.judging
    plans = tracing.plans(load_criterion("random").scores(study, 0))
    repaired = len(plans) if tracing.mender is not None else 0
    names = dict.fromkeys([tracing.asked, *tracing.columns, *RANDOM])
    judged = 1 + (len(plans) + 1) * len(names) + 2 * repaired
    chosen = _SCORING + repaired * len(study.sites)
    parameters, device = total_parameters(study.loaded.model), home(study.loaded.model)
    work = judged * Extent.of(batches(judging)).tokens + chosen * Extent.of(batches(study)).tokens
    needs = {Need.GRADIENT, Need.SAMPLED} - ({Need.SAMPLED} if tracing.labelled else {Need.GRADIENT})
    scoring = scoring_bytes(study, Extent.of(batches(study)), needs)
    stages, kept = [scoring, judged_bytes(judging, Extent.of(batches(judging)))], 0
    if tracing.mender is not None:  # whether it takes copies of images is asked by running them
        times = 1 + copies_of(len(study.examples or ())) * (study.loaded.task.reads == "images")
        kept = kept_bytes(study, times)
        stages.append(fitting_bytes(study, times))
    rows: list[tuple[str, Cell, str]] = [
        ("criterion", tracing.asked, ""),
        ("series", len(names) + bool(repaired), "count"),
        ("heads", total_heads(tracing.sites), "count"),
        ("heads_removed", " ".join(str(len(plan.removed)) for plan in plans), "count"),
        ("examples", len(study.examples or ()), "count"),
        ("passes", chosen, "forward passes"),
        ("judged_examples", len(judging.examples or ()), "count"),
        ("judged_passes", judged, "forward passes"),
        ("seconds", 2.0 * parameters * work / flops_per_second(device), "s"),
        ("peak_bytes", peak([study.loaded.model], kept + max(stages), RANKINGS, METRICS), "bytes"),
    ]
    return estimate_table(rows, study, tuple(tracing.notes))
