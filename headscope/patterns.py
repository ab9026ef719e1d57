"""Attention rows of a running model in blocks of queries, from the model's own eager function, never a whole map.

Soft caps, sinks, biases, windows and padding come out as the model computes them, whatever backend it was loaded with.
Families that bypass the attention interface show the probabilities that they compute themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headscope.heads import Site
from headscope.shapes import Bool, Float
from headscope.taps import SOFTMAX, AttentionCall
from headscope.tiles import MASKED, fits, tiles

BLOCK_VALUES = 2**22
"""Probabilities held at once: 16 MiB in float32."""
LONGEST = 512
"""Queries in a block at most: near the start of a causal text they see few keys, and the block grows with them."""


@dataclass(frozen=True)
class Block:
    """Attention rows of the queries from `first` on: `rows`, and which keys each query may look at (`visible`). Keys
    behind the last one that any of these queries may see can be left out.

    `sequence` is the only sequence that the rows are of, or None where they are of all.
    """

    site: Site
    first: int
    rows: Float[Tensor, "sequence head query key"]
    visible: Bool[Tensor, "#sequence query key"]
    logits: Float[Tensor, "sequence head query key"] | None = None
    """log A up to a constant of each query (its largest is 0, masked keys are far below), where that was seen."""
    sequence: int | None = None


Reader = Callable[[Block], None]
"""Sees a block, whose tensors may be overwritten by the next."""


def read(site: Site, call: AttentionCall, reader: Reader) -> Tensor | None:
    """Show every block of an attention call to `reader`, and return the context that eager attention would.

    None stands for the context where the model has already computed its probabilities itself.
    """
    if call.probabilities is not None:
        for block in _cut(site, call.probabilities):
            reader(block)
        return None
    return _read_tiles(site, call, reader) if fits(call) else _read_eager(site, call, reader)


def _read_tiles(site: Site, call: AttentionCall, reader: Reader) -> Tensor:
    assert call.query is not None and call.value is not None
    mask = _Mask(call)
    batch, n_heads, n_queries, _ = call.query.shape
    context = call.value.new_empty(batch, n_queries, n_heads, call.value.shape[-1])
    for tile in tiles(call, mask.mask, causal=mask.causal):
        count, reach = tile.rows.shape[1:]
        allowed = mask.allowed(tile.first, tile.first + count, reach)
        allowed = allowed[tile.sequence : tile.sequence + 1] if len(allowed) > 1 else allowed
        reader(Block(site, tile.first, tile.rows[None], allowed, tile.logits[None], tile.sequence))
        context[tile.sequence, tile.first : tile.first + count] = tile.context.to(context.dtype)
    return context


def _read_eager(site: Site, call: AttentionCall, reader: Reader) -> Tensor:
    query, key, value, eager = call.query, call.key, call.value, call.eager
    assert query is not None and key is not None and value is not None and eager is not None
    mask = _Mask(call)
    n_queries, n_keys = query.shape[2], key.shape[2]
    contexts: list[Tensor] = []
    first = 0
    while first < n_queries:
        width = query.shape[0] * query.shape[1] * mask.reach(first + 1)
        last = min(first + max(1, BLOCK_VALUES // width), first + LONGEST, n_queries)
        reach = mask.reach(last)
        with _SoftmaxTap() as seen:
            context, rows = eager(
                call.module,
                query[:, :, first:last],
                key[:, :, :reach],
                value[:, :, :reach],
                mask.additive(first, last, reach),
                *call.arguments,
                **_sliced(call.keywords, first, last, reach, n_queries=n_queries, n_keys=n_keys),
            )[:2]
        reader(Block(site, first, rows, mask.allowed(first, last, reach), seen.logits_of(rows)))
        contexts.append(context)
        first = last
    return torch.cat(contexts, dim=1)


class _SoftmaxTap(TorchFunctionMode):
    """Remembers what the last softmax was taken of."""

    def __init__(self) -> None:
        super().__init__()
        self._input: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in SOFTMAX and args:
            self._input = args[0]
        return func(*args, **(kwargs or {}))

    def logits_of(self, rows: Tensor) -> Tensor | None:
        """The softmax's input for the keys of `rows`, without the columns of sinks behind them."""
        seen = self._input
        if seen is None or seen.shape[:-1] != rows.shape[:-1] or seen.shape[-1] < rows.shape[-1]:
            return None
        kept = seen[..., : rows.shape[-1]].detach()
        least = max(MASKED, torch.finfo(kept.dtype).min)
        return (kept - kept.amax(dim=-1, keepdim=True)).clamp_min_(least)  # 0 · −∞ is not a number


class _Mask:
    """The mask of a call in any of the forms that transformers makes it: none, boolean or additive."""

    def __init__(self, call: AttentionCall) -> None:
        assert call.query is not None and call.key is not None
        self.query, self.key = call.query, call.key
        self.n_queries, self.n_keys = call.query.shape[2], call.key.shape[2]
        given = call.mask if isinstance(call.mask, Tensor) else None
        self.mask = given if given is None else given[(None,) * (4 - given.dim())]
        declared = call.keywords.get("is_causal")
        causal = getattr(call.module, "is_causal", True) if declared is None else declared
        self.causal = self.mask is None and bool(causal) and self.n_queries > 1

    def reach(self, last: int) -> int:
        """How many keys the queries before `last` may see at most."""
        return min(self.n_keys, last + self.n_keys - self.n_queries) if self.causal else self.n_keys

    def allowed(self, first: int, last: int, reach: int) -> Bool[Tensor, "#sequence query key"]:
        """Which keys each query may look at (one table for all heads)."""
        device = self.query.device
        if self.mask is not None:
            part = self.mask[:, :, first:last, :reach]
            seen = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
            return seen.any(dim=1).expand(-1, last - first, -1)
        if not self.causal:
            return torch.ones(1, last - first, reach, dtype=torch.bool, device=device)
        queries = torch.arange(first, last, device=device) + self.n_keys - self.n_queries
        return (torch.arange(reach, device=device) <= queries[:, None])[None]

    def additive(self, first: int, last: int, reach: int) -> Tensor | None:
        """The mask as eager attention adds it to the scores."""
        if self.mask is not None and self.mask.dtype != torch.bool:
            return self.mask[:, :, first:last, :reach]
        if self.mask is None and not self.causal:
            return None
        allowed = self.mask[:, :, first:last, :reach] if self.mask is not None else None
        allowed = self.allowed(first, last, reach)[:, None] if allowed is None else allowed
        zeros = torch.zeros((), dtype=self.query.dtype, device=self.query.device)
        return torch.where(allowed, zeros, torch.finfo(self.query.dtype).min)


def _sliced(
    keywords: dict[str, Any], first: int, last: int, reach: int, *, n_queries: int, n_keys: int
) -> dict[str, Any]:
    """Keyword arguments for a block: biases of every query and key are cut to its queries and keys."""
    cut: dict[str, Any] = {}
    for name, value in keywords.items():
        if isinstance(value, Tensor) and value.dim() == 4 and value.shape[-2:] == (n_queries, n_keys):
            cut[name] = value[..., first:last, :reach]
        else:
            cut[name] = value
    return cut


def _cut(site: Site, probabilities: Tensor) -> Iterator[Block]:
    """Blocks of probabilities that a model made itself, `[sequence head query key]` or `[sequence*head query key]`."""
    n_queries, n_keys = probabilities.shape[-2:]
    whole = probabilities.detach().reshape(-1, site.n_heads, n_queries, n_keys)
    size = max(1, BLOCK_VALUES // (whole.shape[0] * site.n_heads * n_keys))
    for first in range(0, n_queries, size):
        rows = whole[:, :, first : first + size]
        yield Block(site, first, rows, (rows > 0).any(dim=1))
