"""The processes of one run: they meet, compare what they see, and hand round what each has summed.

Small words go through the store that all ranks share, so that whoever waits can say for whom; sums go by gloo, in the
memory of the host. Three things can happen to a rank. It ends with an error: it leaves word of it. It is killed, or its
machine: its heart, a thread that counts on in the store, stands still. It sleeps: it takes no step for `timeout`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch.distributed.rendezvous import rendezvous

from headscope.errors import HeadscopeError, RankError
from headscope.fingerprints import Fingerprint, difference
from headscope.launching import Standing
from headscope.states import State

BEAT = 0.5
"""Seconds between two heartbeats."""
SILENCE = 20.0
"""Seconds without a heartbeat after which a rank counts as dead."""
PARTING = 4.0
"""The same for a run that is being ended from outside, which asks who has died before."""
LOOK = 0.5
"""Seconds between two looks at the others while computing."""
SMALL = 2**20
"""Bytes of a tensor that is sent together with others."""
TIMEOUT = 600.0
"""Seconds without a step after which a rank counts as asleep, unless told otherwise."""
LONGEST = 1e9
"""Seconds that torch can wait for anything: it counts nanoseconds in 64 bits."""


class Ranks:
    """One rank among others, inside a `with` block that all of them enter and leave."""

    def __init__(self, standing: Standing, *, timeout: float = TIMEOUT, hint: str = "") -> None:
        """`hint` says how a run that was broken off goes on."""
        self.rank, self.size = standing.rank, standing.world
        self._supervisor = os.getppid() if standing.supervised else 0
        self._timeout, self._hint = timeout, hint
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._meetings = self._steps = 0
        self._looked = 0.0
        self._moved: dict[str, tuple[bytes, float]] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Ranks:
        """Find the others.

        Raises:
            RankError: they do not come, or not as many as the environment promised.
        """
        wait = timedelta(seconds=min(self._timeout, LONGEST))
        try:
            self._store, rank, size = next(rendezvous("env://", self.rank, self.size, timeout=wait))
            cuda = torch.cuda.is_available() and dist.is_nccl_available()
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, store=self._store, rank=rank, world_size=size, timeout=wait)
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            message = f"did not find the other ranks at {where}: {_first_line(error)}"
            raise RankError(self.rank, message, hint=self._hint) from None
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.size):
            raise RankError(self.rank, f"of {self.size} runs as {dist.get_rank()} of {dist.get_world_size()}")
        store: Any = self._store  # whose `clone` the stubs of torch do not know
        self._heart = threading.Thread(target=self._beat, args=(store.clone(),), daemon=True)
        self._store.set(f"headscope/beat/{self.rank}", "0")
        self._store.set(f"headscope/left/{self.rank}", "")
        self._arrive(0)
        self._heart.start()
        with self._lost():
            self._store.wait([f"headscope/met/{rank}" for rank in range(self.size)], wait)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say how it ended, and part; a run that is ended from outside says which rank had failed or died before."""
        try:
            with contextlib.suppress(RuntimeError):  # the store has gone with the rank that held it
                stopped = error is not None and not isinstance(error, HeadscopeError)
                failed = self._ended("failed") if stopped else None  # for which whoever started the ranks ends them
                self._leave(failed or error)
                stopped = stopped and failed is None and not self._supervisor
                for rank in self._others if stopped else ():
                    self._standing_still("beat", rank)
                if stopped or self.rank == 0:  # which may hold the store
                    self._wait(lambda: all(self._word("left", rank) for rank in self._others), PARTING)
                if stopped:
                    self._require_beats(PARTING - 4 * BEAT)
                if failed is not None:
                    raise failed
        finally:
            self._stop.set()
            self._heart.join()
            dist.destroy_process_group()

    def _leave(self, error: BaseException | None) -> None:
        said: dict[str, str | int | None] = {"end": "done"}
        if isinstance(error, RankError):  # another may have ended the run, and is to be named
            said = {"end": "failed", "message": error.message, "hint": error.hint, "rank": error.rank}
        elif isinstance(error, HeadscopeError):
            said = {"end": "failed", "message": f"failed: {error}", "hint": error.hint, "rank": self.rank}
        elif error is not None:
            said = {"end": "stopped"}
        self._store.set(f"headscope/left/{self.rank}", json.dumps(said))

    def _beat(self, store: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone: the others will be told so by their own
            while not self._stop.wait(BEAT):
                store.add(f"headscope/beat/{self.rank}", 1)

    def _word(self, name: str, rank: int) -> bytes:
        return self._store.get(f"headscope/{name}/{rank}")

    def _arrive(self, meeting: int) -> None:
        self._store.set(f"headscope/step/{self.rank}", str(self._steps))
        self._store.set(f"headscope/met/{self.rank}", str(meeting))

    def _standing_still(self, name: str, rank: int) -> float:
        """Seconds for which a word of a rank has not changed, as far as was looked."""
        word, now = self._word(name, rank), time.monotonic()
        before, since = self._moved.get(f"{name}/{rank}", (b"", now))
        if word != before:
            since = now
        self._moved[f"{name}/{rank}"] = (word, since)
        return now - since

    def step(self) -> None:
        """Say that this rank goes on, and look whether the others do; called after every batch.

        Raises:
            RankError: another rank has ended.
        """
        self._steps += 1
        if time.monotonic() - self._looked >= LOOK:
            with self._lost():
                self._store.set(f"headscope/step/{self.rank}", str(self._steps))
            self.look()

    def look(self) -> None:
        """Look whether all others are alive.

        Raises:
            RankError: one has ended or is dead.
        """
        self._looked = time.monotonic()
        if self._supervisor and os.getppid() != self._supervisor:
            raise RankError(self.rank, "has lost the process that started it", hint=self._hint)
        with self._lost():
            ended = self._ended("failed", "stopped")
            if ended is not None:
                raise ended
            self._require_beats(SILENCE)

    def _ended(self, *ends: str) -> RankError | None:
        """The error that tells of the first other rank that has left in one of these ways."""
        for rank in self._others:
            said = json.loads(self._word("left", rank) or b"{}")
            if said.get("end") in ends:
                message = said.get("message", "was ended")
                return RankError(said.get("rank", rank), message, hint=said.get("hint") or self._hint)
        return None

    def _require_beats(self, silence: float) -> None:
        for rank in self._others:
            if not self._word("left", rank) and self._standing_still("beat", rank) > silence:
                message = f"has died: it gave no sign of life for {silence:.0f} s"
                raise RankError(rank, message, hint=self._hint)

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        """A store that has gone has gone with the rank that held it, or with the launcher."""
        try:
            yield
        except RuntimeError as error:
            rank = 0 if self.rank else next(iter(self._others), 0)
            message = f"cannot be reached any more: {_first_line(error)}"
            raise RankError(rank, message, hint=self._hint) from None

    @staticmethod
    def _wait(done: Callable[[], bool], seconds: float) -> bool:
        """Look until something is so; False if it is not after so many seconds."""
        until, pause = time.monotonic() + seconds, 0.002
        while not done():
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return True

    def meet(self) -> None:
        """Go on when all ranks have come here.

        Raises:
            RankError: one has ended, or has taken no step for the timeout.
        """
        self._meetings += 1
        with self._lost():
            self._arrive(self._meetings)
            self._wait(self._met, float("inf"))

    def _met(self) -> bool:
        away = [rank for rank in self._others if int(self._word("met", rank)) < self._meetings]
        if away and time.monotonic() - self._looked >= LOOK:  # who has come may have failed behind this meeting
            self.look()
        for rank in away:
            if self._standing_still("step", rank) > self._timeout:
                message = f"stands still: it took no step for {self._timeout:g} s (--timeout)"
                raise RankError(rank, message, hint=self._hint)
        return not away

    def agree(self, fingerprint: Fingerprint) -> None:
        """Refuse to go on with ranks that see another model, other data or other settings.

        Raises:
            RankError: one does; it says in what.
        """
        name = f"headscope/seen/{self._meetings}"
        with self._lost():
            self._store.set(f"{name}/{self.rank}", json.dumps(fingerprint))
        self.meet()
        with self._lost():
            found = [json.loads(self._store.get(f"{name}/{rank}")) for rank in range(self.size)]
        for rank, other in enumerate(found):
            gap = difference(found[0], other)
            if gap is not None:
                raise RankError(rank, f"sees something else than rank 0: {gap.replace(' and was ', ', on rank 0 ')}")
        self.meet()  # all have read it

    def exchange(self, own: State | None, count: int) -> Iterator[State]:
        """The states of ranks 0 to `count` - 1, in this order, on every rank; the others have none and take part.

        Raises:
            RankError: a rank has ended or stands still.
        """
        self.meet()
        for source in range(count):
            try:
                state = self._handed(own, source)
            except RuntimeError as error:
                raise self._blamed(error) from error
            yield state

    def _handed(self, own: State | None, source: int) -> State:
        """The state of one rank; large tensors one by one, small ones together."""
        mine = own if source == self.rank else None
        said: list[Any] = [None]
        if mine is not None:
            small = {name: value.contiguous() for name, value in mine.items() if value.nbytes <= SMALL}
            large = [(name, value.shape, value.dtype) for name, value in mine.items() if value.nbytes > SMALL]
            said = [(save(small), large)]
        dist.broadcast_object_list(said, src=source)
        packed, shapes = said[0]
        state = mine if mine is not None else load(packed)
        for name, shape, dtype in shapes:
            value = state[name].contiguous() if mine is not None else torch.empty(shape, dtype=dtype)
            dist.broadcast(value, src=source)
            state[name] = value
        return state

    def _blamed(self, error: RuntimeError) -> RankError:
        """Find out who broke an exchange off; this one, if all others are well."""
        until = time.monotonic() + SILENCE + 4 * BEAT
        while time.monotonic() < until:
            self.look()
            time.sleep(BEAT)
        return RankError(self.rank, f"was left alone in an exchange: {_first_line(error)}", hint=self._hint)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
