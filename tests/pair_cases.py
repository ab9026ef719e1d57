"""Passes over batches for tests of pairs of heads: headscope's sums, and the references on what transformers gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pair_reference as reference
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.capture import watch
from headscope.discovery import find_sites
from headscope.heads import AttentionKind, Site
from headscope.matrices import head_weights
from headscope.measures import Evidence, Measure, PairValues
from headscope.pair_sums import PairSums, load_measures
from headscope.pairs import HeadSpace
from headscope.reading import RowReader
from headscope.texts import Texts

ALL = ("attention", "hellinger", "output", "cosine", "qk", "ov")
Inputs = dict[str, Any]


def space_of(model: PreTrainedModel) -> HeadSpace:
    return HeadSpace(tuple(find_sites(model).sites), partial(head_weights, model))


def size(inputs: Inputs) -> int:
    return next(len(value) for value in inputs.values() if isinstance(value, Tensor))


def decoded(inputs: Inputs) -> Tensor | None:
    mask = inputs.get("decoder_attention_mask")
    if mask is None and "decoder_input_ids" in inputs:
        mask = torch.ones_like(inputs["decoder_input_ids"])
    return mask


def parts(inputs: Inputs, *sizes: int) -> list[Inputs]:
    """A batch cut into smaller ones, still padded to one length."""
    found, first = [], 0
    for count in sizes:
        here = slice(first, first + count)
        found.append({name: value[here] if isinstance(value, Tensor) else value for name, value in inputs.items()})
        first += count
    return found


def measured(
    model: PreTrainedModel,
    batches: Sequence[Inputs],
    names: Sequence[str] = ALL,
    *,
    space: HeadSpace | None = None,
    replace: bool = True,
    measures: dict[str, Measure] | None = None,
) -> dict[str, PairValues]:
    """The measures from one pass over some batches."""
    space = space or space_of(model)
    sums = PairSums(space, measures or load_measures(names))
    if any(measure.evidence is not Evidence.WEIGHTS for measure in sums.measures.values()):
        run(model, batches, sums, replace=replace)
    return sums.finish()


def run(model: PreTrainedModel, batches: Sequence[Inputs], sums: PairSums, *, replace: bool = True) -> int:
    """One pass; returns how many times the model ran."""
    runs = number = 0
    sites = sums.space.sites
    reader = RowReader(model, sites, sums.readers, replace=replace)
    with torch.no_grad(), watch(model, sites, gradients=False) as seen, sums.watching(model, sites), reader.reading():
        for inputs in batches:
            seen.batch = size(inputs)
            again = True
            while again:
                texts = Texts(inputs, decoded(inputs), None)
                reader.start(texts, seen.batch)
                sums.start(texts, range(number, number + seen.batch))
                model(**inputs)
                again = sums.end(seen)
                runs += 1
            number += seen.batch
    return runs


def own_maps(model: PreTrainedModel, inputs: Inputs) -> list[Tensor]:
    """The maps that transformers itself gives under eager attention, in the order of its own outputs."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
    groups = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    towers = [getattr(result, f"{tower}_model_output", None) for tower in ("vision", "text")]
    found = [getattr(one, name, None) for one in (result, *towers) for name in groups]
    return [one for maps in found for one in (maps or ()) if one is not None]


def real_of(site: Site, inputs: Inputs, width: int) -> Tensor:
    """Which query tokens of a site are no padding, `[example token]`."""
    mask = decoded(inputs) if site.id.stack == "decoder" and "decoder_input_ids" in inputs else None
    mask = inputs.get("attention_mask") if mask is None else mask
    if mask is None or site.id.stack in ("vision", "audio") or mask.shape[1] != width:
        return torch.ones(size(inputs), width, dtype=torch.bool)
    return mask.bool()


def wanted_maps(model: PreTrainedModel, batches: Sequence[Inputs], sites: Sequence[Site]) -> list[reference.Map]:
    """The stored maps of every head."""
    found: list[reference.Map] = []
    for inputs in batches:
        heads: list[reference.Map] = []
        for site, grid in zip(sites, own_maps(model, inputs), strict=True):
            real = real_of(site, inputs, grid.shape[2])
            for head in range(site.n_heads):
                texts = [grid[example, head][real[example]].double() for example in range(len(grid))]
                rest = [(1 - rows.sum(dim=1)).clamp_min(0) * ("sinks" in str(site.slices)) for rows in texts]
                both = [torch.cat([rows, more[:, None]], dim=1) for rows, more in zip(texts, rest, strict=True)]
                heads.append([rows.tolist() for rows in both])
        found = [mine + more for mine, more in zip(found, heads, strict=True)] if found else heads
    return found


def wanted_written(model: PreTrainedModel, batches: Sequence[Inputs], sites: Sequence[Site]) -> list[Tensor]:
    """The stored vectors that every head writes at real tokens, `[token d_model]`."""
    model.set_attn_implementation("eager")
    places = [(model.get_submodule(site.output), site.channels, site.call) for site in sites]
    with torch.no_grad(), reference.Written(places) as written:
        for inputs in batches:
            model(**inputs)
    found: list[Tensor] = []
    for site, calls in zip(sites, written.calls, strict=True):
        for head in range(site.n_heads):
            kept = [
                call[head][real_of(site, inputs, call.shape[2])] for inputs, call in zip(batches, calls, strict=True)
            ]
            found.append(torch.cat(kept).double())
    return found


def references(
    model: PreTrainedModel, batches: Sequence[Inputs], space: HeadSpace, chosen: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """All measures by loops over pairs, of all heads or of those at the places `chosen`."""
    sites, owner = space.sites, space.owner.tolist()
    maps, written = wanted_maps(model, batches, sites), wanted_written(model, batches, sites)
    weights = [head_weights(model, site) for site in sites]
    place = [head - owner.index(site) for head, site in enumerate(owner)]

    def queries(a: int, b: int) -> bool:
        return sites[owner[a]].id.stack == sites[owner[b]].id.stack

    def keys(a: int, b: int) -> bool:
        kinds = [sites[owner[head]].id.kind is AttentionKind.CROSS for head in (a, b)]
        return queries(a, b) and kinds[0] == kinds[1]

    def factors(head: int, left: str, right: str) -> tuple[Tensor, Tensor] | None:
        both = [getattr(weights[owner[head]], name) for name in (left, right)]
        return (
            None if any(one is None for one in both) else (both[0][place[head]].double(), both[1][place[head]].double())
        )

    def circuits(a: int, b: int, left: str, right: str, value: Any) -> float:
        one, other = factors(a, left, right), factors(b, left, right)
        if one is None or other is None:
            return reference.NAN
        widths = [(pair[0].shape[0], pair[1].shape[0 if left == "query" else 1]) for pair in (one, other)]
        return value(one, other) if widths[0] == widths[1] else reference.NAN

    def of(defined: Any, value: Any, stored: Sequence[Any]) -> Any:
        return lambda a, b: value(stored[a], stored[b]) if defined(a, b) else reference.NAN

    values = {
        "attention": of(keys, reference.attention, maps),
        "hellinger": of(keys, reference.hellinger, maps),
        "output": of(queries, reference.output, written),
        "cosine": of(queries, reference.cosine, written),
        "qk": lambda a, b: circuits(a, b, "query", "key", reference.qk),
        "ov": lambda a, b: circuits(a, b, "value", "output", reference.ov),
    }
    chosen = range(len(owner)) if chosen is None else chosen
    return {name: reference.table(chosen, value) for name, value in values.items()}
