"""Ranks as forked processes: each has the test's model in memory already, so that many runs of two take seconds."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope import ranks
from headscope.errors import HeadscopeError
from headscope.launching import Standing


@dataclass(frozen=True)
class Ended:
    """How one rank ended: what its job gave, or the error that it raised; neither where it was killed."""

    given: Any = None
    error: str = ""
    signal: int = 0


def forked(size: int, job: Callable[[ranks.Ranks], Any], folder: Path, **options: Any) -> list[Ended]:
    """Run a job on every rank; what still runs two seconds after rank 0 has ended is killed."""

    def join(place: Standing) -> Any:
        with ranks.Ranks(place, **{"timeout": 30.0} | options) as group:
            return job(group)

    return spread(size, join, folder, patience=2.0)


def spread(size: int, job: Callable[[Standing], Any], folder: Path, *, patience: float) -> list[Ended]:
    """Run a job in as many processes, whose environment is that of ranks which wait 3 s for a dead one.

    What still runs `patience` seconds after rank 0 has ended is killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_fork(Standing(rank, size, rank), job, folder, port) for rank in range(size)]
    statuses: dict[int, int] = {}
    until = time.monotonic() + 60
    while len(statuses) < size:
        for rank, child in enumerate(children):
            if rank not in statuses:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    statuses[rank] = status
                    until = min(until, time.monotonic() + patience) if rank == 0 else until
        if time.monotonic() > until:
            for rank in set(range(size)) - set(statuses):
                os.kill(children[rank], signal.SIGKILL)
        time.sleep(0.02)
    return [_read(folder / f"rank-{rank}.pickle", statuses[rank]) for rank in range(size)]


def _read(path: Path, status: int) -> Ended:
    if os.WIFSIGNALED(status):
        return Ended(signal=os.WTERMSIG(status))
    return pickle.loads(path.read_bytes())


def _fork(place: Standing, job: Callable[[Standing], Any], folder: Path, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": str(place.rank), "WORLD_SIZE": str(place.world)}
        ranks.BEAT, ranks.SILENCE, ranks.LOOK, ranks.PARTING = 0.1, 3.0, 0.1, 2.0
        try:
            ended = Ended(given=job(place))
        except HeadscopeError as error:
            ended = Ended(error=f"{type(error).__name__}: {error} ({error.hint})")
        (folder / f"rank-{place.rank}.pickle").write_bytes(pickle.dumps(ended))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)  # nothing of the test's own ends here
    return 0
