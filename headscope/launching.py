"""Where this process stands among those of one run, and starting and watching such processes on one machine.

What torchrun and accelerate tell a process by its environment is all that is read, and what `start` tells those that it
starts. Nothing here imports torch, so that the process that only watches stays small.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headscope.errors import RankError, UsageError
from headscope.interrupt import SUPERVISOR, raise_interrupts

LOOK = 0.1
"""Seconds between two looks at the processes."""
OTHERS = 10.0
"""Seconds that the others have to end by themselves when one has ended with an error of its own."""
TERMINATED = 143
"""The exit code of a process that was asked to end, and had nothing else to tell."""
LAST = 5.0
"""Seconds between a polite and a forced end."""


@dataclass(frozen=True)
class Standing:
    """One process of several: its rank, how many there are, and its number on its own machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    supervised: bool = False


def standing(environment: Mapping[str, str] = os.environ) -> Standing:
    """Where this process stands, by RANK, WORLD_SIZE and LOCAL_RANK; one alone where nothing promises others.

    Raises:
        UsageError: the environment promises several processes and does not say which this is.
    """
    world, rank = environment.get("WORLD_SIZE", "1"), environment.get("RANK", "0")
    local = environment.get("LOCAL_RANK", rank)
    if not (world.isdecimal() and rank.isdecimal() and local.isdecimal() and int(rank) < int(world)):
        raise UsageError(f"RANK={rank}, LOCAL_RANK={local} and WORLD_SIZE={world} name no process of several")
    if int(world) > 1:
        absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if absent:
            raise UsageError(f"WORLD_SIZE is {world}, but {absent[0]} is not set", hint="start with torchrun")
    return Standing(int(rank), int(world), int(local), SUPERVISOR in environment)


def start(command: Sequence[str], count: int) -> list[subprocess.Popen[bytes]]:
    """Start `count` ranks of one command; only rank 0 writes to stdout, and Ctrl-C reaches none of them by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    raise_interrupts()
    threads = max(1, len(os.sched_getaffinity(0)) // count if hasattr(os, "sched_getaffinity") else 1)
    shared = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), SUPERVISOR: str(os.getpid())}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 holds the store, also where torchrun started this process
    return [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            start_new_session=True,
        )
        for rank in range(count)
    ]


def watch(processes: Sequence[subprocess.Popen[bytes]], *, hint: str) -> int:
    """Wait for all ranks; when one ends with an error, end the others. Returns the exit code of the run.

    Rank 0 says what went wrong; where it cannot, this is an error.

    Raises:
        RankError: a rank was killed, or ended with an error that rank 0 did not tell.
    """
    try:
        while all(process.poll() in (None, 0) for process in processes):
            if all(process.returncode == 0 for process in processes):
                return 0
            time.sleep(LOOK)
        rank = next(rank for rank, process in enumerate(processes) if process.poll())
        code = processes[rank].returncode
        if code < 0:
            raise RankError(rank, f"was killed by {signal.Signals(-code).name}", hint=hint)
        return _told(processes, rank, hint)
    finally:
        end(processes)


def _told(processes: Sequence[subprocess.Popen[bytes]], rank: int, hint: str) -> int:
    """The code of rank 0, which tells the errors of all, once it has ended too; in a long batch it is asked to."""
    until = time.monotonic() + OTHERS
    while processes[0].poll() is None and time.monotonic() < until:
        time.sleep(LOOK)
    end(processes)
    if (processes[0].returncode or 0) > 0 and processes[0].returncode != TERMINATED:
        return processes[0].returncode
    raise RankError(rank, f"failed with exit code {processes[rank].returncode}", hint=hint)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: asked first, then forced."""
    living = [process for process in processes if process.poll() is None]
    for process in living:
        process.terminate()
    until = time.monotonic() + LAST
    for process in living:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def this_command() -> list[str]:
    """The command line of this process, to be started again, and to import nothing that this one would not."""
    here = {"", os.getcwd()} & set(sys.path)  # else `-m` would let files of the user's own take the place of libraries
    return [sys.executable, *([] if here else ["-P"]), "-m", "headscope", *sys.argv[1:]]
