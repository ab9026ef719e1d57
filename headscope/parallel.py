"""Tensor-parallel models: each process holds some heads of every site, and what these show is gathered from all.

transformers splits a model so (`DistributedConfig(tp_size=...)`): query, key and value projections by their outputs,
the output projection by its inputs, all of them as distributed tensors. A hook sees the heads of its own process only.
Every process runs every batch, asks the same of the others in the same order, and has the same sums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headscope.errors import UnsupportedModel, UsageError
from headscope.heads import ParameterSlice, Role, Site


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, unless it is distributed."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor; of a distributed one each process must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Shards:
    """The part of every site's heads that this process holds: the one of number `rank` of `size` equal ones."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def part(self, site: Site) -> Site:
        """The site as the hooks of this process see it: with its own heads only, numbered from 0, and no slices."""
        if self.size == 1:
            return site
        count, width = site.n_heads // self.size, len(site.channels) // self.size
        channels = site.channels[self.rank * width : (self.rank + 1) * width]
        own = tuple(head - self.rank * count if head >= 0 else -1 for head in channels)
        return replace(site, n_heads=count, n_kv_heads=site.n_kv_heads // self.size, channels=own, slices=())

    def own(self, per_head: Tensor) -> Tensor:
        """The part of `[... head]` for the heads of this process."""
        return per_head if self.size == 1 else per_head.chunk(self.size, dim=-1)[self.rank]

    def gathered(self, values: Tensor, axis: int) -> Tensor:
        """Values for the heads of all processes from those of each, along the axis of heads."""
        if self.size == 1:
            return values
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.cat(parts, dim=axis)

    def joined(self, sites: Sequence[Site], model: nn.Module) -> tuple[Site, ...]:
        """The sites with the heads of all processes, from those that each has found among its own.

        Raises:
            UnsupportedModel: the processes hold unequal parts, or something else than heads is split.
        """
        if self.size == 1:
            return tuple(sites)
        for site in sites:
            if site.on_context or not hasattr(model.get_submodule(site.output).weight, "to_local"):
                raise UnsupportedModel(f"{site.id}: tensor parallelism does not split its heads")
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, list(sites), group=self.group)
        return tuple(_joined(parts, model) for parts in zip(*found, strict=True))


WHOLE = Shards()
"""One process holds every head."""


def shards_of(model: nn.Module) -> Shards:
    """How the heads of a model are split between processes.

    Raises:
        UnsupportedModel: its weights are split in another way than by tensor parallelism.
    """
    meshes: list[Any] = [one.device_mesh for one in model.parameters() if hasattr(one, "device_mesh")]  # type: ignore[attr-defined]
    if not meshes:
        return WHOLE
    size = getattr(model, "_tp_size", None)
    if any(mesh.ndim != 1 or mesh.size() != size for mesh in meshes):
        raise UnsupportedModel(
            f"the weights of this {type(model).__name__} are split by more than tensor parallelism (tp_size)"
        )
    return Shards(meshes[0].get_local_rank(), meshes[0].size(), meshes[0].get_group())


def splitting(config: Any, device: str) -> dict[str, Any]:
    """What `from_pretrained` takes to split a model between all processes.

    Raises:
        UsageError: there is one process only, they cannot have as many heads each, or a device is named, which
            transformers chooses itself.
    """
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        raise UsageError("tensor_parallel needs several processes", hint="torchrun --nproc-per-node N starts them")
    if device != "auto":
        raise UsageError(f"tensor_parallel gives each process a device of its own, and --device {device} names one")
    sizes = config.get_text_config()
    heads = [getattr(sizes, name, None) or world for name in ("num_attention_heads", "num_key_value_heads")]
    if any(isinstance(count, int) and count % world for count in heads):
        raise UsageError(f"{world} processes cannot share out {heads[0]} heads with {heads[1]} keys and values evenly")
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=world)}


def require_whole(options: Any, what: str) -> None:
    """Refuse to split a model for what needs all of it in one process; `options` say how to load it, if anything does.

    Raises:
        UsageError: they ask for that.
    """
    if options is not None and options.tensor_parallel:
        raise UsageError(f"{what} needs a whole model: tensor_parallel is for inspect and similarity")


def _joined(parts: Sequence[Site], model: nn.Module) -> Site:
    first = parts[0]
    if len({(site.id, site.n_heads, site.n_kv_heads, len(site.channels), len(site.slices)) for site in parts}) > 1:
        raise UnsupportedModel(
            f"{first.id}: tensor parallelism does not give each process as many of its heads: "
            + ", ".join(f"{site.n_heads} with {site.n_kv_heads} keys" for site in parts)
        )
    channels = _numbered([site.channels for site in parts], first.n_heads)
    pieces = [_slice(each, first, model) for each in zip(*(site.slices for site in parts), strict=True)]
    slices = tuple(piece for piece in pieces if piece is not None)
    alike = [piece.path for piece, kept in zip(first.slices, pieces, strict=True) if kept is None]
    total = {"n_heads": first.n_heads * len(parts), "n_kv_heads": first.n_kv_heads * len(parts)}
    return replace(first, **total, channels=channels, slices=slices, shared=(*first.shared, *alike))


def _slice(pieces: Sequence[ParameterSlice], site: Site, model: nn.Module) -> ParameterSlice | None:
    """One slice of all processes: their parts of a tensor end to end, or what each uses of a tensor that all hold; None
    where several use the same of that.
    """
    first = pieces[0]
    count = site.n_kv_heads if first.role in (Role.KEY, Role.VALUE) else site.n_heads
    owners = [piece.owner for piece in pieces]
    if len(first.owner) != getattr(model.get_submodule(first.module), first.name).shape[first.axis]:
        return replace(first, owner=_numbered(owners, count))
    numbered = [[head + rank * count if head >= 0 else -1 for head in own] for rank, own in enumerate(owners)]
    if any(sum(head >= 0 for head in users) > 1 for users in zip(*numbered, strict=True)):
        return None  # a norm for every head, say, of which a process with one head cannot know
    return replace(first, owner=tuple(map(max, *numbered)))


def _numbered(parts: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    """Head numbers of each process, laid end to end, counted on from one to the next; -1 stays."""
    return tuple(head + rank * count if head >= 0 else -1 for rank, part in enumerate(parts) for head in part)


def of_all(reader: Callable[[Any], dict[str, Tensor]], sites: Sequence[Site], shards: Shards) -> Any:
    """A reader of attention rows that needs those of all heads at once, given blocks of the heads of this process."""
    if shards.size == 1:
        return reader
    known = {site.id: site for site in sites}

    def read(block: Any) -> dict[str, Tensor]:
        return reader(replace(block, site=known[block.site.id], rows=shards.gathered(block.rows, 1), logits=None))

    return read
