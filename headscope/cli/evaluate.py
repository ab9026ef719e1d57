"""`headscope evaluate`: what one or several models do on the same data, what they cost and how fast they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from headscope.cli import options as opt
from headscope.cli import processes
from headscope.cli.settings import Settings, settings
from headscope.errors import UsageError

_METRICS = "accuracy, f1, token-accuracy, exact-match, perplexity, pearson, r2 or mse"


@opt.sharing()
def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models; the first is the baseline.")],
    data: opt.DataOpt = None,
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="NAME", help=f"{_METRICS}; default by task and data.")
    ] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Also time the models, a row for each batch size.")] = False,
    speed_batches: Annotated[
        str, typer.Option("--speed-batches", metavar="A,B", help="Batch sizes that --speed times.")
    ] = "1,8,32",
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="N", help="Text length that costs and times are given for.")
    ] = "512",
    *,
    shared: dict[str, Any],
) -> None:
    """Judge each MODEL on --data, and how far it is from the first one."""
    given = settings(locals() | shared | {"model": models[0]})
    if not given.first and given.dry_run:
        return
    processes.consider(given)
    length = opt.positive("--tokens", tokens) or 512
    sizes = _batch_sizes(speed_batches)
    if data is None:
        raise UsageError("evaluate needs data", hint="give --data FILE")
    given.check_outputs()
    processes.fan_out(given, models)
    _foresee(given, metric, speed)
    for model in models:
        replace(given, model=model).check_model()
    talk = given.talk
    timed = sizes if speed else []
    if given.dry_run:
        from headscope.outlay import outlay

        given.report(outlay(models, data, given.study_options(), metric=metric, speed=timed), talk)
        return
    from headscope.comparison import judge_models
    from headscope.comparison_picture import comparison_picture

    with processes.sharing(given) as share, talk.progress() as progress:
        judged = judge_models(models, data, given.study_options(), metric=metric, progress=progress, share=share)
    if not given.first:  # this process leaves, so that nothing disturbs what is timed
        return
    found = judged.report(tokens=length, speed=timed, alone=given.standing.world > 1)
    talk.summary(list(found.sentences))
    given.report(found.table, talk, picture=comparison_picture(found.table))


def _batch_sizes(value: str) -> list[int]:
    """The batch sizes of --speed-batches.

    Raises:
        UsageError: there is none, or one is no positive whole number.
    """
    sizes = [opt.positive("--speed-batches", part) or 1 for part in opt.listed(value) or []]
    if not sizes:
        raise UsageError("--speed-batches names none")
    return list(dict.fromkeys(sizes))


def _foresee(given: Settings, metric: str | None, speed: bool) -> None:
    """Refuse a metric and columns that do not exist before anything slow."""
    from headscope.comparison_columns import columns_of
    from headscope.metrics import require_known

    if metric is not None:
        require_known(metric)
    if not given.dry_run:
        given.require_columns([column.name for column in columns_of(speed=speed)])
