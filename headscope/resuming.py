"""Resuming: a model runs on the same batch again and again, each time a little further, and starts where it stopped.

What had ended before the last stop answers from that run, since nothing before it has changed. As in a replay, nothing
is read off names: routes say which modules have ended before a site's heads are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from headscope.heads import SiteId
from headscope.replay import Recording, Route, tensors
from headscope.streams import bytes_of
from headscope.vocabulary import answering

ROOM = 2**31
"""Bytes that are kept of unfinished runs; batches beyond that start from the beginning each time."""


class Resuming:
    """Unfinished runs of one model, by batch; `routes` are the ways to its sites."""

    def __init__(self, model: nn.Module, routes: Mapping[SiteId, Route], *, room: int = ROOM) -> None:
        self.model, self.routes, self.room = model, routes, room
        self._kept: dict[Sequence[int], dict[str, Any]] = {}
        self._sizes: dict[Sequence[int], int] = {}

    @contextlib.contextmanager
    def until(self, site: SiteId, batch: Sequence[int]) -> Iterator[None]:
        """Run the model on the examples of these numbers in the block, up to the site, from where it last stopped.

        Whatever changes between two runs of a batch must lie behind the site of the first.
        """
        kept, route, seen = self._kept.pop(batch, {}), self.routes.get(site), Recording()
        self._sizes.pop(batch, 0)
        with contextlib.ExitStack() as stack:
            for path, output in kept.items():
                stack.enter_context(answering(self.model.get_submodule(path), output))
            for path in () if route is None else route.before:

                def hook(module: nn.Module, args: tuple[Any, ...], output: Any, path: str = path) -> None:
                    seen.keep(path, (), output)

                stack.callback(self.model.get_submodule(path).register_forward_hook(hook).remove)
            yield
        seen.settle()
        size = bytes_of(tensors(list(seen.outputs.values())))
        once = len(seen.order) == len(set(seen.order))  # what runs twice has no one answer
        if once and sum(self._sizes.values()) + size <= self.room:
            self._kept[batch], self._sizes[batch] = seen.outputs, size
