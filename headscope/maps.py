"""The attention map of one head for one text: the share of its attention that each query token gives each key token."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headscope.columns import Column
from headscope.errors import DataError, ModelError, UsageError
from headscope.examples import collate
from headscope.heads import HeadId, Site, parse_heads
from headscope.inputs import probe_inputs
from headscope.memory import memory_errors
from headscope.models import LoadedModel
from headscope.offload import home
from headscope.reading import RowReader
from headscope.reasons import quiet
from headscope.scores import RowBlock
from headscope.study import Study
from headscope.tables import Cell, Table
from headscope.tasks import Encoder, example, moved_right
from headscope.texts import Side, Texts

GENERATED = 40
"""Tokens that an encoder-decoder writes itself, at most, where no target text is given."""
MAP_COLUMNS = (
    Column("query", "number", "position of the token that looks, from 0"),
    Column("query_token", "text", "the token that looks", untrusted=True),
    Column("key", "number", "position of the token that is looked at, from 0"),
    Column("key_token", "text", "the token that is looked at", untrusted=True),
    Column("attention", "1", "share of the query's attention that the key gets"),
)


@dataclass(frozen=True)
class Map:
    """Attention of one head, `rows[query, key]`, and which keys each query may see (`visible`); token texts beside."""

    head: HeadId
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    rows: Tensor
    visible: Tensor
    notes: tuple[str, ...] = ()


def attention_map(study: Study, text: str, head: str, *, target: str | None = None) -> Map:
    """The map of the head that the label `head` names, from one run of the model on `text`.

    The decoder behind an encoder reads `target`, or what the model itself writes for the text. Texts are cut to the
    study's `max_length`, where that is set.

    Raises:
        UsageError: the model reads no text or has no such head, or the text has no place in it.
        ModelError: the head's attention is not one row per token.
    """
    loaded = study.loaded
    _require_text(loaded, target)
    found = find_head(study.sites, head)
    site = next(site for site in study.sites if site.id == found.site)
    if site.id.stack in ("vision", "audio"):
        raise UsageError(f"{found} reads no text, so it has no map of one")
    encoder = _encoder(study)
    try:
        inputs, notes = _inputs(loaded, encoder, text, target)
    except DataError as error:
        raise UsageError(str(error), hint=error.hint or "--max-length N cuts a text") from None
    texts, blocks = Texts(inputs, None, None), _Blocks(site.heads.index(found))
    reader = RowReader(loaded.model, [site], [blocks.see], replace=False)
    reader.start(texts, 1)
    with torch.no_grad(), memory_errors(1), reader.reading():
        loaded.model(**inputs)
    rows, visible = blocks.joined(found)
    tokenizer = encoder.tokenizer
    queries, keys = texts.queries(site), texts.keys(site)
    sides = (_tokens(tokenizer, queries, rows.shape[0]), _tokens(tokenizer, keys, rows.shape[1]))
    return Map(found, *sides, rows, visible, (*loaded.notes, *notes))


def map_table(study: Study, found: Map) -> Table:
    """One row per query and key token."""
    rows: list[dict[str, Cell]] = [
        {"query": query, "query_token": asking, "key": key, "key_token": asked, "attention": value}
        for query, (asking, line) in enumerate(zip(found.queries, found.rows.tolist(), strict=True))
        for key, (asked, value) in enumerate(zip(found.keys, line, strict=True))
    ]
    return Table("map", MAP_COLUMNS, tuple(rows), "", replace(study.provenance(), examples=1), found.notes)


def find_head(sites: Sequence[Site], label: str) -> HeadId:
    """The one head that a full or short label names.

    Raises:
        UsageError: it names none, several or no possible head; the nearest ones are named.
    """
    try:
        heads, _ = parse_heads(label, sites)
    except ValueError as error:
        near = ", ".join(_nearest(label, [head for site in sites for head in site.heads]))
        raise UsageError(f"--head {label}: {error}", hint=f"nearest: {near}") from None
    if len(heads) != 1:
        raise UsageError(f"--head {label}: {len(heads)} heads, and a map shows one", hint="name one of them")
    return heads[0]


def _nearest(label: str, heads: Sequence[HeadId]) -> list[str]:
    """The labels of three heads: nearest by stack and kind, then layer, then number."""
    parts = re.fullmatch(r"(?:(.*)\.)?([0-9]{1,9})[.:]([0-9]{1,9})", label.strip())
    if parts is None:
        return difflib.get_close_matches(label, [str(head) for head in heads], n=3, cutoff=0.0)
    stack, layer, index = parts[1] or "", int(parts[2]), int(parts[3])

    def distance(head: HeadId) -> tuple[float, int, int]:
        named = f"{head.site.stack}.{head.site.kind}"
        unlike = 1 - difflib.SequenceMatcher(None, stack, named).ratio() if stack else 0.0
        return unlike, abs(head.site.layer - layer), abs(head.index - index)

    return [str(head) for head in sorted(heads, key=distance)[:3]]


def _require_text(loaded: LoadedModel, target: str | None) -> None:
    """Refuse models that read something else."""
    model = loaded.model
    if loaded.reads == "images" or any("pixel" in name for name in probe_inputs(model)):
        raise UsageError("this model reads images: --text shows heads of models that read text alone")
    if model.main_input_name != "input_ids":
        raise UsageError("this model reads sound: --text shows heads of models that read text alone")
    if target is not None and not _writes(model):
        raise UsageError("this model writes no target text", hint="leave out --target-text")


def _writes(model: Any) -> bool:
    """Whether the model writes a text of its own behind an encoder."""
    return bool(model.config.is_encoder_decoder) and bool(model.can_generate())


def _encoder(study: Study) -> Encoder:
    loaded, options = study.loaded, study.options.data
    limit, wanted = loaded.max_length(), options.max_length
    if wanted is not None and limit is not None and wanted > limit:
        raise UsageError(f"--max-length {wanted} is more than this model's limit of {limit} tokens")
    return Encoder(
        config=loaded.model.config,
        tokenizer=loaded.tokenizer(),
        max_length=wanted or limit or 512,
        on_long="error" if wanted is None else "truncate",
        parse_special=options.parse_special,
    )


def _inputs(
    loaded: LoadedModel, encoder: Encoder, text: str, target: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the model reads: the text, and for a decoder behind an encoder its own tokens; and what was cut."""
    model, task = loaded.model, loaded.task
    tokens, cut = encoder.cut(text)
    notes = [f"the text was cut to {encoder.max_length} tokens"] if cut else []
    targets = [0]
    if _writes(model) and target is not None:
        labels, cut = encoder.cut(None, text_target=target)
        targets = labels["input_ids"]
        notes += [f"the target text was cut to {encoder.max_length} tokens"] if cut else []
    batch = collate([example(0, tokens, targets)], {}).to(home(model), model.dtype)
    prepared = task.prepare(model, batch) if task.prepare and (target is not None or not _writes(model)) else None
    inputs: dict[str, Any] = dict(prepared or batch.inputs)
    accepted = inspect.signature(model.forward).parameters
    if "token_type_ids" not in accepted or model.config.is_encoder_decoder:
        inputs.pop("token_type_ids", None)
    if not _writes(model) and model.config.is_encoder_decoder and "decoder_input_ids" in accepted:
        inputs.setdefault("decoder_input_ids", moved_right(model.config, batch.inputs["input_ids"]))
    if _writes(model) and target is None:
        inputs["decoder_input_ids"] = _written(model, inputs, min(GENERATED, encoder.max_length))
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs, tuple(notes)


def _written(model: Any, inputs: dict[str, Any], count: int) -> Tensor:
    """The start token and what the model writes behind it, always the likeliest token; without the last token, which
    nothing follows.
    """
    with torch.no_grad(), quiet(), memory_errors(1):
        written = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=count)
    return written[:, :-1]


class _Blocks:
    """The rows of one head, block by block."""

    def __init__(self, head: int) -> None:
        self.head = head
        self.seen: list[tuple[Tensor, Tensor]] = []

    def see(self, block: RowBlock) -> dict[str, Tensor]:
        """Keep a block's rows; nothing is summed."""
        if len(block.rows) == 1:
            visible = block.visible[0] & torch.ones_like(block.rows[0, self.head], dtype=torch.bool)
            self.seen.append((block.rows[0, self.head].detach().double().cpu(), visible.cpu()))
        return {}

    def joined(self, head: HeadId) -> tuple[Tensor, Tensor]:
        """All rows, `[query key]`, and which keys are visible; blocks leave out keys that none of their queries see.

        Raises:
            ModelError: none was seen, or the model cuts its text into windows.
        """
        if not self.seen:
            raise ModelError(f"{head}: its attention is not one row of keys for each token, so there is no map to show")
        n_keys = max(rows.shape[1] for rows, _ in self.seen)
        parts = [[torch.nn.functional.pad(one, (0, n_keys - one.shape[1])) for one in seen] for seen in self.seen]
        rows, visible = (torch.cat(list(side)) for side in zip(*parts, strict=True))
        return rows, visible


def _tokens(tokenizer: Any, side: Side | None, count: int) -> tuple[str, ...]:
    """The texts of the tokens; empty ones where it is not known what stands at the positions."""
    if side is None or side.tokens is None or side.tokens.shape[1] != count:
        return ("",) * count
    return tuple(_text(tokenizer, token) for token in side.tokens[0].tolist())


def _text(tokenizer: Any, token: int) -> str:
    """The token as its vocabulary spells it; bytes that make up whole letters as these letters."""
    piece = tokenizer.convert_ids_to_tokens(token)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and "ByteLevel" in type(backend.decoder).__name__:
        letters = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if letters and "\ufffd" not in letters:
            return letters
    return "" if piece is None else str(piece)
