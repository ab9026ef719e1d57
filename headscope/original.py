"""The original: what a repair must know of the whole model on its examples, made once for all plans.

That is what each output projection writes, or the stream that this joins, kept from one run a batch as far as there is
room; the routes by which a smaller model's unfinished runs go on; and the emphasis on tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from headscope.emphasis import Emphasis
from headscope.examples import Batch
from headscope.heads import SiteId
from headscope.objective import Objective
from headscope.replay import Replay
from headscope.resuming import Resuming
from headscope.streams import Call, Streams, bytes_of
from headscope.study import Study
from headscope.texts import Texts

ROOM = 2**31
"""Bytes that are kept of what projections write; batches beyond that run the whole model again for every site."""


class Original:
    """The whole model of a study, to fit smaller ones to.

    Without `streams` each projection is fitted to what it writes in the whole model, and what was lost before it is
    left alone. With `emphasis` tokens count by what an error there does, else all alike.
    """

    def __init__(self, study: Study, *, streams: bool = True, emphasis: bool = False, room: int = ROOM) -> None:
        self.study, self._emphasised, self.room = study, emphasis, room
        loaded = study.loaded
        self.objective = Objective(loaded.model, loaded.task, study.sites)
        self.objective.on_inputs = lambda inputs, batch: setattr(self, "texts", Texts.of(inputs, batch))
        self.texts = Texts({}, None, None)
        """What stands in the batch that ran last."""
        self.streams = Streams(self.objective, sums=streams)
        self._kept: dict[Sequence[int], dict[str, list[Tensor]]] = {}
        self._size = 0

    @cached_property
    def emphasis(self) -> Emphasis | None:
        """The weights of tokens; None where all count alike."""
        return Emphasis.of(self.study) if self._emphasised else None

    @cached_property
    def _replay(self) -> Replay:
        return Replay.of(self.study.loaded.model, self.study.sites)

    def resuming(self) -> Resuming:
        """Unfinished runs of a smaller model, none yet."""
        return Resuming(self.study.loaded.model, self._replay.routes, room=self.room)

    def wrote(self, batch: Batch, path: str) -> list[Tensor]:
        """What each call of the projection at `path` writes on a batch, or the stream that this joins."""
        kept = self._kept.get(batch.numbers)
        if kept is None:
            paths = self.streams.order(batch) if self._size < self.room else [path]
            kept = self._run(batch, paths)
            size = bytes_of([one for calls in kept.values() for one in calls])
            if len(paths) > 1 and self._size + size <= self.room:
                self._kept[batch.numbers] = kept
                self._size += size
        return kept.get(path, [])

    def weights(self, site: SiteId, batch: Batch, real: Tensor) -> Tensor | None:
        """The weights of a batch's real tokens at a site; None where all count alike."""
        if self.emphasis is None:
            return None
        return self.emphasis.at(site, batch.numbers, real.sum(dim=1).tolist())

    def _run(self, batch: Batch, paths: Sequence[str]) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}

        def keep(call: Call) -> None:
            found.setdefault(call.path, []).append(call.wrote.cpu())

        with torch.no_grad(), self.streams.shown(paths, keep):
            self.objective.body(batch)
        return found
