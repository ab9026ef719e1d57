"""A dry run of `similarity`: what would be compared, in how much memory and about how long; the data is not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headscope.estimate import estimate_table, flops_per_second
from headscope.footprint import peak
from headscope.inspection import notes
from headscope.likeness import ATTENTION, Question, open_party
from headscope.matrices import total_parameters
from headscope.measures import Evidence, Measure
from headscope.offload import home
from headscope.pair_sums import PairSums, load_measures
from headscope.pairing import Party
from headscope.row_store import HELD_VALUES
from headscope.study import Scores, StudyOptions, batches
from headscope.tables import Cell, Table

ADDING, RANKING = 2.0, 4.5
"""Tables of all pairs in float64 that come and go beside sums and values, as measured on 5,120 heads: while a batch is
added, and while pairs are put in order.
"""
ENDING = {Evidence.ROWS: 3.0, Evidence.OUTPUTS: 3.0, Evidence.WEIGHTS: 4.5}
"""The same while a measure is made of its sums, or of weights."""


def estimate_pairs(models: Sequence[str], data: str | None, options: StudyOptions, question: Question) -> Table:
    """The work of `similarity` in numbers: heads, pairs, examples, passes, seconds and bytes.

    Seconds come from parameters x tokens x passes and the speed of a matrix product on the device, so they are a guess
    that leaves out the comparing; bytes are the process as it is, the tables of pairs, moments and the largest batch.
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
    longest = max((max(batch.lengths) for batch in cut), default=0)
    values = _batch_values(party, widest, longest, rows=Evidence.ROWS in looks)
    held = _pair_bytes(party, measures) + values * first.loaded.model.dtype.itemsize
    rows: list[tuple[str, Cell, str]] = [
        ("measures", ",".join(measures), ""),
        ("heads", len(party.heads), "count"),
        ("pairs", int(party.candidates().sum()), "count"),
        ("examples", len(first.examples or ()), "count"),
        ("batches", len(cut), "count"),
        ("tokens", tokens, "count"),
        ("passes", passes, "forward passes"),
        ("seconds", 2.0 * size * tokens * passes / flops_per_second(home(first.loaded.model)), "s"),
        ("peak_bytes", peak([study.loaded.model for study in party.studies], held), "bytes"),
    ]
    return estimate_table(rows, first, notes(first, Scores((), {})))


def _pair_bytes(party: Party, measures: Mapping[str, Measure]) -> int:
    """What sums, moments and tables of pairs take at most: in the pass, at its end, or when pairs are put in order.

    Sums are those of all units so far and of the one that runs.
    """
    table, sums = 8 * len(party.heads) ** 2, PairSums(party.space, measures).size
    values, ending = table * len(measures), max(ENDING[measure.evidence] for measure in measures.values())
    return int(max(2 * sums + ADDING * table, sums + values + ending * table, values + RANKING * table))


def _batch_values(party: Party, tokens: int, longest: int, *, rows: bool) -> int:
    """Numbers that the largest batch holds: what all heads put out, one layer's streams and attention, and rows."""
    sites = party.space.sites
    outputs = sum(site.n_heads * site.d_value for site in sites)
    layer = max(20 * site.d_model + 4 * site.n_heads * longest for site in sites)
    return tokens * (outputs + layer) + (min(HELD_VALUES, len(party.heads) * tokens * longest) if rows else 0)
