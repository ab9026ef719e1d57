"""The matrices of each head, cut out of a model's parameters by the slices that discovery found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headscope.cost import SiteShape
from headscope.heads import AttentionKind, ParameterSlice, Role, Site
from headscope.losses import wide
from headscope.offload import retie, stored
from headscope.parallel import full
from headscope.shapes import Float


@dataclass(frozen=True)
class HeadWeights:
    """The matrices of one site's query heads as stored, in float32 or wider.

    Heads of one group repeat their key and value. None where the model keeps no such matrix for each head.
    """

    query: Float[Tensor, "head d_in d_head"] | None
    key: Float[Tensor, "head d_source d_head"] | None
    value: Float[Tensor, "head d_source d_value"] | None
    output: Float[Tensor, "head d_value d_model"] | None


def head_weights(model: nn.Module, site: Site) -> HeadWeights:
    """The query, key, value and output matrix of every head of a site."""
    return HeadWeights(*(_stacked(model, site, role) for role in (Role.QUERY, Role.KEY, Role.VALUE, Role.OUTPUT)))


def _stacked(model: nn.Module, site: Site, role: Role) -> Tensor | None:
    sizes = {piece: _declared(model, piece).dim() for piece in site.slices_of(role)}
    piece = next((piece for piece, axes in sizes.items() if axes == 2), None)
    if piece is None or max(sizes.values()) > 2:  # beside a tensor of more axes, a matrix is a bias of each head
        return None
    parameter = wide(full(_parameter(model, piece).detach()))
    shared = role in (Role.KEY, Role.VALUE)
    owners = [site.kv_head(head) if shared else head for head in range(site.n_heads)]
    chosen = [torch.tensor(piece.indices(owner), device=parameter.device) for owner in owners]
    if len({len(indices) for indices in chosen}) != 1 or not len(chosen[0]):
        return None
    matrices = torch.stack([parameter.index_select(piece.axis, indices) for indices in chosen])
    rows_are_owned = piece.axis == 0
    if role is Role.OUTPUT:
        return matrices if rows_are_owned else matrices.transpose(1, 2)
    return matrices.transpose(1, 2) if rows_are_owned else matrices


def _parameter(model: nn.Module, piece: ParameterSlice) -> Tensor:
    return stored(model.get_submodule(piece.module), piece.name)


def _declared(model: nn.Module, piece: ParameterSlice) -> Tensor:
    """The parameter for its shape alone: its values may be elsewhere."""
    return getattr(model.get_submodule(piece.module), piece.name)


def total_parameters(model: nn.Module) -> int:
    """All parameters of a model; tied ones count once."""
    retie(model)
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_per_head(model: nn.Module, site: Site) -> tuple[int, ...]:
    """Query, output and gate slices of each query head, with the key and value slices at the first head of a group.

    A module shared between layers is counted at its first layer; parameters that couple heads count in equal parts.
    """
    counts = [0] * site.n_heads
    if site.call:
        return tuple(counts)
    for piece in site.slices_of(Role.QUERY, Role.KEY, Role.VALUE, Role.GATE, Role.OUTPUT):
        parameter = _declared(model, piece)
        if piece.name == "weight" and parameter.dim() == 1:
            continue  # a norm's gains are no slice of a projection
        each = parameter.numel() // parameter.shape[piece.axis]
        shared = piece.role in (Role.KEY, Role.VALUE)
        for owner in piece.owner:
            if owner >= 0:
                counts[owner * site.group_size if shared else owner] += each
    for path in site.coupled:  # no slice of these is one head's alone: each counts as one part of as many
        size = model.get_parameter(path).numel()
        for head in range(site.n_heads):
            counts[head] += size // site.n_heads + (head < size % site.n_heads)
    return tuple(counts)


def site_shape(model: nn.Module, site: Site) -> SiteShape:
    """The sizes of a site that its cost depends on."""
    key = next((piece for piece in site.slices_of(Role.KEY) if _declared(model, piece).dim() == 2), None)
    left = model.get_submodule(site.module).__dict__.get("headscope_left", {})
    return SiteShape(
        id=site.id,
        n_heads=site.n_heads,
        n_kv_heads=site.n_kv_heads,
        d_head=site.d_head,
        d_value=site.d_value,
        d_model=site.d_model,
        parameters_per_head=parameters_per_head(model, site),
        keeps_cache=site.id.kind is not AttentionKind.SELF,
        d_source=0 if key is None else _declared(model, key).shape[1 - key.axis],
        window=site.window,
        n_computed=left.get("heads", 0),
        n_kv_computed=left.get("kv_heads", 0),
    )


def dead_heads(model: nn.Module, site: Site) -> tuple[bool, ...]:
    """Whether each head writes nothing whatever it reads: its output matrix, or its values and their bias, are zero."""
    dead = [False] * site.n_heads
    for head in range(site.n_heads):
        output = [_norm(model, piece, head) for piece in site.slices_of(Role.OUTPUT)]
        value = [_norm(model, piece, site.kv_head(head)) for piece in site.slices_of(Role.VALUE)]
        dead[head] = not any(output) or (bool(value) and not any(value))
    return tuple(dead)


def _norm(model: nn.Module, piece: ParameterSlice, owner: int) -> float:
    parameter = wide(full(_parameter(model, piece).detach()))
    chosen = torch.tensor(piece.indices(owner), device=parameter.device, dtype=torch.long)
    return float(parameter.index_select(piece.axis, chosen).norm())
