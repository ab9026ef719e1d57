"""What commands say on stderr: progress, notes and summaries; stdout is left to data."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headscope.tables import Table

_LONGEST = 2000
"""Characters of a note or a line of a summary."""
Progress = Callable[[int, int], None]


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
        """A progress bar on stderr while the block runs, where stderr is a terminal."""
        from headscope.reports import use_color

        if self.quiet or not self.bars or not sys.stderr.isatty() or not use_color(sys.stderr):
            yield None  # a bar is drawn with terminal sequences, which NO_COLOR and TERM=dumb forbid
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("examples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            bar = bars.add_task("examples", total=None)
            yield lambda done, total: bars.update(bar, completed=done, total=total)
