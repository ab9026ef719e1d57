"""The form in which a pruned model goes to disk: the layout that was asked for, or the first that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from headscope.errors import InvalidPlan, UnsupportedModel
from headscope.heads import Site
from headscope.layouts import auto_classes
from headscope.native import native_config, native_counts
from headscope.portable import carried


@dataclass(frozen=True)
class Form:
    """A layout, the configuration that a native checkpoint needs, and why it is not native where it is not."""

    layout: str
    config: PreTrainedConfig | None = None
    note: str = ""


def choose_form(model: PreTrainedModel, after: Sequence[Site], wanted: str, *, before: Site) -> Form:
    """The form of a pruned model whose sites are `after`, in the layout `wanted` (`auto`: native where possible).

    `before` is a site of the whole model, for the hint which counts would be native.

    Raises:
        InvalidPlan: it has no native form.
        UnsupportedModel: it has no portable one.
    """
    if wanted == "masked":
        return Form(wanted)
    config = "" if wanted == "portable" else native_config(model, after)
    if isinstance(config, PreTrainedConfig):
        return Form("native", config)
    if wanted == "native":
        raise InvalidPlan(f"no native checkpoint: {config}", hint=_native_hint(model, before))
    if not auto_classes(model):
        raise UnsupportedModel(
            f"{type(model).__name__} is no class of transformers, so no portable checkpoint can restore it",
            hint="--layout masked",
        )
    notes = [f"portable, since a native checkpoint is impossible: {config}"] if config else []
    return Form("portable", note="; ".join([*notes, *_computed(model)]))


def _computed(model: PreTrainedModel) -> list[str]:
    """What a pruned model computes still, if some of its modules cannot count fewer heads."""
    filled = carried(model.config).get("filled", {})
    paths = [f"{root}.{path}".strip(".") for root, filling in filled.items() for path in filling["left"]]
    names = sorted({type(model.get_submodule(path)).__name__ for path in paths})
    if not names:
        return []
    return [f"{', '.join(names)} computes all its heads as before, on zeros for those that went: only memory is saved"]


def _native_hint(model: PreTrainedModel, site: Site) -> str:
    """With which numbers of heads there would be a native checkpoint."""
    counts = native_counts(model, site, site.n_heads, site.n_kv_heads)
    if not counts:
        return "this architecture has none; use --layout portable"
    listing = ", ".join(map(str, counts))
    return f"possible with the same {listing} heads left in every site (--scope uniform); or --layout portable"
