"""What a model asks for: the arguments of its forward, and the sizes that its configuration and its weights state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2
TOKENS = 7
_VISION = ("vision_config", "vit_config", "image_config", "vision_encoder_config", "backbone_config", "video_config")
_CODED = ("vq_config",)
"""Parts that make tokens of an image; models that have a tower for images have it for what they draw."""
_AUDIO = ("audio_config", "audio_encoder_config", "sound_config", "encoder_config", "speech_config")


@dataclass(frozen=True)
class Asked:
    """A model, the arguments of its forward, and a generator from which all that is made up is drawn."""

    model: Any
    arguments: Mapping[str, inspect.Parameter]
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @classmethod
    def of(cls, model: Any) -> Asked:
        """What `model` asks for."""
        return cls(model, inspect.signature(model.forward).parameters)

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @property
    def main(self) -> str:
        """The name of the main input; the first, where there are several."""
        name = self.model.main_input_name
        return name if isinstance(name, str) else name[0]

    def takes(self, *names: str) -> bool:
        """Whether forward has an argument with one of these names."""
        return any(name in self.arguments for name in names)

    def needs(self, name: str) -> bool:
        """Whether forward cannot be called without it."""
        found = self.arguments.get(name)
        return found is not None and (found.default is inspect.Parameter.empty or name == self.main)

    @property
    def vision(self) -> Any:
        """The part of the configuration that describes images, or the whole."""
        return self._part((*_VISION, *_CODED))

    @property
    def audio(self) -> Any:
        """The part of the configuration that describes sounds, or the whole."""
        return self._part(_AUDIO)

    def _part(self, names: tuple[str, ...]) -> Any:
        inner = (getattr(self.config, name, None) for name in ("thinker_config", "encoder"))
        for source in (self.config, *inner):
            for name in names:
                part = getattr(source, name, None)
                if hasattr(part, "model_type"):
                    return part
        return self.config

    def draw(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.generator)

    def convolution(self, *, axes: int, under: str = "") -> nn.Module | None:
        """The first convolution over so many axes whose path has `under` in it."""
        kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
        modules = self.model.named_modules()
        return next((one for path, one in modules if under in path and isinstance(one, kinds[axes])), None)


def size(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of some settings that a configuration has."""
    return next((value for name in names if (value := getattr(config, name, None))), default)


def pair(value: Any) -> tuple[int, int]:
    """Height and width of a size that is one number or several."""
    if isinstance(value, Mapping):
        return int(value["height"]), int(value["width"])
    if isinstance(value, (list, tuple)):
        return int(value[0]), int(value[-1])
    return int(value), int(value)
