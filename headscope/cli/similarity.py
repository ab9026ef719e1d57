"""`headscope similarity`: which heads attend alike, and which write alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope import registry
from headscope.cli import options as opt
from headscope.cli import processes
from headscope.cli.settings import Settings, settings
from headscope.errors import UsageError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headscope.likeness import Likeness, Question
    from headscope.reports._picture import Picture

PAIRS = ("all", "same-layer")
_MEASURES = ", ".join([*registry.names("measures"), "all"])
_ABOUT_PAIRS = ("threshold", "head", "importance", "exact")
"""Options about pairs, which a matrix and clusters do not show."""


@opt.sharing()
def similarity(
    model: opt.ModelArg,
    data: opt.DataOpt = None,
    measures: Annotated[
        str | None,
        typer.Option("--measures", metavar="A,B", help=f"{_MEASURES}; the first orders the pairs. Default by data."),
    ] = None,
    pairs: Annotated[str, typer.Option("--pairs", help="all or same-layer.")] = "all",
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare all pairs exactly, not only those that are reported.")
    ] = False,
    threshold: Annotated[
        str | None, typer.Option("--threshold", metavar="X", help="Only pairs at least this much alike.")
    ] = None,
    head: Annotated[str | None, typer.Option("--head", metavar="LABEL", help="Only the pairs of this head.")] = None,
    importance: Annotated[bool, typer.Option("--importance", help="Show how important both heads are.")] = False,
    matrix: Annotated[
        str | None, typer.Option("--matrix", metavar="MEASURE", help="Show one measure as a square matrix instead.")
    ] = None,
    clusters: Annotated[
        str | None,
        typer.Option("--clusters", metavar="N|auto", help="Show clusters of heads by the first measure instead."),
    ] = None,
    other: Annotated[
        str | None, typer.Option("--with", metavar="MODEL2", help="Compare the heads of MODEL with those of MODEL2.")
    ] = None,
    *,
    shared: dict[str, Any],
) -> None:
    """Compare the heads of MODEL: what they attend to, what they write, and what their weights do."""
    given = settings(locals() | shared)
    opt.one_of("--pairs", pairs, PAIRS)
    count = opt.positive("--clusters", clusters, word="auto")
    _consider(given)
    if data is None:
        processes.refuse(given, "a comparison of weights")
    if not given.first and (data is None or given.dry_run):
        return
    processes.consider(given)
    given.check_outputs()
    models = [model] if other is None else [model, other]
    processes.fan_out(given, models)
    question = _question(given)
    for name in models:
        replace(given, model=name).check_model()
    if given.dry_run:
        from headscope.pair_estimate import estimate_pairs

        given.report(estimate_pairs(models, data, given.study_options(), question), given.talk)
        return
    from headscope import similarity_report as reports
    from headscope.likeness import compare_heads, open_party

    talk = given.talk
    with processes.sharing(given) as share:
        party = open_party(models, data, given.study_options())
        for study in party.studies:
            study.share = share
        with talk.progress() as progress:
            found = compare_heads(party, question, progress)
    talk.summary(reports.summary(found))
    if matrix is not None:
        table = reports.matrix_table(found)
    else:
        table = reports.pair_table(found) if clusters is None else reports.cluster_table(found, count)
    given.report(table, talk, picture=_drawn(found) if _whole(question) or shared["plot"] is not None else None)


def _consider(given: Settings) -> None:
    """Refuse what cannot be meant, before anything slow."""
    raw = given.raw
    known = [*registry.names("measures"), "all"]
    for name in [*(opt.listed(raw["measures"]) or []), *filter(None, [raw["matrix"]])]:
        if name not in known:
            raise UsageError(f"no measure {name!r}", hint=nearest(name, known))
    if opt.listed(raw["measures"]) == []:
        raise UsageError("--measures names none", hint="known: " + ", ".join(known))
    views = [f"--{name}" for name in ("matrix", "clusters") if raw[name] is not None]
    if len(views) > 1:
        raise UsageError("--matrix and --clusters are two reports", hint="ask for one of them")
    if not views:
        return
    given_too = [name for name in _ABOUT_PAIRS if raw[name]] + (["pairs"] if raw["pairs"] != "all" else [])
    if given_too:
        raise UsageError(f"--{given_too[0]} is about pairs, and {views[0]} is a report of its own")
    if raw["matrix"] is not None and raw["measures"] is not None:
        raise UsageError("--matrix names its measure itself", hint="leave out --measures")
    if raw["matrix"] == "all":
        raise UsageError("--matrix shows one measure", hint="known: " + ", ".join(known[:-1]))
    if raw["clusters"] is not None and raw["other"] is not None:
        raise UsageError("--clusters are of one model", hint="--with MODEL2 matches pairs of heads")


def _question(given: Settings) -> Question:
    """What to measure and to report.

    Raises:
        UsageError: a measure needs data that is not given, or a column does not exist.
    """
    from headscope.likeness import Question, default_measures, needs_data
    from headscope.similarity_report import CLUSTER_COLUMNS, pair_columns

    raw = given.raw
    asked = [raw["matrix"]] if raw["matrix"] is not None else opt.listed(raw["measures"]) or []
    every = default_measures(given.data is not None)
    measures = tuple(every) if not asked or "all" in asked else tuple(dict.fromkeys(asked))
    if raw["clusters"] is not None:
        measures = measures[:1]
    hungry = [*(name for name in measures if needs_data(name)), *(["importance"] if raw["importance"] else [])]
    if given.data is None and hungry:
        raise UsageError(f"{', '.join(hungry)} cannot be measured without data", hint="give --data FILE")
    if raw["matrix"] is None and not given.dry_run:
        pairs = pair_columns(measures, importance=raw["importance"], two=raw["other"] is not None)
        given.require_columns([column.name for column in (pairs if raw["clusters"] is None else CLUSTER_COLUMNS)])
    by = raw["sort"] if raw["sort"] in measures else measures[0]
    whole = raw["matrix"] is not None or raw["clusters"] is not None or raw["plot"] is not None
    return Question(
        measures,
        by=by,
        top=given.top if raw["sort"] in (None, by) and not whole else None,
        threshold=opt.real("--threshold", raw["threshold"]),
        head=raw["head"],
        same_layer=raw["pairs"] == "same-layer",
        exact=raw["exact"] or whole,
        importance=raw["importance"],
    )


def _whole(question: Question) -> bool:
    """Whether every pair is measured, so that there is a whole matrix to draw."""
    few = (question.top, question.threshold, question.head)
    return question.exact or (few == (None, None, None) and not question.same_layer)


def _drawn(found: Likeness) -> Picture:
    def figure() -> Figure:
        from headscope.reports._matrix import matrix_figure
        from headscope.similarity_report import matrix_picture

        names = " and ".join(Path(study.loaded.location.name).name for study in found.party.studies)
        return matrix_figure(matrix_picture(found), title=f"likeness of heads by {found.by}: {names}")

    return figure
