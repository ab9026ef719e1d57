"""Likeness of what two heads write at the same token: the mean cosine of `z_a W_o,a` and `z_b W_o,b`; 1 = the same way.

A mean of cosines is no function of cross-moments, so the written vectors are made for a few tokens at a time, scaled to
length one and multiplied for all pairs at once. Tokens at which one of the two writes nothing are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.columns import Column
from headscope.losses import wide
from headscope.measures import Evidence, Measure, Outputs, PairValues
from headscope.pairs import HeadSpace, double
from headscope.states import State

BLOCK_VALUES = 2**22
"""Values of written vectors that are held at once: 16 MiB in float32."""


class MeanCosine:
    """Sums over tokens of the cosine of all pairs."""

    def __init__(self, space: HeadSpace) -> None:
        self._space = space
        self._sums, self._tokens = space.blank(), space.blank()
        self._matrices: dict[int, Tensor | None] = {}

    def add(self, part: Outputs) -> None:
        """Add the tokens of a part."""
        widths: dict[int, list[tuple[int, Tensor]]] = {}
        for site, outputs in zip(part.sites, part.outputs, strict=True):
            matrix = self._matrix(site)
            if matrix is not None:
                widths.setdefault(matrix.shape[2], []).append((site, outputs))
        for width, shown in widths.items():
            places = self._space.places_of(tuple(site for site, _ in shown))
            size = max(1, BLOCK_VALUES // (len(places) * width))
            found: tuple[Tensor, ...] = ()
            for first in range(0, len(part.numbers), size):
                written = [self._written(site, wide(outputs[first : first + size])) for site, outputs in shown]
                more = _cosines(torch.cat(written))
                found = tuple(map(torch.add, found, more)) if found else more
            for sums, table in zip((self._sums, self._tokens), found, strict=bool(found)):
                sums[places[:, None], places] += table.cpu()

    def _matrix(self, site: int) -> Tensor | None:
        if site not in self._matrices:
            self._matrices[site] = self._space.weights(self._space.sites[site]).output
        return self._matrices[site]

    def _written(self, site: int, outputs: Tensor) -> Tensor:
        """What each head writes, `[head token d_model]`."""
        matrix = self._matrix(site)
        assert matrix is not None
        return outputs.transpose(0, 1) @ matrix.to(outputs)

    def state(self) -> State:
        """The sums so far."""
        return {"sums": self._sums, "tokens": self._tokens}

    def absorb(self, state: State) -> None:
        """Add the sums of other tokens."""
        self._sums += state["sums"]
        self._tokens += state["tokens"]

    @property
    def size(self) -> int:
        """Bytes of the state."""
        return self._sums.nbytes + self._tokens.nbytes

    def finish(self) -> PairValues:
        """The mean cosine of every pair; NaN where no token counts."""
        return PairValues((self._sums / self._tokens).clamp(-1, 1))


def _cosines(written: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the cosines of what heads have written, `[head token d_model]`, and of how many tokens: `[head head]`."""
    lengths = torch.linalg.vector_norm(written, dim=-1)
    directions = (written / lengths.clamp_min(torch.finfo(lengths.dtype).tiny).unsqueeze(-1)).flatten(1)
    writes = (lengths > 0).to(lengths.dtype)
    return double(directions @ directions.T), double(writes @ writes.T)


MEASURE = Measure(
    title="cosine",
    column=Column(
        "cosine",
        "1",
        "mean over tokens of the cosine of what two heads write (z W_o); only for heads with the same query tokens and "
        "width",
    ),
    evidence=Evidence.OUTPUTS,
    begin=MeanCosine,
    least=-1.0,
)
