"""Reading attention rows while a model runs: every score sums what it needs from blocks that are dropped at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.capture import SiteCalls
from headscope.checkpointed import again
from headscope.heads import Site, SiteId
from headscope.parallel import shards_of
from headscope.patterns import Block, read
from headscope.scores import RowBlock
from headscope.taps import AttentionCall, FunctionTap, InterfaceTap, ModuleStack
from headscope.texts import Texts

Sums = dict[str, Tensor]
_READABLE = ("eager", "sdpa")


class RowReader:
    """Sums over attention rows for each site and example of the running batch.

    `replace` lets the model go on with the context of the blocks instead of computing attention twice; with gradients
    it must be off, since the blocks' graph would keep every row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        readers: Sequence[Callable[[RowBlock], Sums]],
        *,
        replace: bool,
    ) -> None:
        self.model, self.readers, self.replace = model, readers, replace
        self._shards = shards_of(model)
        self._calls = SiteCalls((model.get_submodule(site.module), self._shards.part(site)) for site in sites)
        self._function = any(site.source == "function" for site in sites)
        self._texts, self._examples = Texts({}, None, None), 1
        self._sums: dict[SiteId, Sums] = {}

    def start(self, texts: Texts, examples: int) -> None:
        """Begin a batch: what stands in it, and how many examples it has."""
        self._texts, self._examples = texts, examples
        self._sums.clear()

    @property
    def sums(self) -> dict[SiteId, Sums]:
        """What the readers summed over the batch, `[example head]` by site and name."""
        if self._shards.size == 1:
            return self._sums
        return {
            site: {name: self._shards.gathered(values, 1) for name, values in found.items()}
            for site, found in self._sums.items()
        }

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read while the block runs; the attention implementation is switched where needed and put back."""
        with contextlib.ExitStack() as stack:
            if not self._function:
                stack.enter_context(readable_attention(self.model))
            stack.callback(self._calls.counted(self.model).remove)
            tap = stack.enter_context(InterfaceTap(self._off_interface, self._read))
            if self._function:
                modules = stack.enter_context(ModuleStack(self.model, lambda *_: None))
                stack.enter_context(FunctionTap(modules, tap, self._off_interface))
            yield

    def _read(self, call: AttentionCall) -> Tensor | None:
        """Read a call before the model computes it; with `replace` the blocks' context stands in for its result."""
        site = None if again() else self._calls.site(call.module)
        if site is None:
            return None
        with contextlib.nullcontext() if self.replace else torch.no_grad():
            context = read(site, call, self._add)
        return context if self.replace else None

    def _off_interface(self, call: AttentionCall) -> None:
        if call.on_interface:  # functions are not followed in a backward pass, where layers run again
            return
        site = self._calls.site(call.module)
        if site is not None:
            with torch.no_grad():
                read(site, call, self._add)

    def _add(self, block: Block) -> None:
        """Add what the scores make of a block to the sums of its examples and heads."""
        site, sums = block.site, self._sums.setdefault(block.site.id, {})
        shown = self._texts.block(block, self._examples)
        for reader in self.readers:
            for name, values in reader(shown).items():
                if name not in sums:
                    sums[name] = values.new_zeros(self._examples, site.n_heads)
                if block.sequence is None:  # windows of an example together
                    sums[name] += values.reshape(self._examples, -1, site.n_heads).sum(dim=1)
                else:
                    sums[name][block.sequence] += values[0]


@contextlib.contextmanager
def readable_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run with an implementation whose masks say which keys a query may see, and put back the one that was set."""
    before = str(model.config._attn_implementation)
    if before in _READABLE:
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
