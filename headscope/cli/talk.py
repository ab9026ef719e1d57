"""What commands say on stderr: progress, notes and summaries; stdout is left to data."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope.interrupt import raise_interrupts

if TYPE_CHECKING:
    from headscope.tables import Table

_LONGEST = 2000
"""Characters of a note or a line of a summary."""
Progress = Callable[[int, int], None]
MINUTE = 60.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Talk:
    """How much to say."""

    quiet: bool = False
    verbose: bool = False
    bars: bool = True

    def say(self, line: str) -> None:
        """One line on stderr, unless quiet."""
        if not self.quiet:
            from headscope.reports._cells import safe_line

            print(safe_line(line, _LONGEST), file=sys.stderr)  # noqa: T201

    def summary(self, lines: list[str]) -> None:
        """What was measured."""
        for line in lines:
            self.say(line)

    def notes(self, table: Table) -> None:
        """What a reader of the report should know; with --verbose also what the numbers rest on."""
        for note in table.notes:
            self.say(f"note: {note}")
        if self.verbose and table.provenance is not None:
            for name, value in table.provenance.as_dict().items():
                self.say(f"{name}: {value}")

    def heat_map(self, values: dict[str, list[list[float]]], column: str) -> None:
        """The scores as a picture under a table on stdout."""
        from headscope.reports import use_color
        from headscope.reports._heatmap import render

        width = shutil.get_terminal_size().columns
        print(render(values, title=column, width=width, color=use_color(sys.stdout)), flush=True)  # noqa: T201

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress | None]:
        """Progress on stderr while the block runs: a bar on a terminal, a line a minute where there is none."""
        from headscope.reports import use_color

        if self.quiet or not self.bars:
            yield None
            return
        if not sys.stderr.isatty() or not use_color(sys.stderr):
            yield Lines(self.say)  # a bar is drawn with terminal sequences, which NO_COLOR and TERM=dumb forbid
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        rate = TextColumn("{task.fields[rate]}")
        columns = (TextColumn("examples"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
        pace = Pace()
        raise_interrupts()  # the cursor is hidden while the bar is drawn
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            bar = bars.add_task("examples", total=None, rate="")

            def update(done: int, total: int) -> None:
                speed = pace.of(done)
                bars.update(bar, completed=done, total=total, rate="" if speed is None else f"{speed:.3g}/s")

            yield update


class Pace:
    """Examples a second, from the first that was told on; a pass that begins anew is counted anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = (0, clock())
        self._last: int | None = None

    def of(self, done: int) -> float | None:
        """The rate now; None where nothing can be said yet."""
        now = self._clock()
        if self._last is None or done < self._last:
            self._first = (done, now)
        self._last = done
        count, begin = self._first
        return (done - count) / (now - begin) if done > count and now > begin else None


class Lines:
    """Says a line a minute: how many examples are done, how fast, and how long the others will take."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock, self._pace = say, clock, Pace(clock)
        self._next = clock() + MINUTE

    def __call__(self, done: int, total: int) -> None:
        rate = self._pace.of(done)
        if self._clock() < self._next:
            return
        self._next = self._clock() + MINUTE
        speed = ""
        if rate is not None:
            minutes, seconds = divmod(round((total - done) / rate), 60)
            speed = f", {rate:.3g} a second, {minutes}:{seconds:02d} left"
        self._say(f"{done:,} of {total:,} examples{speed}")
