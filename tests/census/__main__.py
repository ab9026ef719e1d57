"""The census of every model type that AutoModel knows: `python -m tests.census --help`."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

from . import rows
from .workers import Limits, run, serve


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for; returns the exit status, 1 where a row says `wrong`."""
    given = parser().parse_args(arguments)
    if given.worker:
        _serve(given.types, given.timeout)
        return 0
    table, start = rows.read(given.output), time.monotonic()
    if not given.summary:
        table = census(given, table)
    print(rows.summary(table.values()))
    if not given.summary:
        print(f"\n{_spent(time.monotonic() - start)}, {given.jobs} processes at a time")
    return int(any(rows.WRONG in row.verdicts.values() for row in table.values()))


def parser() -> argparse.ArgumentParser:
    """The options of the census."""
    found = argparse.ArgumentParser(prog="python -m tests.census", description=__doc__)
    found.add_argument("types", nargs="*", help=argparse.SUPPRESS)
    found.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    found.add_argument("--only", default="", help="model types, separated by commas; the other rows stay")
    found.add_argument("--jobs", type=int, default=2, help="processes at a time")
    found.add_argument("--resume", action="store_true", help="keep rows that were made with this very source")
    found.add_argument(
        "--timeout", type=float, default=Limits.seconds, help="seconds of processor time for one model type"
    )
    found.add_argument("--output", type=Path, default=rows.CENSUS, help="the CSV file")
    found.add_argument("--summary", action="store_true", help="print the counts of the CSV file and do nothing else")
    return found


def census(given: argparse.Namespace, table: dict[str, rows.Row]) -> dict[str, rows.Row]:
    """Judge the types that are asked for and still open; the file is written after each."""
    from .build import model_types

    digest, every = rows.source_digest(), model_types()
    wanted = given.only.split(",") if given.only else every
    unknown = sorted(set(wanted) - set(every))
    if unknown:
        raise SystemExit(f"no such model type: {', '.join(unknown)}")
    if given.resume:
        wanted = [name for name in wanted if name not in table or table[name].source != digest]
    for number, row in enumerate(run(wanted, given.jobs, Limits(seconds=given.timeout)), 1):
        table[row.model_type] = replace(row, source=digest)
        rows.write((table[name] for name in every if name in table), given.output)
        print(f"{number}/{len(wanted)} {row.model_type}: {row.started} {row.reason}", file=sys.stderr)
    return {name: table[name] for name in every if name in table}


def _spent(seconds: float) -> str:
    """What this run took, in seconds of the clock, and of the processor by all workers."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return f"{seconds:.0f} s by the clock, {used.ru_utime + used.ru_stime:.0f} s of processor time"


def _serve(types: list[str], seconds: float) -> None:
    import warnings

    from .judge import judged

    warnings.simplefilter("ignore")
    serve(types, judged, seconds)


if __name__ == "__main__":
    sys.exit(main())
