"""Streams: what output projections write while a model runs, or the sum that this joins at once.

Nothing is read off names: one run shows whether the first thing that happens to what a projection wrote is its sum with
something else of its shape, which is then the stream that the layer writes to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headscope.examples import Batch
from headscope.objective import Objective

_SUMS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


@dataclass(frozen=True)
class Call:
    """One call of the projection at `path`: what it read, and what it wrote or the sum that this joined."""

    path: str
    read: Tensor
    wrote: Tensor


class _Joining(TorchFunctionMode):
    """Notes the first sum of what a projection wrote with something else of its shape.

    The tensor `wrote` is kept, so that no other can come to lie where it lies; dropout that is off returns it as it is.
    """

    def __init__(self, on_sum: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.on_sum = on_sum
        self.wrote: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        wrote = self.wrote
        if wrote is not None and getattr(func, "__name__", "") in _SUMS and isinstance(result, Tensor):
            same = [one for one in args[:2] if isinstance(one, Tensor) and one.shape == wrote.shape]
            if len(same) == 2 and any(one.data_ptr() == wrote.data_ptr() for one in same):
                self.wrote = None
                self.on_sum(result)
        return result


class Streams:
    """The output projections of a model; with `sums`, those that write to a stream are seen there."""

    def __init__(self, objective: Objective, *, sums: bool = True) -> None:
        self.objective, self._sums = objective, sums
        self._joined: set[str] = set()
        self._order: list[str] | None = None

    def order(self, batch: Batch) -> list[str]:
        """The paths of the projections in the order in which they first run, seen on the first batch that asks.

        It is also seen which of them write to a stream; call it before `shown`.
        """
        if self._order is None:
            found: dict[str, None] = {}
            joining = _Joining(lambda result: self._joined.add(last[0]))
            last: list[str] = []

            def note(path: str, module: nn.Module, read: Tensor, wrote: Tensor) -> None:
                found.setdefault(path)
                last[:], joining.wrote = [path], wrote

            paths = {site.output for site in self.objective.sites}
            with self._hooked(paths, note), joining if self._sums else contextlib.nullcontext():
                self.objective.body(batch)
            self._order = list(found)
        return self._order

    @contextlib.contextmanager
    def shown(self, paths: Sequence[str], on_call: Callable[[Call], None]) -> Iterator[None]:
        """Show every call of these projections while the block runs, in the order of what they wrote or joined."""
        pending: list[tuple[str, Tensor]] = []
        joining = _Joining(lambda result: on_call(Call(*pending[0], result)))

        def note(path: str, module: nn.Module, read: Tensor, wrote: Tensor) -> None:
            if path in self._joined:
                pending[:], joining.wrote = [(path, read)], wrote
            else:
                on_call(Call(path, read, wrote))

        with self._hooked(paths, note), joining if self._joined.intersection(paths) else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _hooked(
        self, paths: Sequence[str] | set[str], note: Callable[[str, nn.Module, Tensor, Tensor], None]
    ) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path in paths:

                def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor, path: str = path) -> None:
                    note(path, module, args[0], output)

                stack.callback(self.objective.model.get_submodule(path).register_forward_hook(hook).remove)
            yield


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """The memory of some tensors, those that share their storage counted once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())
