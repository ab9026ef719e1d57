"""What mixes tokens and has no attention heads: one small file for each kind, which names its classes in transformers.

Discovery lists such modules beside the heads that it finds, so that none is missing without a word and none is
mistaken for an attention. A kind is added by adding a file; tests build its example because it exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headscope.registry import load_all


@dataclass(frozen=True)
class Kind:
    """One kind of token mixer: the endings of its class names, names that models give it, what it does instead of
    softmax attention, and the model type and sizes of a tiny example.
    """

    classes: tuple[str, ...]
    instead: str
    example: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def covers(self, path: str, class_name: str) -> bool:
        """Whether a module is of this kind."""
        return class_name.endswith(self.classes) or path.rpartition(".")[2] in self.names


def kinds() -> list[Kind]:
    """Every kind that has a file."""
    return list(load_all("families", "KIND").values())
