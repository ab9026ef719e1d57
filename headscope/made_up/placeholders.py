"""Places in a text for images, videos and sounds: as many of their tokens as the model makes features of each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headscope.made_up._asked import BATCH, Asked
from headscope.offload import home

_KINDS = {
    "get_image_features": (("image_token_id", "image_token_index", "image_patch_id"), 1),
    "get_video_features": (("video_token_id", "video_token_index"), 2),
    "get_audio_features": (("audio_token_id", "audio_token_index"), 3),
}


def placed(asked: Asked, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with tokens of images and sounds in front of the words, in `input_ids` and in what goes with them."""
    if "input_ids" not in inputs:
        return inputs
    front: list[Tensor] = []
    types: list[Tensor] = []
    for getter, (names, kind) in _KINDS.items():
        sources = (asked.config, asked.audio if kind == 3 else asked.vision)
        tokens = (_token(source, name) for source in sources for name in names)
        token = next((found for found in tokens if found is not None), None)
        count = 0 if token is None else _features(asked, getter, inputs)
        if count and token is not None:
            front.append(torch.full((BATCH, count), token))
            types.append(torch.full((BATCH, count), kind))
    if asked.takes("image_embeds_position_mask"):
        return _queried(asked, inputs)
    if not front:
        return inputs
    words: Tensor = inputs["input_ids"]
    ids = torch.cat([words[:, :1], *front, words[:, 1:]], dim=1)
    found = inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if asked.takes("mm_token_type_ids"):
        found["mm_token_type_ids"] = torch.cat(
            [torch.zeros_like(words[:, :1]), *types, torch.zeros_like(words[:, 1:])], dim=1
        )
    return found


def _queried(asked: Asked, inputs: dict[str, Any]) -> dict[str, Any]:
    """A text in which a mask says where the images' queries stand."""
    words, count = inputs["input_ids"], int(asked.config.latent_query_num)
    ids = torch.cat([words[:, :1], words[:, 1:2].repeat(1, count), words[:, 1:]], dim=1)
    mask = torch.zeros_like(ids)
    mask[:, 1 : 1 + count] = 1
    return inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_embeds_position_mask": mask}


def _token(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def _features(asked: Asked, getter: str, inputs: dict[str, Any]) -> int:
    """How many features the model makes of one image or sound; 0 where it has none or is given none."""
    owner = _owner(asked.model, getter)
    function = getattr(owner, getter, None)
    if function is None:
        return _spliced(asked, getter, inputs)
    if getter == "get_video_features" and "pixel_values_videos" not in inputs:
        return 0  # what reads videos may read images too
    parameters = inspect.signature(function).parameters
    given = {name: _typed(value, asked.model) for name, value in inputs.items() if name in parameters}
    given = {name: value for name, value in given.items() if name != "attention_mask"}
    if not any(name.startswith(("pixel", "input_", "flattened")) for name in given):
        return 0
    given |= _masks(parameters, inputs, given)
    with torch.no_grad():
        output = function(**given)
    features = getattr(output, "pooler_output", output)
    features = output.last_hidden_state if features is None else features
    rows = [features] if isinstance(features, Tensor) else list(features)
    return sum(row.numel() // row.shape[-1] for row in rows) // BATCH


def _spliced(asked: Asked, getter: str, inputs: dict[str, Any]) -> int:
    """How many features stand for one image or sound in a model without a function that makes them."""
    if getter == "get_audio_features":
        sizes = inputs.get("audio_embed_sizes")
        return int(sizes[0]) if sizes is not None else int("input_features" in inputs)  # one, spread by the model
    if getter == "get_image_features" and "image_pixel_values" in inputs:
        side = -(-inputs["image_attention_mask"].shape[-1] // 2)  # patches are averaged by twos
        return 2 * side * (side + 1) + 1  # a mark ends each row of the tile and of the whole, one stands between them
    return 0


def _masks(
    parameters: Mapping[str, inspect.Parameter], inputs: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Masks of a sound that the model itself can do without, but this function cannot: all of it is there."""
    sound = next((inputs[name] for name in ("input_values", "input_features") if name in inputs), None)
    wanted = [
        name
        for name, one in parameters.items()
        if one.default is inspect.Parameter.empty and name.endswith("mask") and name not in given
    ]
    return {} if sound is None else {name: torch.ones(BATCH, sound.shape[-1], dtype=torch.bool) for name in wanted}


def _owner(model: Any, getter: str) -> Any:
    """The model, or the one inside it, that makes the features; not one that only passes on what it is given."""
    inner = (getattr(model, name, None) for name in ("model", "encoder"))
    owners = [one for one in (model, *inner) if hasattr(one, getter)]
    return next((one for one in owners if not _passes_on(getattr(one, getter))), None)


def _passes_on(function: Any) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)


def _typed(value: Any, model: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(home(model), model.dtype) if value.is_floating_point() else value.to(home(model))
