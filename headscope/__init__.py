"""headscope: look at the attention heads of pretrained transformers, and measure which of them matter.

    headscope.inspect(model, data)     every head with its measures, as a DataFrame indexed by head
    headscope.similarity(model, data)  pairs of heads, most alike first, as a DataFrame
    headscope.prune(model, data, out)  a smaller checkpoint without some heads, with a proof
    headscope.curve(model, data)       what is lost as more and more heads go, as a DataFrame
    headscope.load(path)               a model, also a pruned one of any layout
    headscope.evaluate(models, data)   what each model does, costs and differs in, as a DataFrame
    headscope.check(model)             structure checks, as a DataFrame
    headscope.find_sites(model)        where each head of a loaded model lives, as Sites

Importing this package imports neither torch nor pandas; calling it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.api import check, curve, evaluate, find_sites, inspect, load, prune, similarity

__all__ = ["check", "curve", "evaluate", "find_sites", "inspect", "load", "prune", "similarity"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("headscope.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
