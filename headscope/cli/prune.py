"""`headscope prune`: remove attention heads and write a smaller checkpoint with a proof of what it computes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope import registry
from headscope.cli import options as opt
from headscope.cli import processes
from headscope.cli.curves import as_curve, show_curve
from headscope.cli.settings import Settings, settings
from headscope.errors import UsageError

if TYPE_CHECKING:
    from headscope.pruning import PruneOptions

SCOPES = ("model", "layer", "uniform")
UNITS = ("auto", "head", "group")
LAYOUTS = ("auto", "native", "portable", "masked")
_CRITERIA = ", ".join(["auto", *registry.names("criteria")])


@opt.sharing("output")
def prune(
    model: opt.ModelArg,
    data: opt.DataOpt = None,
    folder: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Checkpoint to write."),
    ] = None,
    ratio: Annotated[
        str | None, typer.Option("--ratio", metavar="R", help="Remove this share of all heads (0.3).")
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option("--heads", metavar="SPEC", help="Remove these: 3:0,1;5:2 or full labels."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Remove those of a plan that a run wrote.")
    ] = None,
    keep_metric: Annotated[
        str | None,
        typer.Option("--keep-metric", metavar="0.99", help="Remove as many as keep this share of the metric."),
    ] = None,
    max_loss_increase: Annotated[
        str | None,
        typer.Option("--max-loss-increase", metavar="X", help="Remove as many as raise the loss by X nats."),
    ] = None,
    target_parameters: Annotated[
        str | None,
        typer.Option("--target-parameters", metavar="N", help="Remove as few as leave N parameters in all."),
    ] = None,
    merge_kv: Annotated[
        str | None,
        typer.Option("--merge-kv", metavar="N", help="Remove none: merge key/value heads until each site has N."),
    ] = None,
    criterion: Annotated[str, typer.Option("--criterion", help=f"{_CRITERIA}; lowest goes first.")] = "auto",
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="N", help="Steps of training with --criterion gates; default 200.")
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option("--scores", metavar="FILE", help="Choose by scores that inspect wrote (with --by)."),
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="COLUMN", help="The column of --scores; lowest goes first.")
    ] = None,
    scope: Annotated[str, typer.Option("--scope", help="model, layer or uniform (as many in every site).")] = "model",
    rounds: Annotated[str, typer.Option("--rounds", metavar="N", help="Score anew N - 1 times on the way.")] = "1",
    min_heads: Annotated[str, typer.Option("--min-heads", metavar="N", help="Heads left in each site.")] = "1",
    unit: Annotated[str, typer.Option("--unit", help="auto, head or group (of a key/value head).")] = "auto",
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="NAME", help="The metric that is judged; as of evaluate.")
    ] = None,
    eval_data: Annotated[
        str | None,
        typer.Option("--eval-data", metavar="DATA", help="Held-out data; default a quarter."),
    ] = None,
    layout: Annotated[str, typer.Option("--layout", help=f"{', '.join(LAYOUTS)}.")] = "auto",
    compensate: Annotated[
        bool | None,
        typer.Option("--compensate/--no-compensate", help="Refit what the kept heads write by; with data, on."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="5GB", help="Largest file of weights.")
    ] = "5GB",
    keep_extra: Annotated[
        bool, typer.Option("--keep-extra", help="Copy every other file too, and tensors that the model does not use.")
    ] = False,
    push_to_hub: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="ID", help="Then upload the checkpoint to this repository.")
    ] = None,
    curve: Annotated[
        Path | None,
        typer.Option("--curve", metavar="FILE", help="Write the whole trade-off, 0 to 90 %, and no checkpoint."),
    ] = None,
    *,
    shared: dict[str, Any],
) -> None:
    """Remove heads of MODEL and write a smaller checkpoint, proved to compute what the masked model computes."""
    began = time.monotonic()
    given = settings(locals() | shared)
    if processes.asked(given) and not _shares(given):
        processes.refuse_ranks(given, "pruning by anything but a measure on --data")
    if not given.first and given.dry_run:
        return
    _consider(given)
    processes.consider(given)
    if curve is not None:
        given = as_curve(given)
        show_curve(given, _options(given))
        return
    processes.fan_out(given)
    options = _options(given)
    given.check_outputs()
    output = None if given.dry_run else folder
    if output is not None and given.first:
        from headscope.folder_writing import check_target

        check_target(output, Path(model), force=shared["force"])
    given.check_model()
    talk = given.talk
    from headscope.footprint import resident
    from headscope.prune_report import PRUNE_COLUMNS, foreseen, prune_table, removal, summary
    from headscope.pruning import Pruning
    from headscope.reports._removal import removal_figure

    if not given.dry_run:
        given.require_columns([column.name for column in PRUNE_COLUMNS])
    libraries, start = resident(), time.monotonic() - began
    with talk.progress() as progress:
        with processes.sharing(given) as share:
            pruning = Pruning(model, data, options)
            pruning.share(share, progress)
        if not given.first:  # all that follows is for one process
            return
        done = pruning.run(output, progress)
    talk.summary(summary(done))
    talk.summary(foreseen(done, taken=time.monotonic() - began, start=start, libraries=libraries))
    given.report(prune_table(done), talk, picture=lambda: removal_figure(removal(done)))
    if push_to_hub is not None and done.folder is not None:
        from headscope.upload import upload

        address = upload(done.folder, push_to_hub, force=shared["force"])
        talk.say(f"pushed to {address}")


def _shares(given: Settings) -> bool:
    """Whether heads are chosen by a measure, whose passes over the data can be shared out."""
    from headscope.criteria import load_criterion

    raw = given.raw
    named = [name for name in ("heads", "plan", "merge_kv", "scores", "curve") if raw[name] is not None]
    if given.data is None or named:
        return False
    known = raw["criterion"] in registry.names("criteria")
    return not known or load_criterion(raw["criterion"]).shared  # `auto` compares measures too


def _consider(given: Settings) -> None:
    """Refuse what cannot be meant, before anything slow."""
    raw = given.raw
    for name, known in (("scope", SCOPES), ("unit", UNITS), ("layout", LAYOUTS)):
        opt.one_of(f"--{name}", raw[name], known)
    opt.one_of("--criterion", raw["criterion"], ("auto", *registry.names("criteria")))
    if raw["folder"] is None and raw["curve"] is None and not given.dry_run:
        raise UsageError("prune writes a checkpoint", hint="give -o DIR, or --dry-run to see the plan")
    if raw["push_to_hub"] is not None:
        from headscope.upload import check_repository

        check_repository(raw["push_to_hub"])
    if raw["compensate"] and given.data is None:
        raise UsageError("--compensate fits to data, and there is none", hint="give --data FILE")
    if raw["eval_data"] is not None and given.data is None:
        raise UsageError("--eval-data goes with --data")
    if raw["metric"] is not None:
        if given.data is None:
            raise UsageError("--metric is measured on data, and there is none", hint="give --data FILE")
        from headscope.metrics import require_known

        require_known(raw["metric"])


def _options(given: Settings) -> PruneOptions:
    """The request in the library's words.

    Raises:
        UsageError: it contradicts itself.
    """
    from headscope.pruning import PruneOptions
    from headscope.publish import Publication
    from headscope.request import Request

    raw = given.raw
    request = Request(
        ratio=opt.real("--ratio", raw["ratio"], wanted="a share 0 <= R < 1 of the heads"),
        heads=raw["heads"],
        plan=raw["plan"],
        keep_metric=opt.real("--keep-metric", raw["keep_metric"]),
        max_loss_increase=opt.real("--max-loss-increase", raw["max_loss_increase"]),
        target_parameters=opt.positive("--target-parameters", raw["target_parameters"]),
        merge_kv=opt.positive("--merge-kv", raw["merge_kv"]),
        criterion=raw["criterion"],
        scores=raw["scores"],
        by=raw["by"],
        scope=raw["scope"],
        unit=raw["unit"],
        rounds=opt.positive("--rounds", raw["rounds"]) or 1,
        min_heads=opt.natural("--min-heads", raw["min_heads"]),
        masked=raw["layout"] == "masked",
    )
    return PruneOptions(
        request,
        study=given.study_options(),
        layout=raw["layout"],
        metric=raw["metric"],
        eval_data=raw["eval_data"],
        compensate=raw["compensate"],
        publication=Publication(raw["max_shard_size"], keep_extra=raw["keep_extra"], force=raw["force"]),
    )
