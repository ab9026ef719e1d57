"""The Python interface: what the commands do, as functions that return DataFrames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from headscope import (
    checks,
    comparison,
    curve_report,
    curves,
    discovery,
    inspection,
    models,
    pruning,
    similarity_report,
)
from headscope.curve_columns import FURTHEST
from headscope.errors import UsageError
from headscope.heads import Site
from headscope.layouts import SHARD_SIZE
from headscope.likeness import Question, compare_heads, default_measures, open_party
from headscope.models import LoadOptions
from headscope.parallel import require_whole
from headscope.pruned import Pruned
from headscope.publish import Publication
from headscope.request import Request
from headscope.study import Study, StudyOptions
from headscope.upload import check_repository, upload

if TYPE_CHECKING:
    import pandas


def inspect(
    model: str,
    data: str | None = None,
    *,
    measures: Sequence[str] | None = None,
    by: str = "head",
    tokens: int = 512,
    options: StudyOptions | None = None,
) -> pandas.DataFrame:
    """One row per head (or `by` layer, or one for the model), as `headscope inspect` prints it.

    Raises:
        HeadscopeError: the model or the data cannot be used; the message says what to do.
    """
    if by not in ("head", "layer", "model"):
        raise UsageError(f"by={by!r}: expected head, layer or model")
    study = Study.open(model, data, options)
    if by == "model":
        return inspection.model_table(study, tokens).frame()
    scores = study.scores(measures)
    table = inspection.layer_table(study, scores, tokens) if by == "layer" else inspection.head_table(study, scores)
    return table.frame()


def check(
    model: str, data: str | None = None, *, options: LoadOptions | None = None, reading: StudyOptions | None = None
) -> pandas.DataFrame:
    """Structure checks of a checkpoint, one row each with status pass, fail or skip; with data also of row sums.

    Raises:
        HeadscopeError: there is nothing that could be checked.
    """
    require_whole(options, "check")
    return checks.check(model, options, data=data, reading=reading).frame()


def evaluate(
    models: str | Sequence[str],
    data: str,
    *,
    metric: str | None = None,
    tokens: int = 512,
    speed: bool = False,
    speed_batches: Sequence[int] = (1, 8, 32),
    options: StudyOptions | None = None,
) -> pandas.DataFrame:
    """One row a model, as `headscope evaluate` prints it, the first being the baseline; `speed` adds times.

    With `speed` there is a row for each model and batch size.

    Raises:
        HeadscopeError: a model or the data cannot be used, or the models cannot be compared.
    """
    require_whole(options and options.load, "evaluate")
    names = [models] if isinstance(models, str) else list(models)
    if not names:
        raise UsageError("evaluate needs a model")
    sizes = tuple(speed_batches) if speed else ()
    return comparison.compare(names, data, options, metric=metric, tokens=tokens, speed=sizes).table.frame()


def similarity(
    model: str,
    data: str | None = None,
    *,
    other: str | None = None,
    measures: Sequence[str] | None = None,
    by: str | None = None,
    top: int | None = None,
    threshold: float | None = None,
    head: str | None = None,
    same_layer: bool = False,
    exact: bool = False,
    importance: bool = False,
    matrix: str | None = None,
    clusters: int | str | None = None,
    options: StudyOptions | None = None,
) -> pandas.DataFrame:
    """Pairs of heads, most alike first, as `headscope similarity` prints them; `other` is a second model.

    The first of `measures` orders the pairs, or `by`. With `matrix` (a measure) the square matrix instead, with
    `clusters` (a number or "auto") one row per head with its cluster by the measure `by`.

    Raises:
        HeadscopeError: a model or the data cannot be used, or a measure needs data that is not given.
    """
    if matrix is not None and clusters is not None:
        raise UsageError("matrix and clusters are two reports")
    if clusters is not None and (
        other is not None or (clusters != "auto" and (isinstance(clusters, str) or clusters < 1))
    ):
        raise UsageError(f"clusters={clusters!r}: expected a positive number or 'auto', and one model")
    party = open_party([model] if other is None else [model, other], data, options or StudyOptions())
    if matrix is not None or clusters is not None:
        one = matrix or by or (measures or default_measures(data is not None))[0]
        found = compare_heads(party, Question((one,), exact=True))
        if matrix is not None:
            return similarity_report.matrix_table(found).frame()
        return similarity_report.cluster_table(found, clusters if isinstance(clusters, int) else None).frame()
    question = Question(
        tuple(measures or ()),
        by=by,
        top=top,
        threshold=threshold,
        head=head,
        same_layer=same_layer,
        exact=exact,
        importance=importance,
    )
    return similarity_report.pair_table(compare_heads(party, question)).frame()


def prune(
    model: str,
    data: str | None = None,
    output: str | Path | None = None,
    *,
    ratio: float | None = None,
    heads: str | None = None,
    plan: str | Path | None = None,
    keep_metric: float | None = None,
    max_loss_increase: float | None = None,
    target_parameters: int | None = None,
    merge_kv: int | None = None,
    criterion: str = "auto",
    scores: str | Path | None = None,
    by: str | None = None,
    scope: str = "model",
    unit: str = "auto",
    rounds: int = 1,
    min_heads: int = 1,
    layout: str = "auto",
    metric: str | None = None,
    eval_data: str | None = None,
    compensate: bool | None = None,
    max_shard_size: str = SHARD_SIZE,
    keep_extra: bool = False,
    force: bool = False,
    push_to_hub: str | None = None,
    options: StudyOptions | None = None,
) -> Pruned:
    """Remove heads and write the verified checkpoint `output`, as `headscope prune` does; without it, only plan.

    Exactly one of `ratio`, `heads`, `plan`, `keep_metric`, `max_loss_increase` and `target_parameters` says how many;
    or `merge_kv` says how many key/value heads each site is left with, merged from those it has, and no head goes.
    `compensate` refits what the heads that stay write by (default: where there is `data`). The result holds the `plan`,
    the costs and the quality before and after, with and without repair (`verdict`), and the proof (`verification`).
    The number of steps that train `gates` is in `options`, as the seed is.

    Raises:
        HeadscopeError: the request cannot be met, or the proof failed; nothing is left on disk then.
    """
    require_whole(options and options.load, "prune")
    request = Request(
        ratio=ratio,
        heads=heads,
        plan=None if plan is None else Path(plan),
        keep_metric=keep_metric,
        max_loss_increase=max_loss_increase,
        target_parameters=target_parameters,
        merge_kv=merge_kv,
        criterion=criterion,
        scores=None if scores is None else Path(scores),
        by=by,
        scope=scope,
        unit=unit,
        rounds=rounds,
        min_heads=min_heads,
        masked=layout == "masked",
    )
    wanted = pruning.PruneOptions(
        request,
        options or StudyOptions(),
        layout=layout,
        metric=metric,
        eval_data=eval_data,
        compensate=compensate,
        publication=Publication(max_shard_size, keep_extra=keep_extra, force=force),
    )
    if push_to_hub is not None:
        check_repository(push_to_hub)
    done = pruning.prune(model, data, None if output is None else Path(output), wanted)
    if push_to_hub is not None and done.folder is not None:
        upload(done.folder, push_to_hub, force=force)
    return done


def curve(
    model: str,
    data: str,
    *,
    criterion: str = "auto",
    scores: str | Path | None = None,
    by: str | None = None,
    scope: str = "model",
    unit: str = "auto",
    min_heads: int = 1,
    layout: str = "auto",
    metric: str | None = None,
    eval_data: str | None = None,
    compensate: bool | None = None,
    options: StudyOptions | None = None,
) -> pandas.DataFrame:
    """One row for each order of removal and number of heads, as `headscope prune --curve` writes it.

    Removes up to 0.9 of the heads by the criterion, with repair (unless `compensate` is False) and without, and without
    repair by Michel's importance, by the same normalised within each layer, and in three random orders. `layout`
    "masked" lets any heads go.

    Raises:
        HeadscopeError: the model or the data cannot be used, or no head can be removed.
    """
    require_whole(options and options.load, "a curve")
    if layout not in ("auto", "masked"):
        raise UsageError(f"layout={layout!r}: a curve writes no checkpoint; expected auto or masked")
    request = Request(
        ratio=FURTHEST,
        criterion=criterion,
        scores=None if scores is None else Path(scores),
        by=by,
        scope=scope,
        unit=unit,
        min_heads=min_heads,
        masked=layout == "masked",
    )
    wanted = pruning.PruneOptions(
        request,
        options or StudyOptions(),
        layout=layout,
        metric=metric,
        eval_data=eval_data,
        compensate=compensate,
    )
    return curve_report.curve_table(curves.trade_off(model, data, wanted)).frame()


def load(
    path: str | Path, *, device: str = "auto", dtype: str = "auto", revision: str | None = None
) -> PreTrainedModel:
    """The model in a folder or of a Hub id, ready for use or training; pruned ones of any layout, running no code of
    theirs.

    `dtype` "auto" is float32 on a CPU and bfloat16 on a GPU; the model is in evaluation mode.

    Raises:
        HeadscopeError: it cannot be loaded as its files say.
    """
    options = LoadOptions(device=device, dtype=dtype, revision=revision)
    return models.load(str(path), options).model.requires_grad_(True)


def find_sites(model: PreTrainedModel) -> tuple[Site, ...]:
    """The attention sites of a loaded model, with the parameters of each head.

    Raises:
        UnsupportedModel: none was found.
    """
    return discovery.find_sites(model).sites
