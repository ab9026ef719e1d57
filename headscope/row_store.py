"""Attention rows of all sites at once, for one stretch of queries of the running batch, which pairs of heads need.

Rows of one site are seen before those of the next, so a pair can only be compared after the model has run. What is held
until then is limited: a batch with more rows is run again for each further stretch of queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.examples import sent
from headscope.heads import AttentionKind, Role, Site
from headscope.losses import wide
from headscope.measures import Shares
from headscope.pairs import HeadSpace
from headscope.scores import RowBlock

HELD_VALUES = 2**27
"""Probabilities held at most, besides the block that is read: 512 MiB in float32."""
BLOCK_VALUES = 2**22
"""Probabilities of one text that are shown at once."""


@dataclass(frozen=True)
class _Piece:
    """Rows of the queries from `first` on; `sequence` is the only one they are of, or None for all."""

    first: int
    sequence: int | None
    rows: Tensor

    def until(self, last: int) -> _Piece:
        """The rows of the queries before `last`."""
        return _Piece(self.first, self.sequence, self.rows[:, :, : max(0, last - self.first)].clone())


@dataclass
class _Seen:
    """What was seen of a site in this run: its shape, which queries are real, and the rows of the stretch."""

    sequences: int = 0
    n_queries: int = 0
    n_keys: int = 0
    pieces: list[_Piece] = field(default_factory=list)
    real: list[tuple[int, int | None, Tensor]] = field(default_factory=list)


class RowStore:
    """Holds rows of the queries from `first` to before `last`, and shows them text by text."""

    def __init__(self, space: HeadSpace, limit: int | None = None) -> None:
        self.space, self.limit = space, HELD_VALUES if limit is None else limit
        self.apart = torch.zeros(len(space.sites), len(space.sites), dtype=torch.bool)
        """Sites that were seen to have other queries or other keys, `[site site]`."""
        self._numbers = {site.id: number for number, site in enumerate(space.sites)}
        self.start(1)

    def start(self, examples: int) -> None:
        """Begin a batch."""
        self.examples, self.first, self.last, self.again = examples, 0, 2**62, False
        self._clear()

    def _clear(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._held = self._furthest = 0

    def more(self) -> bool:
        """Go on to the next stretch; False when there is none, else the batch must be run again."""
        if self.last >= self._furthest:
            self.again = False
            return False
        self.first, self.last, self.again = self.last, 2 * self.last - self.first, True
        self._clear()
        return True

    def see(self, block: RowBlock) -> dict[str, Tensor]:
        """Keep the rows of a block that lie in the stretch; nothing is summed."""
        seen = self._seen.setdefault(self._numbers[block.site.id], _Seen())
        first, count = block.first, block.rows.shape[2]
        sequence = None
        if len(block.rows) < self.examples:  # sequences come one after another, each from its first query on
            seen.sequences += first == 0
            sequence = seen.sequences - 1
        else:
            seen.sequences = len(block.rows)
        seen.n_queries, seen.n_keys = max(seen.n_queries, first + count), max(seen.n_keys, block.rows.shape[3])
        self._furthest = max(self._furthest, first + count)
        seen.real.append((first, sequence, block.real))
        begin, end = max(first, self.first), min(first + count, self.last)
        if begin < end:
            rows = block.rows.detach()[:, :, begin - first : end - first].clone()
            seen.pieces.append(_Piece(begin, sequence, rows))
            self._held += rows.numel()
        while self._held > self.limit and min(self.last, self._furthest) - self.first > 1:
            self._shrink()
        return {}

    def _shrink(self) -> None:
        """Halve the stretch."""
        self.last = self.first + (min(self.last, self._furthest) - self.first + 1) // 2
        for seen in self._seen.values():
            cut = [piece.until(self.last) if piece.first < self.last else None for piece in seen.pieces]
            seen.pieces = [piece for piece in cut if piece is not None]
        self._held = sum(piece.rows.numel() for seen in self._seen.values() for piece in seen.pieces)

    def parts(self) -> Iterator[Shares]:
        """The rows of the stretch, text by text, for each group of sites with the same queries and keys."""
        groups = self._groups()
        together = torch.zeros_like(self.apart)
        for sites in groups:
            index = torch.tensor(sites)
            together[index[:, None], index] = True
        self.apart |= ~together
        real = [self._real(sites[0]) for sites in groups]  # here the host waits for a GPU, before it has more to do
        for sites, known in zip(groups, real, strict=True):
            for example in range(self.examples):
                yield from self._of(sites, example, known[example])

    def _groups(self) -> list[tuple[int, ...]]:
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, seen in sorted(self._seen.items()):
            site = self.space.sites[number]
            cross = site.id.kind is AttentionKind.CROSS
            windows = number if seen.sequences != self.examples else None  # windows of other sites lie elsewhere
            key = (site.id.stack, cross, windows, seen.n_queries, seen.n_keys)
            groups.setdefault(key, []).append(number)
        return [tuple(sites) for sites in groups.values()]

    def _real(self, number: int) -> NDArray[numpy.bool_]:
        """Which queries of a site are no padding, `[example window query]` on the host."""
        seen = self._seen[number]
        windows = seen.sequences // self.examples
        device = seen.real[0][2].device
        found = torch.zeros(self.examples, windows, seen.n_queries, dtype=torch.bool, device=device)
        for first, sequence, part in seen.real:
            last = first + part.shape[1]
            if sequence is None:
                found[:, :, first:last] = part.view(self.examples, windows, -1)
            else:
                found[sequence, :, first:last] = part
        return found.cpu().numpy()

    def _of(self, sites: tuple[int, ...], example: int, real: NDArray[numpy.bool_]) -> Iterator[Shares]:
        """One text's rows in blocks of queries; `real` queries are `[window query]`."""
        seen = self._seen[sites[0]]
        windows = seen.sequences // self.examples
        queries = int(real.sum())
        last = min(self.last, seen.n_queries)
        places = self.space.places_of(sites)
        size = max(1, BLOCK_VALUES // (len(places) * windows * (seen.n_keys + 1)))
        for begin in range(self.first, last, size):
            end = min(begin + size, last)
            chosen = numpy.flatnonzero(real[:, begin:end])
            count = len(chosen)
            if not count:
                continue
            rows = [self._rows(site, example, begin, end) for site in sites]
            reach = max(part.shape[2] for part in rows)
            cells = [
                _cells(
                    self.space.sites[site],
                    part[:, sent(torch.from_numpy(chosen), part.device)],
                    reach,
                    sinks=self._sinks(sites),
                )
                for site, part in zip(sites, rows, strict=True)
            ]
            yield Shares(places, torch.cat(cells) / queries, count / queries)

    def _sinks(self, sites: Sequence[int]) -> bool:
        return any(has_sinks(self.space.sites[site]) for site in sites)

    def _rows(self, number: int, example: int, begin: int, end: int) -> Tensor:
        """Rows of one site and text, `[head window*query key]`; keys behind the last that is seen are left out."""
        seen = self._seen[number]
        windows = seen.sequences // self.examples
        found: list[tuple[int, Tensor]] = []
        for piece in seen.pieces:
            if piece.sequence in (None, example) and piece.first < end and piece.first + piece.rows.shape[2] > begin:
                mine = piece.rows if piece.sequence is not None else piece.rows[example * windows :][:windows]
                low = max(begin, piece.first)
                found.append((low - begin, mine[:, :, low - piece.first : end - piece.first]))
        sample, reach = found[0][1], max(part.shape[3] for _, part in found)
        whole = wide(sample).new_zeros(windows, sample.shape[1], end - begin, reach)
        for low, part in found:
            whole[:, :, low : low + part.shape[2], : part.shape[3]] = part
        return whole.transpose(0, 1).flatten(1, 2)


def has_sinks(site: Site) -> bool:
    """Whether the site declares numbers that join its softmax as keys without a value."""
    return any("sink" in piece.name for piece in site.slices_of(Role.EXTRA))


def _cells(site: Site, rows: Tensor, reach: int, *, sinks: bool) -> Tensor:
    """Rows as distributions, `[head cell]`, over `reach` keys and, with `sinks`, one more for what sinks take.

    Without sinks of its own a site's rows sum to one up to rounding, which is taken out.
    """
    mass = rows.sum(dim=-1, keepdim=True)
    taken = torch.zeros_like(mass)
    if has_sinks(site):
        taken = (1 - mass).clamp_min(0)
    else:
        rows = rows / mass.clamp_min(torch.finfo(rows.dtype).tiny)
    padded = torch.nn.functional.pad(rows, (0, reach - rows.shape[-1]))
    return (torch.cat([padded, taken], dim=-1) if sinks else padded).flatten(1)
