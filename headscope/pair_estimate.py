"""A dry run of `similarity`: what would be compared, in how much memory and about how long; the data is not run."""

from __future__ import annotations

from collections.abc import Sequence

from headscope.estimate import estimate_table, flops_per_second
from headscope.inspection import notes
from headscope.likeness import ATTENTION, Question, open_party
from headscope.matrices import total_parameters
from headscope.measures import Evidence
from headscope.moments import MOMENT_BYTES, SAMPLE_BYTES, moment_bytes
from headscope.offload import home
from headscope.pair_sums import load_measures
from headscope.study import Scores, StudyOptions, batches
from headscope.tables import Cell, Table

TABLES = 6
"""Tables of all pairs in float64 that one measure needs at once."""


def estimate_pairs(models: Sequence[str], data: str | None, options: StudyOptions, question: Question) -> Table:
    """The work of `similarity` in numbers: heads, pairs, examples, passes, seconds and bytes.

    Seconds come from parameters x tokens x passes and the speed of a matrix product on the device, so they are a guess
    that leaves out the comparing; bytes are the weights, the tables of pairs, moments and the largest batch.
    """
    party = open_party(models, data, options)
    first = party.studies[0]
    measures = load_measures(question.measures)
    looks = {measure.evidence for measure in measures.values()} - {Evidence.WEIGHTS}
    twice = ATTENTION in measures and not question.exact and (question.top or question.threshold) is not None
    passes = (1.0 + (twice and len(models) == 1)) * bool(looks) + question.importance
    cut = batches(first) if first.examples is not None else []
    tokens = sum(sum(batch.lengths) for batch in cut)
    size = sum(total_parameters(study.loaded.model) for study in party.studies)
    widest = max((max(batch.lengths) * len(batch) for batch in cut), default=0)
    width = 20 * max(site.d_model for site in party.space.sites)
    heads = len(party.heads)
    held = 8 * heads**2 * TABLES * len(measures)
    if Evidence.OUTPUTS in looks:
        needed = moment_bytes(party.space)
        held += 2 * (needed if needed <= MOMENT_BYTES else SAMPLE_BYTES)  # of all units so far, and of one
    rows: list[tuple[str, Cell, str]] = [
        ("measures", ",".join(measures), ""),
        ("heads", heads, "count"),
        ("pairs", int(party.candidates().sum()), "count"),
        ("examples", len(first.examples or ()), "count"),
        ("batches", len(cut), "count"),
        ("tokens", tokens, "count"),
        ("passes", passes, "forward passes"),
        ("seconds", 2.0 * size * tokens * passes / flops_per_second(home(first.loaded.model)), "s"),
        ("peak_bytes", (size + widest * width) * first.loaded.model.dtype.itemsize + held, "bytes"),
    ]
    return estimate_table(rows, first, notes(first, Scores((), {})))
