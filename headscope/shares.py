"""How one run is shared out: between processes, and over time by a folder of finished work.

A pass is cut into units of whole batches, whatever the number of processes. Every unit is summed from nothing, and the
total adds the units in their order, so that neither the number of processes nor an interruption changes a bit. One
process without a folder runs the same code, and holds the total and one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headscope.examples import Batch
from headscope.fingerprints import Fingerprint
from headscope.ranks import Ranks
from headscope.states import Held, State
from headscope.work import WorkFolder

UNIT = 4
"""Batches in a unit."""
LARGE = 2**22
"""Bytes of sums over pairs of heads above which a pass has at most `RANGES` units: adding, keeping and sending these
takes time."""
RANGES = 8

Progress = Callable[[int, int], None]
"""Told after each batch how many examples are done, and how many there are."""


class Share:
    """What one process does of a run: all of it, unless there are other ranks or finished work."""

    def __init__(self, ranks: Ranks | None = None, work: WorkFolder | None = None) -> None:
        self.ranks, self.work = ranks, work
        self._passes = 0

    @property
    def alone(self) -> bool:
        """Whether nothing is shared: one process that keeps nothing."""
        return self.ranks is None and self.work is None

    def step(self) -> None:
        """Say that this process goes on; for work on one batch that takes many passes.

        Raises:
            RankError: another process has ended.
        """
        if self.ranks is not None:
            self.ranks.step()

    def pool(
        self,
        batches: Sequence[Batch],
        add: Callable[[Batch], None],
        unit: Held,
        *,
        total: Held,
        fingerprint: Callable[[], Fingerprint],
        progress: Progress | None = None,
    ) -> None:
        """Sum all batches into `total`; `add` adds one to `unit`, which is cleared between units.

        Raises:
            RankError: another process has ended, stands still or sees something else.
            WorkError: the folder holds work of another run.
            OutputError: the folder cannot be written.
        """
        self._passes += 1
        seen = {} if self.alone else self._begin(fingerprint())
        units = cut(batches, large=total.size > LARGE)
        told = _Told(sum(map(len, batches)), progress)
        rank, size = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.size)
        for first in range(0, len(units), size):
            group, own, state = units[first : first + size], first + rank, None
            if rank < len(group):
                state = None if self.work is None else self.work.load(self._passes, own, seen)
                if state is None:
                    state = self._compute(units[own], add, unit, told)
                    if self.work is not None:
                        self.work.save(self._passes, own, state, fingerprint=seen)
            for batches_of, one in zip(group, self._states(state, len(group)), strict=True):
                total.absorb(one)
                told.finished(sum(map(len, batches_of)))

    def _begin(self, seen: Fingerprint) -> Fingerprint:
        """Check that all ranks see the same, and that finished work is of this run."""
        if self.work is not None and self._passes == 1:
            self.work.prepare()  # by every rank: those on other machines may have a folder of their own
        if self.ranks is not None:
            self.ranks.agree(seen)
        if self.work is not None:
            self.work.require(self._passes, seen)
        return seen

    def _compute(self, batches: Sequence[Batch], add: Callable[[Batch], None], unit: Held, told: _Told) -> State:
        unit.clear()
        for batch in batches:
            add(batch)
            told.batch(len(batch))
            self.step()
        return unit.state()

    def _states(self, own: State | None, count: int) -> Iterator[State]:
        """The states of a group of units, in order."""
        if self.ranks is not None:
            yield from self.ranks.exchange(own, count)
        else:
            assert own is not None
            yield own


def cut(batches: Sequence[Batch], *, large: bool) -> list[Sequence[Batch]]:
    """The units of a pass: a fixed number of batches each, or as many as make `RANGES` where sums are large."""
    size = max(UNIT, -(-len(batches) // RANGES)) if large else UNIT
    return [batches[first : first + size] for first in range(0, len(batches), size)]


class _Told:
    """Counts examples: those of finished units, and of the unit that is running here."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._finished = self._running = self._last = 0

    def batch(self, count: int) -> None:
        """One batch of the running unit is done."""
        self._running += count
        self._tell()

    def finished(self, count: int) -> None:
        """One unit, of this process or another, is added."""
        self._finished += count
        self._running = 0
        self._tell()

    def _tell(self) -> None:
        done = self._finished + self._running
        if self._progress is not None and done > self._last:
            self._last = done
            self._progress(done, self._total)
