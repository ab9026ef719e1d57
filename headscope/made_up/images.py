"""Made-up images and videos: whole ones, tiles of one, or patches in a row with the grid that they come from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headscope.made_up._asked import BATCH, TOKENS, Asked, pair, size

FRAMES = 2
SIDE = 64
"""Height and width of an image for a model that reads any size."""
_PAIRS = ("efficientloftr", "lightglue")


def made(asked: Asked) -> dict[str, Any]:
    """The images that a model asks for, with their grids, sizes and masks; nothing where it asks for none."""
    if asked.takes("grid_thw") or (asked.takes("image_grid_thw") and _looks(asked)):
        return _patches(asked)
    if asked.takes("flattened_patches"):
        return {"flattened_patches": _numbered(asked)}
    if asked.takes("image_pixel_values"):
        return _cropped(asked)
    found: dict[str, Any] = {}
    if asked.needs("pixel_values_videos") or (asked.takes("pixel_values_videos") and _watches(asked)):
        found["pixel_values_videos"] = _video(asked)
    if asked.takes("pixel_values") and _looks(asked):
        found |= _pictures(asked)
    return found


def _looks(asked: Asked) -> bool:
    """Whether the model has something that reads images."""
    if asked.main.startswith("pixel") or asked.needs("pixel_values") or asked.vision is not asked.config:
        return True
    return any(getattr(asked.config, name, None) for name in ("image_size", "patch_size", "img_size"))


def _watches(asked: Asked) -> bool:
    """Whether videos go through a tower of their own, which an image does not reach."""
    return any(path.endswith("video_tower") for path, _ in asked.model.named_modules())


def channels(asked: Asked) -> int:
    """Colours of a pixel."""
    found = size(asked.vision, ("num_channels", "in_channels", "in_chans", "num_image_channels"), 3)
    return found if isinstance(found, int) else 3


def _extent(asked: Asked) -> tuple[int, int]:
    for source in (asked.vision, asked.config):
        found = size(source, ("image_size", "crop_size", "img_size", "max_img_size", "input_size", "resolution"), None)
        if found is not None:
            return pair(found)
    return SIDE, SIDE


def _video(asked: Asked) -> Tensor:
    frames = size(asked.vision, ("frames_per_clip", "num_frames"), FRAMES)
    return asked.draw(BATCH, frames, channels(asked), *_extent(asked))


def _pictures(asked: Asked) -> dict[str, Any]:
    height, width = _extent(asked)
    frames = size(asked.vision, ("num_frames",), None) or size(asked.config, ("num_frames",), None)
    if asked.config.model_type == "instructblipvideo":
        frames = FRAMES
    found: dict[str, Any] = {"pixel_values": asked.draw(BATCH, channels(asked), height, width)}
    if asked.config.model_type in _PAIRS or asked.takes("perceiver_embeddings"):
        frames = FRAMES
    if asked.takes("prompt_masks"):
        height //= 2  # the model puts the prompt's picture on top
        found["pixel_values"] = asked.draw(BATCH, channels(asked), height, width)
    if isinstance(frames, int) and not asked.takes("pixel_values_videos"):
        found["pixel_values"] = asked.draw(BATCH, frames, channels(asked), height, width)
    if asked.takes("spatial_shapes"):
        return _packed(asked)
    if asked.takes("target_sizes"):
        return _strip(asked)
    if asked.takes("pixel_position_ids", "image_position_ids"):
        return _placed_patches(asked)
    if asked.takes("image_sizes") and _reads_sizes(asked):
        found |= _sized(asked, height, width)
    if asked.takes("pixel_attention_mask") or asked.takes("aspect_ratio_ids"):
        found["pixel_values"] = found["pixel_values"][:, None]
        if asked.takes("pixel_attention_mask"):
            pixels = () if asked.takes("tile_fine_mask") else (height, width)
            found["pixel_attention_mask"] = torch.ones(BATCH, 1, *pixels, dtype=torch.bool)
    if asked.takes("perceiver_embeddings"):
        found["image_attention_mask"] = torch.ones(BATCH, TOKENS, FRAMES, dtype=torch.long)
    if asked.takes("aspect_ratio_ids"):
        found |= _tiles(asked, height, width)
    if asked.takes("high_res_pixel_values"):
        sides = pair(size(asked.config.high_res_vision_config, ("image_size",), 64))
        found["high_res_pixel_values"] = asked.draw(BATCH, channels(asked), *sides)
    for name in ("prompt_pixel_values", "prompt_masks"):
        if asked.needs(name):
            found[name] = asked.draw(*found["pixel_values"].shape)
    return found


def _reads_sizes(asked: Asked) -> bool:
    """Whether sizes mean something to the model: LLaVA takes them for one of several kinds of towers only."""
    fixed = hasattr(asked.config, "vision_feature_layer") and not _pinpoints(asked)
    return not fixed or asked.vision.model_type == "pixtral"


def _pinpoints(asked: Asked) -> Any:
    return getattr(asked.config, "image_grid_pinpoints", None)


def _sized(asked: Asked, height: int, width: int) -> dict[str, Any]:
    """Images with their sizes; where the model cuts images into tiles, one of the first size that it knows."""
    if not (pinpoints := _pinpoints(asked)):
        return {"image_sizes": torch.tensor([[height, width]] * BATCH)}
    rows, columns = pinpoints[0]
    tiles = (rows // height) * (columns // width) + 1  # the whole image comes first, made small
    return {
        "pixel_values": asked.draw(BATCH, tiles, channels(asked), height, width),
        "image_sizes": torch.tensor([[rows, columns]] * BATCH),
    }


def _tiles(asked: Asked, height: int, width: int) -> dict[str, Any]:
    tiles = int(getattr(asked.vision, "max_num_tiles", 1))
    return {
        "pixel_values": asked.draw(BATCH, 1, tiles, channels(asked), height, width),
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, tiles, dtype=torch.long),
    }


def _packed(asked: Asked) -> dict[str, Any]:
    """Patches in a row, padded to a fixed number, with the shape that each image had."""
    side = int(size(asked.vision, ("patch_size",), 16))
    rows, columns = 4, 4
    return {
        "pixel_values": asked.draw(BATCH, rows * columns, channels(asked) * side * side),
        "pixel_attention_mask": torch.ones(BATCH, rows * columns, dtype=torch.long),
        "spatial_shapes": torch.tensor([[rows, columns]] * BATCH),
    }


def _strip(asked: Asked) -> dict[str, Any]:
    """The patches of all images beside each other in a picture one patch high, and rows and columns of each image."""
    side = int(size(asked.vision, ("patch_size",), 14))
    rows, columns = 4, 4  # windows of two, merged twice
    return {
        "pixel_values": asked.draw(1, channels(asked), side, BATCH * rows * columns * side),
        "target_sizes": torch.tensor([[rows, columns]] * BATCH),
    }


def _numbered(asked: Asked) -> Tensor:
    """Patches as rows of numbers, the first two of which are the patch's row and column, from 1."""
    places = 1 + torch.cartesian_prod(torch.arange(4), torch.arange(4))
    pixels = asked.draw(BATCH, len(places), int(asked.vision.patch_embed_hidden_size))
    return torch.cat([places[None].repeat(BATCH, 1, 1).to(pixels), pixels], dim=-1)


def _cropped(asked: Asked) -> dict[str, Any]:
    """Each image as a whole, made small, and as one tile, with a mask of its patches."""
    height, width = _extent(asked)
    side = int(asked.vision.patch_size)
    return {
        "image_pixel_values": asked.draw(BATCH, 2, channels(asked), height, width),
        "image_sizes": torch.tensor([[height, width]] * BATCH),
        "image_attention_mask": torch.ones(BATCH, 2, height // side, width // side, dtype=torch.bool),
    }


def _placed_patches(asked: Asked) -> dict[str, Any]:
    """Patches in a row, each with its column and row."""
    side = int(size(asked.vision, ("patch_size",), 16))
    rows = columns = 2 * int(size(asked.vision, ("pooling_kernel_size", "spatial_merge_size"), 1))
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    name = "pixel_position_ids" if asked.takes("pixel_position_ids") else "image_position_ids"
    return {
        "pixel_values": asked.draw(BATCH, rows * columns, channels(asked) * side * side),
        name: places[None].repeat(BATCH, 1, 1),
    }


def _patches(asked: Asked) -> dict[str, Any]:
    """The patches of all images in a row, and the grid of each: times, rows and columns."""
    merge = size(asked.vision, ("spatial_merge_size", "merge_kernel_size", "merge_size"), 2)
    rows, columns = pair(merge)
    grid = torch.tensor([[1, 2 * rows, 2 * columns]] * BATCH)
    total = int(grid.prod(dim=-1).sum())
    values = asked.draw(total, *_patch_shape(asked))
    name = next(name for name in ("pixel_values", "hidden_states") if asked.takes(name))
    found: dict[str, Any] = {name: values}
    found["grid_thw" if asked.takes("grid_thw") else "image_grid_thw"] = grid
    for extra in ("merge_sizes", "image_merge_sizes"):
        if asked.takes(extra):
            found[extra] = torch.full((BATCH,), int(rows))
    return found


def _patch_shape(asked: Asked) -> tuple[int, ...]:
    """What one patch is: a row of numbers for a convolution over time and space, else a small image."""
    side, merge = int(size(asked.vision, ("patch_size",), 14)), int(size(asked.vision, ("spatial_merge_size",), 1))
    if asked.vision.model_type.startswith("inkling2"):
        return (merge * side, merge * side, channels(asked))
    for path, module in asked.model.named_modules():
        if "patch_embed" not in path and "patch_proj" not in path:
            continue
        if isinstance(module, nn.Conv3d):
            return (int(module.in_channels * torch.tensor(module.kernel_size).prod()),)
        if isinstance(module, nn.Conv2d):
            small = (module.in_channels, *module.kernel_size)
            flat = asked.vision.model_type.startswith(("hunyuan_vl", "hy_v4_vl"))
            return (int(torch.tensor(small).prod()),) if flat else small
        if isinstance(module, nn.Linear):
            return (module.in_features,)
    return (channels(asked) * side * side * int(size(asked.vision, ("temporal_patch_size",), 1)),)
