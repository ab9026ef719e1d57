"""What an attention module hands back, read off a run: the form that a module without heads must keep."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.capture import gate
from headscope.discovery import evaluating
from headscope.errors import InvalidPlan
from headscope.heads import AttentionKind, Site
from headscope.inputs import probe_inputs
from headscope.portable import arguments_by_name


def output_forms(model: PreTrainedModel, sites: Sequence[Site]) -> dict[str, dict[str, Any]]:
    """The `output` entry of `portable.Silent` for each site's module, by module path.

    Raises:
        InvalidPlan: a module hands on, or adds, something that only its own code can make, so one head must stay.
    """
    if not sites:
        return {}
    inputs = probe_inputs(model)
    readers = {site.module: _Reader(model, site) for site in sites}
    silent = {site.id: torch.zeros(site.n_heads) for site in sites}
    with contextlib.ExitStack() as stack:
        for path, reader in readers.items():
            handle = model.get_submodule(path).register_forward_hook(reader.read, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(gate(model, silent, sites))
        stack.enter_context(evaluating(model))
        with torch.no_grad():
            model(**inputs)
    return {path: reader.form for path, reader in readers.items()}


class _Reader:
    """Sees what one module returns while its heads are gated to 0."""

    def __init__(self, model: PreTrainedModel, site: Site) -> None:
        self.model, self.site = model, site
        inside = site.output.startswith(f"{site.module}.")
        self.form: dict[str, Any] = {
            "items": [],
            "projection": site.output.removeprefix(f"{site.module}.") if inside else None,
            "width": site.d_model if inside else 0,
            "cache": site.id.kind is AttentionKind.CAUSAL,
        }

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Fill in the items; what a module returns first is what it writes."""
        given = arguments_by_name(module, args, kwargs)
        items: list[str | None] = []
        for place, item in enumerate(output if isinstance(output, tuple) else ()):
            handed_on = next((name for name, value in given.items() if value is item and item is not None), None)
            if place and handed_on is None and isinstance(item, Tensor) and not is_map(item):
                raise self._indispensable("makes what other layers use")
            items.append(handed_on if place else "")
        self.form["items"] = items
        self._require_bias(output[0] if isinstance(output, tuple) else output)

    def _require_bias(self, written: Tensor) -> None:
        """Without its heads, a module that holds its projection must write that projection's bias and nothing else."""
        if self.form["projection"] is None:
            return
        bias = getattr(self.model.get_submodule(self.site.output), "bias", None)
        expected = torch.zeros(self.site.d_model, device=written.device) if bias is None else bias
        if written.shape[-1] != len(expected) or not bool((written == expected.to(written.dtype)).all()):
            raise self._indispensable("adds more than what its heads write")

    def _indispensable(self, what: str) -> InvalidPlan:
        return InvalidPlan(
            f"{self.site.id}: its module also {what}, so one of its heads must stay", hint="--min-heads 1"
        )


def is_map(item: Tensor) -> bool:
    """Whether a tensor is an attention map, which a module without heads need not make."""
    rows = item.sum(dim=-1)
    return item.dim() >= 3 and bool((item >= 0).all()) and bool((rows <= 1 + 1e-3).all())
