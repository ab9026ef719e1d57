"""Runs the census in processes of its own, a few model types each, so that a crash or a hang costs one row."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from .rows import ROOT, Row

TOGETHER = 30
"""Model types in one process: its start costs as much as several of them."""
MEMORY = 10 * 2**30
"""Bytes of address space that one process may take."""
Judge = Callable[[str], Row]


@dataclass(frozen=True)
class Limits:
    """How long one model type may take, and what a worker is started with.

    `seconds` are of processor time, so that a busy machine changes no row; one that sleeps has `patience` times as many
    of the clock.
    """

    seconds: float = 120.0
    patience: float = 8.0
    command: tuple[str, ...] = (sys.executable, "-m", "tests.census", "--worker")


def run(types: Sequence[str], jobs: int, limits: Limits) -> Iterator[Row]:
    """A row for each type, as they come."""
    waiting: deque[list[str]] = deque(list(types[at : at + TOGETHER]) for at in range(0, len(types), TOGETHER))
    rows: queue.Queue[Row | None] = queue.Queue()

    def work() -> None:
        while True:
            try:
                batch = waiting.popleft()
            except IndexError:
                break
            while batch:
                for row in batch_rows(batch, limits):
                    rows.put(row)
                    batch = batch[batch.index(row.model_type) + 1 :]
        rows.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    running = jobs
    while running:
        row = rows.get()
        if row is None:
            running -= 1
        else:
            yield row


def batch_rows(types: Sequence[str], limits: Limits) -> Iterator[Row]:
    """Rows from one process, up to the type that crashes or hangs it, which gets a row that says so."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [*limits.command, f"--timeout={limits.seconds}", *types],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        for model_type in types:
            row = _next_row(model_type, lines, process, limits=limits)
            yield row
            if row.reason.startswith(("hangs", "crashes")):
                return
    finally:
        process.kill()
        process.wait()
        reader.join()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            lines.put(line)
    lines.put("")


def _next_row(model_type: str, lines: queue.Queue[str], process: subprocess.Popen[str], *, limits: Limits) -> Row:
    hangs = Row(model_type, reason=f"hangs: no result after {limits.seconds:.0f} s", seconds=limits.seconds)
    clock = limits.seconds * limits.patience
    try:
        line = lines.get(timeout=clock)
        while line and not line.startswith('{"model_type"'):
            line = lines.get(timeout=clock)
    except queue.Empty:
        return hangs
    if line:
        return Row(**json.loads(line))
    status = process.wait()
    return hangs if status == -signal.SIGXCPU else Row(model_type, reason=f"crashes its process: exit status {status}")


def serve(types: Sequence[str], judge: Judge, seconds: float) -> None:
    """What a worker does: judge types in order, one line of JSON on stdout for each; it ends itself where one takes
    more than `seconds` of processor time.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for model_type in types:
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (spent + int(seconds) + 1, resource.RLIM_INFINITY))
        print(json.dumps(asdict(judge(model_type))), flush=True)
