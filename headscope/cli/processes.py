"""Many processes and finished work: what options and environment ask for, and the share of a run that follows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from headscope import launching
from headscope.cli.settings import Settings
from headscope.errors import Stopped, UsageError
from headscope.interrupt import SUPERVISOR, Terminated
from headscope.places import require_folder

if TYPE_CHECKING:
    from headscope.shares import Share

_OPTIONS = ("processes", "work", "timeout")


def refuse(given: Settings, what: str) -> None:
    """Refuse several processes and kept work for what makes no pass that could be shared out.

    Raises:
        UsageError: they are asked for.
    """
    if named := _named(given):
        raise UsageError(
            f"{what} is not shared out: it runs in one process and keeps no units", hint=f"leave out {named[0]}"
        )


def asked(given: Settings) -> bool:
    """Whether there are several processes, or an option is about them or about kept work."""
    return given.standing.world > 1 or bool(_named(given))


def _named(given: Settings) -> list[str]:
    """The options about several processes and kept work that were given."""
    return [f"--{name}" for name in _OPTIONS if given.raw[name] is not None]


def refuse_ranks(given: Settings, what: str) -> None:
    """Refuse to do one thing several times at once under a launcher.

    Raises:
        UsageError: there are several processes, or kept work is asked for.
    """
    refuse(given, what)
    if given.standing.world > 1:
        raise UsageError(
            f"{what} is not shared out, and WORLD_SIZE promises {given.standing.world} processes",
            hint="start it without torchrun or accelerate",
        )


def consider(given: Settings) -> None:
    """Refuse what cannot be meant, before anything slow.

    Raises:
        UsageError: an option goes with others that are not there, or contradicts the launcher.
        OutputError: the folder of finished work cannot be used.
    """
    raw, world = given.raw, given.standing.world
    if world > 1 and raw["processes"] is not None and given.processes != world:
        raise UsageError(f"--processes {given.processes}, but WORLD_SIZE promises {world}", hint="leave it out")
    if raw["timeout"] is not None and max(world, given.processes) == 1:
        raise UsageError("--timeout is about several processes", hint="--processes N starts them")
    if raw["resume"] == "never" and raw["work"] is None:
        raise UsageError("--resume is about finished work, and none is kept", hint="--work DIR keeps it")
    if max(world, given.processes) > 1 and "-" in (given.data, raw.get("eval_data")):
        raise UsageError("data from standard input (-) can be read by one process only", hint="give a file")
    if raw["work"] is not None:
        require_folder(raw["work"])
        _require_no_model(given)


def _require_no_model(given: Settings) -> None:
    """Refuse to keep units among the weights that are read, which they would change, or where a checkpoint goes.

    Raises:
        UsageError: the folder is that of a model.
    """
    raw = given.raw
    folders = filter(None, [given.model, *raw.get("models", ()), raw.get("other"), raw.get("folder")])
    if os.path.realpath(raw["work"]) in map(os.path.realpath, folders):
        raise UsageError(f"--work {raw['work']} is the folder of a model", hint="name another, for the units alone")


def fan_out(given: Settings, models: Sequence[str] = ()) -> None:
    """With --processes, start them and leave with their exit code when they are done; else go on.

    Called before anything imports torch, so that the process that only watches is small and the others start at once;
    what it refuses by then, and `models` that are none (that of `given` by default), needs no process to be refused.

    Raises:
        RankError: one was killed.
        HeadscopeError: there is no such model.
    """
    if given.standing.world > 1 or given.processes == 1 or given.dry_run:
        return
    for model in models or [given.model]:
        replace(given, model=model).check_model()
    with _going_on(given):
        ranks = launching.start(launching.this_command(), given.processes)
        raise typer.Exit(launching.watch(ranks, hint=_hint(given)))


@contextlib.contextmanager
def sharing(given: Settings) -> Iterator[Share]:
    """The share of this process in a pass over the data, for as long as the block runs.

    Raises:
        RankError: another process does not come, ends or stands still.
    """
    from headscope.shares import Share

    if given.data is None or given.dry_run:
        yield Share()
        return
    from headscope.ranks import TIMEOUT, Ranks
    from headscope.work import WorkFolder

    raw = given.raw
    work = None if raw["work"] is None else WorkFolder(raw["work"], anew=raw["resume"] == "never")
    with _going_on(given):
        if given.standing.world == 1:
            yield Share(work=work)
            return
        with Ranks(given.standing, timeout=given.timeout or TIMEOUT, hint=_hint(given)) as ranks:
            yield Share(ranks, work)


@contextlib.contextmanager
def _going_on(given: Settings) -> Iterator[None]:
    """Let a run that is stopped from outside, and keeps its units, say how it goes on.

    Raises:
        Stopped: it was.
    """
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        if given.raw["work"] is None or SUPERVISOR in os.environ:
            raise
        word, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        raise Stopped(word, code, hint=_hint(given)) from None


def _hint(given: Settings) -> str:
    """How a run that was broken off goes on."""
    work = given.raw["work"]
    if work is None:
        return "with --work DIR finished units are kept, and the same command goes on from there"
    again = "the same command" + (" without --resume never" if given.raw["resume"] == "never" else "")
    return f"{again} goes on from the finished units in {work}"
