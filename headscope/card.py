"""The model card README.md of a pruned checkpoint: what was removed, what it costs and scores now, how to load it.

Names come from users and model files, so each is made harmless: YAML is written by its library, and in Markdown no
name can end a table cell, start markup or break a line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from headscope.errors import ModelError
from headscope.jsonfiles import inside, read
from headscope.unpack import printable

NAME = "README.md"
TAGS = ("headscope", "head-pruning", "pruned")
_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)
_LIMIT = 4 * 1024**2
"""Bytes of the largest card that is read."""
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Makes texts, lists and dictionaries only: no dates, and `no` stays a text."""
_MARKUP = re.compile(r"[\\`*_\[\]<>|~&$#!@:]")
"""Characters that can start markup, a link, HTML or a formula, or end a table cell."""
_PLAIN = """\
```python
from transformers import AutoModel

model = AutoModel.from_pretrained("path/to/this/folder")
```"""
_TIED = """\
A merged model does not compute what its base model computes: the tables above say what it loses. Aligned is the base
model after the exact maps alone; tied is the base model with each key/value head replaced by that of its group."""
_LOADING = {
    "native": _PLAIN,
    "masked": _PLAIN,
    "portable": """\
```python
from transformers import AutoModel

model = AutoModel.from_pretrained("path/to/this/folder", trust_remote_code=True)
```

That runs the Python file of this folder. The same without running it:

```python
import headscope

model = headscope.load("path/to/this/folder")
```

Without one of the two, loading fails.""",
}
"""How each layout is loaded; `AutoModel` stands for the class of the model."""


@dataclass(frozen=True)
class SiteLine:
    """One site of the model: heads and key/value heads before and after, and the original numbers of those removed."""

    site: str
    before: int
    after: int
    kv_before: int
    kv_after: int
    removed: tuple[int, ...]


@dataclass(frozen=True)
class Quality:
    """What one model scores on the held-out data; None stands for what was not measured."""

    loss: float | None = None
    metric_name: str = ""
    metric: float | None = None
    divergence: float | None = None


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """All that a card tells.

    `base_model` is a Hub id if `base_revision` is set, else a local path of which only the last name is shown;
    `macs` are multiply-accumulates and `kv` bytes of the KV cache a token; `data` is shown as it stands; `generation`
    says whether the model generates; `repaired_sites` counts output projections that were refitted, without which the
    model scored `quality_unrepaired`; `merged` says how key/value heads became one, where none was removed; `proof`
    holds the largest difference that each check found.
    """

    base_model: str
    base_revision: str = ""
    licence: str | None = None
    pipeline_tag: str | None = None
    auto_class: str
    layout: str
    heads: tuple[SiteLine, ...]
    parameters_before: int
    parameters_after: int
    macs_before: int
    macs_after: int
    kv_before: int
    kv_after: int
    quality_before: Quality | None = None
    quality_after: Quality | None = None
    quality_unrepaired: Quality | None = None
    repaired_sites: int = 0
    merged: str = ""
    data: str = ""
    criterion: str
    proof: Mapping[str, float]
    generation: bool

    def __post_init__(self) -> None:
        if self.layout not in _LOADING or not self.auto_class.isidentifier():
            raise ValueError(f"no layout {self.layout!r} or no class {self.auto_class!r}")  # both stand in code

    @property
    def base_name(self) -> str:
        """What the base model is called in the card."""
        if self.base_revision:
            return self.base_model
        return os.path.basename(os.path.abspath(os.path.expanduser(self.base_model))) or "local-model"


def source_licence(folder: Path) -> str | None:
    """The licence that the card of a model folder states in its front matter, or None."""
    if not os.path.lexists(folder / NAME):
        return None
    try:
        data, _ = read(inside(folder, NAME), _LIMIT)
        found = _FRONT_MATTER.match(data.decode("utf-8-sig"))
        matter = yaml.load(found[1], Loader=_LOADER) if found else None
    except (ModelError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return None
    licence = matter.get("license") if isinstance(matter, dict) else None
    return licence.strip() or None if isinstance(licence, str) else None


def card(facts: CardFacts) -> str:
    """The text of README.md: front matter for the Hub, then Markdown."""
    parts = [
        _front_matter(facts),
        f"# {_text(facts.base_name)}, {_done(facts)}",
        _summary(facts),
        "## Load it",
        _LOADING[facts.layout].replace("AutoModel", facts.auto_class),
        "## Heads",
        "Heads keep the numbers that they have in the unpruned model.",
        _table(
            ("site", "heads before", "after", "KV heads before", "after", "removed"),
            ((_text(s.site), s.before, s.after, s.kv_before, s.kv_after, _numbers(s.removed)) for s in facts.heads),
        ),
        "## Before and after",
        _table(("", "before", "after", "change"), _changes(facts)),
        *_quality_note(facts),
        "## Proof",
        *([_TIED] if facts.merged else []),
        _proof(facts),
        "## Limits",
        "\n".join(f"- {limit}" for limit in _limits(facts)),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(facts: CardFacts) -> str:
    fields = {
        "base_model": facts.base_name,
        "library_name": "transformers",
        "tags": list(TAGS),
        "license": facts.licence,
        "pipeline_tag": facts.pipeline_tag,
    }
    shown = {name: printable(value) if isinstance(value, str) else value for name, value in fields.items() if value}
    return f"---\n{yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=10**6)}---"


def _done(facts: CardFacts) -> str:
    if facts.merged:
        return "key/value heads merged"
    return "masked" if facts.layout == "masked" else "pruned"


def _summary(facts: CardFacts) -> str:
    gone, total = sum(len(line.removed) for line in facts.heads), sum(line.before for line in facts.heads)
    base = _text(facts.base_name)
    if facts.base_revision:
        base += f" (revision {_text(facts.base_revision)})"
    done = "set to zero in" if facts.layout == "masked" else "removed from"
    text = f"{gone} of {total} attention heads were {done} {base} by headscope."
    text += f" They were chosen by: {_text(facts.criterion)}{f', on {_text(facts.data)}' if facts.data else ''}."
    if facts.merged:
        text = f"Key/value heads of {base} were merged by headscope: {_text(facts.merged)}."
        text += f" This is not exact; all {total} query heads stay, and more of them share a key/value head."
    if facts.licence is None:
        text += " The base model's card states no licence in a form that could be read; its terms apply here too."
    return text


def _changes(facts: CardFacts) -> Iterator[tuple[str, ...]]:
    costs = (
        ("parameters", facts.parameters_before, facts.parameters_after),
        ("multiply-accumulates a token", facts.macs_before, facts.macs_after),
        ("KV-cache bytes a token", facts.kv_before, facts.kv_after),
    )
    for name, before, after in costs:
        if before:
            yield name, f"{before:,}", f"{after:,}", f"{after / before - 1:+.1%}"
    old, new = facts.quality_before or Quality(), facts.quality_after or Quality()
    yield from _change("loss", old.loss, new.loss)
    yield from _change(_text(new.metric_name or old.metric_name), old.metric, new.metric)
    yield from _change("divergence from the base model", old.divergence, new.divergence)


def _change(name: str, before: float | None, after: float | None) -> Iterator[tuple[str, ...]]:
    """One row, unless neither value was measured."""
    if before is None and after is None:
        return
    change = "" if before is None or after is None else f"{after - before:+.4g}"
    yield name, _value(before), _value(after), change


def _value(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"


def _quality_note(facts: CardFacts) -> Iterator[str]:
    if facts.quality_after is None:
        yield "What the model scores now was not measured."
    if not facts.repaired_sites:
        yield "Nothing was repaired." if facts.merged else "No weight of the heads that stay was changed."
        return
    counted = "1 site was" if facts.repaired_sites == 1 else f"{facts.repaired_sites} sites were"
    text = (
        f"Repaired: the output projection of {counted} refitted by least squares to write what the base model writes."
    )
    old, new = facts.quality_unrepaired or Quality(), facts.quality_after or Quality()
    pairs = (("loss", old.loss, new.loss), ("divergence", old.divergence, new.divergence))
    shown = [f"{name} {_value(a)} without, {_value(b)} with" for name, a, b in pairs if a is not None]
    yield f"{text} On the held-out data: {'; '.join(shown)}." if shown else text


def _proof(facts: CardFacts) -> str:
    if not facts.proof:
        return "Nothing was checked."
    rows = ((_text(name), f"{value:.3g}") for name, value in facts.proof.items())
    return _table(("check", "largest difference"), rows)


def _limits(facts: CardFacts) -> Iterator[str]:
    changed = "merged" if facts.merged else "chosen"
    yield f"The model was not trained again after its heads were {changed}: check it on your own data."
    if facts.layout == "masked":
        yield "Masked heads save neither time nor memory: all shapes are those of the base model."
    elif facts.layout == "native":
        yield (
            "Engines that compute the size of a head from the hidden size and the number of heads, instead of "
            "reading it in config.json, cannot load it."
        )
    else:
        yield "Engines that do not run custom code (vLLM, llama.cpp, TGI) cannot load it."
        if facts.generation and len({line.kv_after for line in facts.heads}) > 1:
            yield "Continuous batching needs one number of KV heads in all layers, and here they differ."


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; every cell must be harmless already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _text(text: str) -> str:
    """A name on one line in which nothing is markup."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))
