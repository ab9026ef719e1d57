"""`headscope prune MODEL --curve FILE`: what is lost over the whole range of heads removed, instead of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headscope.cli.settings import Settings
from headscope.curve_columns import CURVE_COLUMNS, FURTHEST
from headscope.errors import UsageError
from headscope.request import Request

if TYPE_CHECKING:
    from headscope.curves import Curve
    from headscope.pruning import PruneOptions
    from headscope.reports._picture import Picture

_OF_A_CHECKPOINT = {
    "rounds": "1",
    "max_shard_size": "5GB",
    "keep_extra": False,
    "push_to_hub": None,
    "layout": ("auto", "masked"),
}
"""Options that say how one checkpoint is made, with the values that a curve goes with."""


def as_curve(given: Settings) -> Settings:
    """The settings of a curve to FILE, checked before anything slow.

    Raises:
        UsageError: an option asks for a checkpoint, or there is no data to judge on.
        OutputError: the file or the picture cannot be written.
        ModelError: there is no such model.
    """
    raw = given.raw
    _refuse_a_checkpoint(given)
    if given.data is None:
        raise UsageError("--curve is judged on data, and there is none", hint="give --data FILE")
    if raw["plot"] is not None and raw["plot"] == raw["curve"]:
        raise UsageError(f"--curve and --plot are both {raw['plot']}")
    if not given.dry_run:
        given.require_columns([column.name for column in CURVE_COLUMNS])
    given = replace(given, raw=raw | {"output": raw["curve"], "ratio": str(FURTHEST)})
    given.check_outputs()
    given.check_model()
    return given


def _refuse_a_checkpoint(given: Settings) -> None:
    raw = given.raw
    if raw["folder"] is not None:
        raise UsageError("--curve writes a report and --output a checkpoint", hint="ask for one of them")
    if ways := [name for name in Request.WAYS if raw[name] is not None]:
        raise UsageError(f"--{ways[0].replace('_', '-')} says how much to remove, and --curve shows the whole range")
    for name, plain in _OF_A_CHECKPOINT.items():
        if raw[name] not in (plain if isinstance(plain, tuple) else (plain,)):
            raise UsageError(f"--{name.replace('_', '-')} is about a checkpoint, and --curve writes none")


def show_curve(given: Settings, options: PruneOptions) -> None:
    """The rows to the file, and with --plot the picture; stdout stays empty, but for a dry run."""
    if given.dry_run:
        from headscope.curve_outlay import curve_outlay

        given.report(curve_outlay(given.model, given.data, options), given.talk)
        return
    from headscope.curve_report import curve_table, summary
    from headscope.curves import trade_off

    talk = given.talk
    with talk.progress() as progress:
        found = trade_off(given.model, given.data, options, progress)
    talk.summary(summary(found))
    given.report(curve_table(found), talk, picture=_drawn(given, found))


def _drawn(given: Settings, found: Curve) -> Picture:
    from headscope.curve_report import lines, panels
    from headscope.reports._curve import curve_figure

    title = f"{Path(given.model).name} without some of its {found.heads} heads, on {found.examples} held-out examples"
    return partial(curve_figure, lines(found), panels(found), title=title)
