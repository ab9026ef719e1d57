"""The shared words: a site is one attention module at one layer, a head is one of its outputs; no torch here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class AttentionKind(StrEnum):
    """What a query may look at: its own sequence, its own past, or another stack."""

    SELF = "self"
    CAUSAL = "causal"
    CROSS = "cross"


class Role(StrEnum):
    """What a parameter slice does for its head."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    GATE = "gate"
    """Scales the head's output after the mixing (output gates)."""
    EXTRA = "extra"
    """Acts inside the softmax or on the context (sinks, relative bias tables, per-head scales)."""
    OUTPUT = "output"


@dataclass(frozen=True, order=True)
class SiteId:
    """One attention module at one layer; prints as `encoder.self.3`."""

    stack: str
    kind: AttentionKind
    layer: int

    def __str__(self) -> str:
        return f"{self.stack}.{self.kind}.{self.layer}"


@dataclass(frozen=True, order=True)
class HeadId:
    """One query head, numbered as in the unpruned model for ever; prints as `encoder.self.3.7`."""

    site: SiteId
    index: int

    def __str__(self) -> str:
        return f"{self.site}.{self.index}"

    @classmethod
    def parse(cls, label: str) -> HeadId:
        """The head that `stack.kind.layer.index` names.

        Raises:
            ValueError: the label has another form or names no known kind.
        """
        found = re.fullmatch(r"(.+)\.(self|causal|cross)\.(\d+)\.(\d+)", label)
        if found is None:
            raise ValueError(f"{label!r} is not a head label such as encoder.self.3.7")
        stack, kind, layer, index = found.groups()
        return cls(SiteId(stack, AttentionKind(kind), int(layer)), int(index))


@dataclass(frozen=True)
class ParameterSlice:
    """Which indices along one axis of a parameter belong to which head.

    `owner[i]` is the head of index `i`: a key/value head for the roles key and value, a query head for the others,
    and -1 where no single head owns it.
    """

    module: str
    name: str
    axis: int
    role: Role
    owner: tuple[int, ...]

    @property
    def path(self) -> str:
        """The parameter's full name in the model."""
        return f"{self.module}.{self.name}" if self.module else self.name

    def indices(self, head: int) -> list[int]:
        """The indices along `axis` that `head` owns."""
        return [index for index, owner in enumerate(self.owner) if owner == head]


@dataclass(frozen=True)
class Site:
    """Where the heads of one attention module live in the model.

    `channels[c]` is the head whose output is input channel `c` of the output projection (-1: none); `channel_axis` and
    `batch_axis` are the axes of that input which hold the channels and the examples.
    `coupled` names parameters that several heads share in a way that makes physical removal inexact, `shared` those
    that serve all heads and stay whole. `call` counts earlier calls of the same module in one forward pass: it is
    above 0 only where layers share one module, whose other layers are then listed in `shared_with`.
    """

    id: SiteId
    module: str
    module_class: str
    output: str
    channels: tuple[int, ...]
    channel_axis: int
    batch_axis: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    d_model: int
    slices: tuple[ParameterSlice, ...] = ()
    coupled: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    shared_with: tuple[SiteId, ...] = ()
    call: int = 0
    mixes_heads: bool = False
    """The projection's input already mixes heads (a norm over all of them)."""
    on_context: bool = False
    """Heads are read and gated where the attention function returns them, since the projection's input mixes them or
    no module projects them (its weight is passed to a function). `batch_axis` is then one of the context."""
    context_axis: int = 2
    """The axis of heads in what the attention function returns; 0 where it holds sequences and heads together."""
    window: int | None = None
    """The most keys that a query sees, where the module limits it."""
    source: str = "interface"
    numbers: tuple[int, ...] = ()
    """Numbers of the query heads in the unpruned model, where heads were removed since; empty: 0, 1, 2, …"""
    kv_numbers: tuple[int, ...] = ()
    """The same for the key/value heads."""

    @property
    def heads(self) -> list[HeadId]:
        """The query heads in order, by their numbers in the unpruned model."""
        return [HeadId(self.id, number) for number in self.numbers or range(self.n_heads)]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The numbers of the query heads that share each key/value head."""
        numbers = [head.index for head in self.heads]
        return [tuple(numbers[start : start + self.group_size]) for start in range(0, self.n_heads, self.group_size)]

    def kv_number(self, head: int) -> int:
        """The number in the unpruned model of the key/value head that the query head at place `head` reads."""
        place = self.kv_head(head)
        return self.kv_numbers[place] if self.kv_numbers else place

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads

    def kv_head(self, head: int) -> int:
        """The place of the key/value head that the query head at place `head` reads."""
        return head // self.group_size

    def slices_of(self, *roles: Role) -> list[ParameterSlice]:
        """The slices with one of these roles."""
        return [piece for piece in self.slices if piece.role in roles]

    @property
    def attention(self) -> str:
        """`MHA`, `GQA` or `MQA`."""
        if self.n_kv_heads == self.n_heads:
            return "MHA"
        return "MQA" if self.n_kv_heads == 1 else "GQA"


def parse_heads(spec: str, sites: Sequence[Site]) -> tuple[list[HeadId], list[str]]:
    """The heads that `spec` names, in the order given, and those named twice.

    `spec` holds full labels (`decoder.causal.3.1`), short ones (`3.1`) or `layer:heads` groups (`3:0,1;5:2`),
    separated by commas, semicolons or blanks. Short forms need a model with one stack and kind.

    Raises:
        ValueError: a part has no such form, is ambiguous, or names a head that the model lacks.
    """
    known = {head for site in sites for head in site.heads}
    groups = sorted({(site.id.stack, site.id.kind) for site in sites})
    found: list[HeadId] = []
    repeats: list[str] = []
    for layer, part in _parts(spec):
        head = _resolve(layer, part, groups)
        if head not in known:
            raise ValueError(f"no head {head} in this model")
        if head not in found:
            found.append(head)
        elif str(head) not in repeats:
            repeats.append(str(head))
    return found, repeats


def _parts(spec: str) -> list[tuple[int | None, str]]:
    parts: list[tuple[int | None, str]] = []
    for group in re.split(r"[;\s]+", re.sub(r"\s*([,;:])\s*", r"\1", spec.strip())):
        layer, colon, rest = group.rpartition(":")
        if colon and not layer.isdigit():
            raise ValueError(f"{group!r} is not of the form layer:heads, such as 3:0,1")
        for part in filter(None, rest.split(",")):
            parts.append((int(layer) if colon else None, part))
    if not parts:
        raise ValueError("no head named")
    return parts


def _resolve(layer: int | None, part: str, groups: list[tuple[str, AttentionKind]]) -> HeadId:
    if layer is None and re.search(r"[a-z]", part):
        return HeadId.parse(part)
    short = part if layer is None else f"{layer}.{part}"
    numbers = re.fullmatch(r"(\d+)\.(\d+)", short)
    if numbers is None:
        raise ValueError(f"{part!r} is not a head: write encoder.self.3.7, 3.7 or 3:7")
    if len(groups) != 1:
        listing = ", ".join(f"{stack}.{kind}.{short}" for stack, kind in groups)
        raise ValueError(f"{short} could be any of {listing}: write one of these")
    stack, kind = groups[0]
    return HeadId(SiteId(stack, kind, int(numbers[1])), int(numbers[2]))
