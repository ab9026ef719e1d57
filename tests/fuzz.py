"""The long run of hostile inputs, `python -m tests.fuzz --inputs 20000`: its last line says how many, and what failed.

An input fails when anything but a HeadscopeError comes of it (or, of a whole command, an exit code other than 0 to 3,
a terminal sequence or a traceback), when it takes more than 5 s, or when memory grows by more than 1 GB.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from fuzz_bench import Bench
from fuzz_kinds import KINDS, Kind
from hypothesis import HealthCheck, Phase, given, seed, settings

from headscope.errors import HeadscopeError

MOST_SECONDS, MOST_MEMORY = 5.0, 2**30


class Slow(BaseException):
    """An input takes longer than it may."""


def _late(number: int, frame: object) -> None:
    raise Slow(f"more than {MOST_SECONDS:g} s")


def judge(kind: Kind, bench: Bench, given: Any) -> None:
    """Read one input; whatever is wrong about that is raised."""
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    before = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        kind.read(bench, given)
    except HeadscopeError as error:
        assert str(error), "an error without a word"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start <= MOST_SECONDS, f"{time.monotonic() - start:.1f} s"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert grown <= MOST_MEMORY, f"{grown} bytes"


def tried(kind: Kind, bench: Bench, inputs: int, *, start: int = 0) -> tuple[int, BaseException | None]:
    """How many inputs of a kind were read, and what the simplest one that failed gave, if any did."""
    count = 0

    def one(value: Any) -> None:
        nonlocal count
        count += 1
        judge(kind, bench, value)

    rules = settings(
        max_examples=inputs,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )
    try:
        seed(start)(rules(given(kind.inputs(bench))(one)))()
    except (Exception, Slow) as error:  # noqa: BLE001  it is what is looked for
        return count, error
    return count, None


def main() -> int:
    """Read as many inputs as asked for, of every kind its share; 1 if any failed."""
    parser = argparse.ArgumentParser(description="Hostile inputs for headscope.")
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], help="only this kind")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [kind for kind in KINDS if asked.kind in (None, kind.name)]
    total = failures = 0
    folder = Path(tempfile.mkdtemp(prefix="headscope-fuzz-"))
    try:
        bench = Bench(folder)
        shares = sum(kind.share for kind in kinds)
        for kind in kinds:
            start = time.monotonic()
            count, error = tried(kind, bench, -(-asked.inputs * kind.share // shares), start=asked.seed)
            total, failures = total + count, failures + (error is not None)
            print(f"{kind.name}: {count} inputs, {time.monotonic() - start:.0f} s", flush=True)
            if error is not None:
                traceback.print_exception(error, limit=-8)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{total} inputs, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
