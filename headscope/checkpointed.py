"""Gradient checkpointing by layer: a backward pass holds the weights and activations of one layer at a time.

Where weights are loaded only while a module runs, autograd would keep those of every layer until the gradient has
passed. Here each layer runs once more when the gradient reaches it (Chen et al. 2016), whatever its training mode and
without its model knowing. Gates are leaves outside of the layers, so they get their gradients as before; what watches a
model must look away while a layer runs `again`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headscope.heads import Site
from headscope.offload import is_offloaded

_AGAIN = ContextVar("again", default=False)


def again() -> bool:
    """Whether a layer runs for the second time, to give a gradient what it needs: all was seen already."""
    return _AGAIN.get()


def offloaded_layers(model: PreTrainedModel, sites: Sequence[Site]) -> list[nn.Module]:
    """The layers to be checkpointed: none unless weights are offloaded.

    Layers are what accelerate never splits, outermost ones only. Left out is one that several layers share, since there
    is little to be saved and its calls are counted, and one whose heads are gated by following functions, which nobody
    follows in a backward pass.
    """
    if not is_offloaded(model):
        return []
    names = set(model._no_split_modules or ())
    kept = {site.module for site in sites if site.shared_with or (site.on_context and site.source == "function")}
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        layer = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in names
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if layer and not inside and not any(one == path or one.startswith(f"{path}.") for one in kept):
            found[path] = module
    return list(found.values())


@contextlib.contextmanager
def layerwise(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Checkpoint these layers while the block runs a model; a `forward` set on the instance before is put back."""
    before = [(layer, layer.__dict__.get("forward"), layer.forward) for layer in layers]
    for layer, _, forward in before:
        layer.forward = partial(_checkpointed, forward)  # type: ignore[method-assign]
    try:
        # A second run that stops early leaves the module it stops in, whose weights would stay.
        with set_checkpoint_early_stop(False):
            yield
    finally:
        for layer, own, _ in before:
            if own is None:
                del layer.__dict__["forward"]
            else:
                layer.forward = own  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts, **kwargs)


def _contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), _Again()


class _Again(contextlib.AbstractContextManager[None]):
    """Marks that a layer runs again; entered anew for every gradient that passes."""

    def __enter__(self) -> None:
        self._token = _AGAIN.set(True)

    def __exit__(self, *error: object) -> None:
        _AGAIN.reset(self._token)
