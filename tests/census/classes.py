"""Names of the classes in transformers that are a softmax attention, read off its source; what a model must show.

Left out are linear attention (MiniMax' lightning, SwiftFormer's additive), hashing in place of a softmax (YOSO), state
spaces, and deformable attention, whose softmax weighs sampled points and knows neither queries nor keys.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

SOFTMAX = frozenset((Path(__file__).parent / "softmax_classes.txt").read_text(encoding="utf-8").split())


def attention_modules(model: nn.Module) -> dict[str, str]:
    """Path and class of every softmax attention that a model holds; of nested ones the innermost."""
    named = {path: type(module).__name__ for path, module in model.named_modules() if type(module).__name__ in SOFTMAX}
    return {
        path: name for path, name in named.items() if not any(other.startswith(f"{path}.") for other in named if path)
    }
