"""Tiny random models, one per attention structure, and matching batches of unequal length; no network, float64, eval.

Weights are re-drawn large, so that attention is far from uniform and every head matters to the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from zoo_configs import RECIPES, Counts, Recipe

LENGTHS = (7, 9, 6)
"""Tokens in each sequence of a batch: the first is padded, the second fills the batch, the third is the shortest."""
DECODER_LENGTHS = (5, 7, 4)
FIRST_WORD = 5
"""The lowest token id that stands for a word; those below are left to padding, start, end and friends."""
MATRIX_SCALE = 0.3
VECTOR_NOISE = 0.1


@dataclass(frozen=True)
class Specimen:
    """One tiny model and what must be found in it.

    `stacks` maps each `stack.kind` to its number of layers with a site. The counts and widths are one number for all
    sites or one per `stack.kind`; 0 = differs between layers, not checked. `d_head` is the width of a query or key,
    `d_value` that of a value and so of the head's output.
    """

    name: str
    stacks: dict[str, int]
    n_heads: Counts
    n_kv_heads: Counts
    d_head: Counts
    d_value: Counts
    build: Callable[[], PreTrainedModel]
    inputs: Callable[[PreTrainedModel], dict[str, Any]]

    @property
    def n_sites(self) -> int:
        """How many sites discovery must find."""
        return sum(self.stacks.values())


def at(counts: Counts, stack: str) -> int:
    """The count of the sites whose label starts with `stack`, such as `decoder.cross`."""
    return counts if isinstance(counts, int) else counts[stack]


def specimens(names: Iterable[str] | None = None) -> list[Any]:
    """The named specimens (all by default) as test parameters; those outside `FAST` run only with `-m slow`."""
    chosen = SPECIMENS if names is None else names
    return [pytest.param(SPECIMENS[name], id=name, marks=() if name in FAST else pytest.mark.slow) for name in chosen]


def redraw(model: PreTrainedModel, seed: int) -> None:
    """Draw every matrix from N(0, 0.3²) and add noise of 0.1 to every vector, in place; tied weights stay tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() >= 2:
                parameter.copy_(MATRIX_SCALE * noise)
            else:
                parameter.add_(VECTOR_NOISE * noise)


def build(recipe: Recipe, seed: int = 0) -> PreTrainedModel:
    """The model of `recipe` in float64 and eval mode; leaves the global random state as it was."""
    parts = {field: AutoConfig.for_model(kind, **sizes) for field, (kind, sizes) in recipe.parts.items()}
    config = AutoConfig.for_model(recipe.model_type, **recipe.config, **parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, recipe.model_class)(config).double().eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    redraw(model, seed + 1)
    return model


def words(model: PreTrainedModel, lengths: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, right-padded; every sequence closes with the end token."""
    config = model.config.get_text_config()
    ids = torch.randint(FIRST_WORD, config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)).long()
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = config.eos_token_id
    return ids.masked_fill(mask == 0, config.pad_token_id), mask


def image(model: PreTrainedModel, generator: torch.Generator) -> Tensor:
    """Three random images."""
    config = getattr(model.config, "vision_config", model.config)
    shape = (len(LENGTHS), config.num_channels, config.image_size, config.image_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sound(model: PreTrainedModel, form: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Three random sounds: a `spectrogram` of fixed length, or `frames` or a `wave` of unequal lengths, zero-padded."""
    if form == "spectrogram":
        shape = (len(LENGTHS), model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator, dtype=torch.float64)}
    if form == "frames":
        lengths, shape, key = (22, 31, 17), (3, 31, model.config.input_feat_per_channel), "input_features"
    else:
        lengths, shape, key = (130, 170, 90), (3, 170), "input_values"
    mask = (torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(-1)).long()
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {key: values * mask.reshape(mask.shape + (1,) * (values.dim() - 2)), "attention_mask": mask}


def inputs(form: str, model: PreTrainedModel, seed: int = 2) -> dict[str, Any]:
    """A batch of three for `model`: text, image, image-text, spectrogram, frames or wave; no labels, no cache."""
    generator = torch.Generator().manual_seed(seed)
    batch: dict[str, Any] = {}
    if "text" in form:
        batch["input_ids"], batch["attention_mask"] = words(model, LENGTHS, generator)
    if "image" in form:
        batch["pixel_values"] = image(model, generator)
    if form in ("spectrogram", "frames", "wave"):
        batch |= sound(model, form, generator)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"], batch["decoder_attention_mask"] = words(model, DECODER_LENGTHS, generator)
    if "use_cache" in inspect.signature(model.forward).parameters:
        batch["use_cache"] = False
    return batch


def specimen(name: str, recipe: Recipe) -> Specimen:
    """The specimen that `recipe` describes."""
    return Specimen(
        name=name,
        stacks=recipe.stacks,
        n_heads=recipe.n_heads,
        n_kv_heads=recipe.n_kv_heads,
        d_head=recipe.d_head,
        d_value=recipe.d_value,
        build=partial(build, recipe),
        inputs=partial(inputs, recipe.inputs),
    )


SPECIMENS: dict[str, Specimen] = {name: specimen(name, recipe) for name, recipe in RECIPES.items()}
FAST = ("bert", "albert", "gpt2", "gpt_neox", "llama", "t5", "vit", "clip")
"""The specimens that the default test run uses: between them separate, Conv1D and interleaved projections, shared
layers, groups, cross attention, images and two towers."""
