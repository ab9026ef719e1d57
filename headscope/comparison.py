"""The report of `evaluate`: one row a model with loss, metric, divergence and cost, and on request its speed.

All models read the examples that were made for the first one, which is the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from headscope.alike import require_alike
from headscope.bootstrap import interval
from headscope.comparison_columns import columns_of
from headscope.errors import DeviceError
from headscope.evaluation import Judgement, Run, judge
from headscope.examples import Batch
from headscope.fingerprints import Fingerprint, of_measures, of_model
from headscope.headers import has_safetensors, read_headers
from headscope.inspection import model_table
from headscope.location import Location
from headscope.losses import Distribution
from headscope.memory import memory_errors
from headscope.metrics import Array
from headscope.models import load
from headscope.objective import Objective
from headscope.offload import home
from headscope.provenance import Provenance
from headscope.shares import Share
from headscope.study import Progress, Study, StudyOptions, batches
from headscope.tables import Cell, Table
from headscope.timing import Timing, made_up, matrix_macs, time_models


@dataclass(frozen=True)
class Comparison:
    """A report, and the sentences about it for stderr."""

    table: Table
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """Models that were judged on the same data, `found` in the order of `studies`, by the metric asked for."""

    studies: Sequence[Study]
    found: Sequence[Judgement]
    metric: str | None = None

    def report(self, *, tokens: int = 512, speed: Sequence[int] = (), alone: bool = False) -> Comparison:
        """The report; with batch sizes in `speed`, the models are timed for it, where other processes were there by one
        that is `alone` now.

        Raises:
            HeadscopeError: a model cannot be timed.
        """
        studies, found = self.studies, self.found
        first = studies[0].loaded
        rows = [_row(study, one, tokens) for study, one in zip(studies, found, strict=True)]
        pairs = zip(studies[1:], found[1:], strict=True)
        sentences = [_difference(studies[0], study, found[0], one) for study, one in pairs]
        notes = [*_notes(studies, found[0]), *found[0].remarks(self.metric)]
        if speed:
            timed = _timed(studies, rows, tokens, speed)
            rows, notes = timed.rows, [*notes, *timed.notes]
            if alone:
                threads = f", threads: {torch.get_num_threads()}" if home(first.model).type == "cpu" else ""
                notes.append(f"timed by rank 0 alone, after all others had ended{threads}")
            sentences.append("masking heads saves no time: only heads that are removed do")
        columns = columns_of(speed=bool(speed))
        origin = joint_provenance(studies)
        table = Table("evaluate", columns, tuple(rows), "model", origin, tuple(dict.fromkeys(notes)))
        return Comparison(table, tuple(filter(None, sentences)))


def compare(
    models: Sequence[str],
    data: str,
    options: StudyOptions | None = None,
    *,
    metric: str | None = None,
    tokens: int = 512,
    speed: Sequence[int] = (),
    progress: Progress | None = None,
) -> Comparison:
    """Judge models on the same data, the first as the baseline; with batch sizes in `speed`, also time them.

    Raises:
        HeadscopeError: a model or the data cannot be used, or the models cannot be compared.
    """
    return judge_models(models, data, options, metric=metric, progress=progress).report(tokens=tokens, speed=speed)


def judge_models(
    models: Sequence[str],
    data: str,
    options: StudyOptions | None = None,
    *,
    metric: str | None = None,
    progress: Progress | None = None,
    share: Share | None = None,
) -> Judged:
    """Judge models on the same data, the first as the baseline; `share` is what this process does of that.

    Raises:
        HeadscopeError: a model or the data cannot be used, or the models cannot be compared.
        RankError: another process has ended, stands still or sees something else.
        WorkError: the folder holds work of another run.
    """
    studies = open_studies(models, data, options or StudyOptions())
    loaded, cut = studies[0].loaded, batches(studies[0])
    found = judge(
        [_plain(study) for study in studies],
        loaded.task,
        loaded.task_name,
        cut,
        metric=metric,
        progress=progress,
        share=share,
        fingerprint=lambda: _fingerprint(studies, cut),
    )
    return Judged(studies, found, metric)


def _fingerprint(studies: Sequence[Study], cut: Sequence[Batch]) -> Fingerprint:
    """All that losses, divergences and predictions depend on: the data, and every model. A metric is made of them."""
    found = studies[0].fingerprint(cut) | of_measures({"judgement": ""}, models=len(studies))
    for number, study in enumerate(studies[1:], 2):
        own = of_model(study.loaded, study.provenance())
        found |= {f"{name} of model {number}": value for name, value in own.items()}
    return found


def open_studies(models: Sequence[str], data: str, options: StudyOptions) -> list[Study]:
    """Every model with the examples that were made for the first one.

    Raises:
        UsageError: the models cannot be compared on the same examples.
    """
    first = Study.open(models[0], data, options)
    assert first.examples is not None
    studies = [first]
    for name in models[1:]:
        loaded = load(name, options.load)
        require_alike(first.loaded, loaded, first.examples)
        if "input_ids" in first.examples.pads:  # classifiers of decoders find a text's last token by it
            loaded.model.config.get_text_config().pad_token_id = first.examples.pads["input_ids"]
        studies.append(Study(loaded, first.examples, options))
    return studies


def joint_provenance(studies: Sequence[Study]) -> Provenance:
    """That of the first study; names, revisions and digests of all."""
    each = [study.provenance() for study in studies]
    names = ("model", "revision", "weights_digest")
    joined = {name: ", ".join(getattr(one, name) for one in each) for name in names}
    return replace(each[0], **joined)


def _plain(study: Study) -> Run:
    return Objective(study.loaded.model, study.loaded.task, study.sites).forward


def _row(study: Study, found: Judgement, tokens: int) -> dict[str, Cell]:
    (costs,) = model_table(study, tokens).rows
    return {
        "model": study.loaded.location.name,
        "loss": found.loss,
        "metric": found.metric,
        "metric_name": found.metric_name or None,
        "divergence": found.divergence,
        "parameters": costs["total_parameters"],
        "macs_per_token": costs["macs_per_token"],
        "kv_bytes_per_token": costs["kv_bytes_per_token"],
        "disk_bytes": weight_bytes(study.loaded.location),
        "examples": found.examples,
    }


def weight_bytes(location: Location) -> int:
    """Bytes of the files that a model's weights are loaded from."""
    folder = location.folder
    if location.gguf:
        files = {location.gguf}
    elif has_safetensors(folder):
        files = {info.file for info in read_headers(folder).values()}
    else:
        files = {file.name for file in folder.glob("pytorch_model*.bin")}
    return sum((folder / file).stat().st_size for file in files)


def _difference(first: Study, other: Study, base: Judgement, found: Judgement) -> str | None:
    """How far a model's loss and metric are from the first one's, and how sure that is; None without labels."""
    count, seed = base.examples, first.options.seed
    if base.loss is None or count < 2:
        return None
    apart = (found.losses - base.losses).numpy()
    parts = [f"loss {interval(lambda weights: weights @ apart / count, count, seed=seed)}"]
    if base.metric is not None and found.metric is not None:
        parts.append(f"{base.metric_name} {interval(_metric_change(base, found), count, seed=seed)}")
    names = f"{other.loaded.location.name} against {first.loaded.location.name}"
    return f"{names} on {count} examples (95 % intervals by paired bootstrap): {', '.join(parts)}"


def _metric_change(base: Judgement, found: Judgement) -> Callable[[Array], Array]:
    measure, before, after = base.measure, base.predictions, found.predictions
    assert measure is not None and before is not None and after is not None
    return lambda weights: measure.resampled(after, weights) - measure.resampled(before, weights)


@dataclass(frozen=True)
class _Timed:
    """Rows with times, and what happened on the way."""

    rows: list[dict[str, Cell]]
    notes: list[str]


def _timed(studies: Sequence[Study], rows: Sequence[dict[str, Cell]], tokens: int, sizes: Sequence[int]) -> _Timed:
    """One row a model and batch size."""
    first = studies[0]
    assert first.examples is not None
    models, task, examples = [study.loaded.model for study in studies], first.loaded.task, first.examples
    notes: list[str] = []
    if first.loaded.reads == "text":
        limit = min([tokens, *filter(None, (study.loaded.max_length() for study in studies))])
        notes += [f"timed on {limit} tokens, the most that the models read"] if limit < tokens else []
        tokens = limit
    try:
        with memory_errors():
            macs = [matrix_macs(model, made_up(model, task, examples, size=1, tokens=tokens)) for model in models]
    except DeviceError:
        macs = []
        notes.append("memory ran out while matrix products were counted: no speed-up is predicted")
    found: list[dict[str, Cell]] = []
    for size in sizes:
        timings = time_models(models, task, examples, size=size, tokens=tokens)
        if timings is None:
            notes.append(f"memory ran out at batch size {size}")
        for index, row in enumerate(rows):
            predicted = macs[0] / macs[index] if macs else None
            found.append({**row, "batch_size": size, **_speed(timings, index), "speedup_predicted": predicted})
    return _Timed(found, notes)


def _speed(timings: Sequence[Timing] | None, index: int) -> dict[str, Cell]:
    """The measured cells of one model; empty where memory ran out."""
    if timings is None:
        return dict.fromkeys(("latency_ms", "latency_iqr_ms", "throughput", "speedup"), None)
    own, first = timings[index], timings[0]
    return {
        "latency_ms": 1000 * own.latency,
        "latency_iqr_ms": 1000 * own.spread,
        "throughput": own.throughput,
        "speedup": first.latency / own.latency,
    }


def _notes(studies: Sequence[Study], found: Judgement) -> list[str]:
    """What a reader of the report should know, with the model's name where there are several."""
    notes: list[str] = []
    for study in studies:
        prefix = f"{study.loaded.location.name}: " if len(studies) > 1 else ""
        notes += [f"{prefix}{note}" for note in study.loaded.notes]
        notes += [f"{prefix}not analysed: {problem}" for problem in study.discovery.problems]
    first = studies[0]
    notes += [*(first.examples.notes if first.examples else ()), *found.notes]
    if found.loss is None and first.loaded.task.distribution is not Distribution.DIRECTION:
        notes.append("the data has no labels for this model: neither loss nor metric is measured")
    return notes
