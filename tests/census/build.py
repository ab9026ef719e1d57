"""Builds a tiny random model of any model type that transformers' AutoModel knows, and inputs for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from headscope.inputs import probe_inputs

from .overrides import changed
from .shrink import Shrinker

LARGEST = 25_000_000
"""Parameters above which a model is no tiny one: its configuration has a size that no rule knows."""
MATRIX_SCALE, VECTOR_NOISE = 0.25, 0.1


DOUBLE = ("dab-detr", "kosmos-2", "kosmos-2.5", "xglm")
"""Types that make tensors of torch's default format as they run: float64 weights fit only where that is float64."""


@contextlib.contextmanager
def default_format(model_type: str) -> Iterator[None]:
    """Float64 as torch's default for the types that need it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if model_type in DOUBLE else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TooLarge(ValueError):
    """A configuration that stayed large."""


def model_types() -> list[str]:
    """Every model type in AutoModel's mapping, in transformers' order."""
    return [name for name in CONFIG_MAPPING_NAMES if name in MODEL_MAPPING_NAMES]


def config_of(model_type: str) -> PreTrainedConfig:
    """The type's default configuration in small."""
    kind = CONFIG_MAPPING[model_type]
    values = Shrinker().shrunk(kind().to_dict())
    config = kind.from_dict(changed(model_type, values))
    if not isinstance(MODEL_MAPPING_NAMES[model_type], str):
        config.architectures = [MODEL_MAPPING_NAMES[model_type][0]]
    for part in parts(config):
        part._experts_implementation = "eager"  # the grouped kernels know no float64
    return config


def parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A configuration and those inside it."""
    inside = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(one for part in inside for one in parts(part))]


def build(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A tiny random model in float64 and eval mode, its weights drawn large; leaves the global random state alone.

    Raises:
        TooLarge: its configuration has a size that no rule knows.
    """
    config = config_of(model_type)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModel.from_config(config).parameters())
    if count > LARGEST:
        raise TooLarge(f"{count} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModel.from_config(config).double().eval()
    redraw(model, seed + 1)
    return model


def redraw(model: PreTrainedModel, seed: int) -> None:
    """Draw every matrix anew and add noise to every vector, in place, so that every head matters to the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() >= 2:
                parameter.copy_(MATRIX_SCALE * noise)
            else:
                parameter.add_(VECTOR_NOISE * noise)


def inputs_of(model: PreTrainedModel) -> dict[str, Any]:
    """The made-up inputs that headscope itself would probe the model with."""
    return probe_inputs(model)
