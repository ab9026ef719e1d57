"""`headscope inspect`: describe every attention head of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope import registry
from headscope.cli import options as opt
from headscope.cli import processes, relations
from headscope.cli.maps import show_map
from headscope.cli.settings import Settings, settings
from headscope.cli.talk import Talk
from headscope.errors import CheckFailed, UsageError, nearest
from headscope.head_pictures import drawable, drawn, head_picture

if TYPE_CHECKING:
    from headscope.tables import Table

VIEWS = ("head", "layer", "model")
_MEASURES = ", ".join([*registry.names("scores"), "all"])


@opt.sharing()
def inspect(
    model: opt.ModelArg,
    data: opt.DataOpt = None,
    measures: Annotated[
        str | None, typer.Option("--measures", metavar="A,B", help=f"{_MEASURES}; default by data.")
    ] = None,
    by: Annotated[str, typer.Option("--by", help="head, layer or model.")] = "head",
    check: Annotated[
        bool, typer.Option("--check", help="Check the structure instead; exit 1 if a check fails.")
    ] = False,
    structure: Annotated[bool, typer.Option("--structure", help="Show how heads map to parameters instead.")] = False,
    annotations: Annotated[
        str | None, typer.Option("--annotations", metavar="FILE", help="CoNLL-U: show syntactic roles instead.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="TEXT", help="Show the attention map of --head for this text instead."),
    ] = None,
    head: Annotated[str | None, typer.Option("--head", metavar="LABEL", help="The head whose map is shown.")] = None,
    target_text: Annotated[
        str | None, typer.Option("--target-text", metavar="TEXT", help="What the decoder reads; default: it writes.")
    ] = None,
    draws: Annotated[str, typer.Option("--draws", metavar="N", help="Label draws an example for sensitivity.")] = "1",
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="N", help="Examples that an ablated head is run on, on average; default all."),
    ] = None,
    tokens: Annotated[str, typer.Option("--tokens", metavar="N", help="Text length that costs are given for.")] = "512",
    *,
    shared: dict[str, Any],
) -> None:
    """Describe every attention head of MODEL; with --data, also measure which heads matter."""
    given = settings(locals() | shared)
    length = opt.positive("--tokens", tokens) or 512
    talk = given.talk
    chosen = opt.listed(measures)
    mapped = text is not None or head is not None or target_text is not None
    shared_out = data is not None and not (mapped or check or structure or annotations is not None or by == "model")
    if not shared_out:
        processes.refuse(given, "a report without a pass over --data")
    if not given.first and (not shared_out or given.dry_run):
        return
    processes.consider(given)
    if mapped:
        show_map(given, talk)
        return
    _consider(by, chosen, check, structure, shared["plot"])
    relations.consider(given.raw)
    given.check_outputs()
    if annotations is not None and not given.dry_run:
        relations.report(given, talk)
        return
    processes.fan_out(given)
    _foresee(given, by, chosen, check, structure)
    given.check_model()
    if check and not given.dry_run:
        _check(given, talk)
        return
    table = _table(given, talk, by, chosen, structure=structure, tokens=length)
    plain = by == "model" or structure
    picture = None if plain or given.dry_run else head_picture(table)
    on_screen = drawn(table.names) if by == "head" and not plain else None
    given.report(table, talk, picture=picture, on_screen=on_screen)


def _consider(by: str, measures: list[str] | None, check: bool, structure: bool, plot: Path | None) -> None:
    """Refuse what cannot be meant, before anything slow."""
    opt.one_of("--by", by, VIEWS)
    known = [*registry.names("scores"), "all"]
    for name in measures or []:
        if name not in known:
            raise UsageError(f"no measure {name!r}", hint=nearest(name, known))
    if measures == []:
        raise UsageError("--measures names none", hint="known: " + ", ".join(known))
    if check and structure:
        raise UsageError("--check and --structure are two reports", hint="ask for one of them")
    if plot is not None and (check or structure or by == "model"):
        raise UsageError("--plot draws heads or layers", hint="leave out --check, --structure and --by model")


def _foresee(given: Settings, by: str, measures: list[str] | None, check: bool, structure: bool) -> None:
    """Refuse columns and pictures that the report will not have, and measures without data: a run may take hours."""
    asked = given.shown or given.raw["sort"]
    scored = not (check or structure or by == "model" or (by == "layer" and given.data is None and measures is None))
    names = _scored_names(given, by, measures) if scored and (asked or measures or given.raw["plot"]) else None
    if names is None:
        names = _plain_names(by, check, structure)
    if not given.dry_run:
        given.require_columns(names)
    if given.raw["plot"] and not drawable(names):
        raise UsageError("--plot has nothing to draw of these measures", hint="--measures importance")


def _plain_names(by: str, check: bool, structure: bool) -> list[str]:
    """The columns of reports without measures."""
    from headscope import inspection

    if check:
        from headscope.checks import CHECK_COLUMNS

        return [column.name for column in CHECK_COLUMNS]
    tables = {"head": inspection.HEAD_COLUMNS, "layer": inspection.LAYER_COLUMNS, "model": inspection.MODEL_COLUMNS}
    return [column.name for column in (inspection.STRUCTURE_COLUMNS if structure else tables[by])]


def _scored_names(given: Settings, by: str, measures: list[str] | None) -> list[str]:
    """The columns of a report of heads or layers, as far as they are known before the data is: all that may come."""
    from headscope.scores import Need
    from headscope.study import load_scores

    scores = load_scores(measures or (["weights"] if given.data is None else registry.names("scores")))
    hungry = [name for name, score in scores.items() if given.data is None and score.needs - {Need.WEIGHTS}]
    if hungry:
        raise UsageError(f"{', '.join(hungry)} cannot be measured without data", hint="give --data FILE")
    columns = [column.name for score in scores.values() for column in score.columns]
    return _plain_names(by, False, False) + [name for name in columns if by == "head" or not name.endswith("_se")]


def _table(given: Settings, talk: Talk, by: str, measures: list[str] | None, *, structure: bool, tokens: int) -> Table:
    if given.dry_run:
        from headscope.estimate import estimate

        return estimate(given.model, given.data, given.study_options(), measures)
    plain = given.data is None and measures is None and not structure
    if by != "head" and plain and given.raw["device"] in ("auto", "cpu"):
        from headscope.survey import survey

        quick = survey(given.model, by, tokens, revision=given.revision)
        if quick is not None:
            return quick
    from headscope import inspection
    from headscope.study import Study

    if structure or by == "model":
        study = Study.open(given.model, given.data, given.study_options())
        return inspection.structure_table(study) if structure else inspection.model_table(study, tokens)
    with processes.sharing(given) as share:
        study = Study.open(given.model, given.data, given.study_options())
        study.share = share
        with talk.progress() as progress:
            scores = study.scores(measures, progress=progress)
    talk.summary(inspection.summary(study, scores))
    return inspection.layer_table(study, scores, tokens) if by == "layer" else inspection.head_table(study, scores)


def _check(given: Settings, talk: Talk) -> None:
    from headscope.checks import check, failures

    table = check(given.model, given.load_options(), data=given.data, reading=given.study_options())
    given.report(table, talk)
    if count := failures(table):
        raise CheckFailed(f"{count} of {len(table.rows)} structure checks failed")
