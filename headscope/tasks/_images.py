"""Images as examples, from files, bytes or pixel columns; shared by the tasks that read them."""

from __future__ import annotations

import io

import numpy
from torch import Tensor

from headscope.errors import DataError, UsageError
from headscope.examples import Example
from headscope.tasks import Encoder, Row


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example of the image as the checkpoint's own processor prepares it."""
    pixels = _from_columns(encoder, row) if encoder.pixels else _from_file(encoder, row)
    labelled = "label" in encoder.columns
    target = encoder.label(row) if labelled else 0
    return [Example(number, {"pixel_values": pixels}, (target,), _patches(encoder, pixels), labelled=labelled)]


def _patches(encoder: Encoder, pixels: Tensor) -> int:
    """About as many tokens as the model makes of the image, for cutting batches."""
    patch = getattr(encoder.config, "patch_size", None)
    side = patch if isinstance(patch, int) else 16
    return max(1, pixels.shape[-1] * pixels.shape[-2] // side**2)


def _from_columns(encoder: Encoder, row: Row) -> Tensor:
    values = [row[column] for column in encoder.pixels]
    if any(not isinstance(value, (int, float)) for value in values):
        raise DataError(f"columns {encoder.pixels[0]} to {encoder.pixels[-1]} must hold numbers")
    channels = int(getattr(encoder.config, "num_channels", 3))
    side = round((len(values) / channels) ** 0.5)
    if channels * side * side != len(values):
        raise DataError(f"{len(values)} pixel columns are no square image of {channels} channels")
    return _prepared(encoder, numpy.asarray(values, dtype=numpy.float32).reshape(channels, side, side))


def _from_file(encoder: Encoder, row: Row) -> Tensor:
    from PIL import Image, UnidentifiedImageError

    value = encoder.cell(row, "image")
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    source = io.BytesIO(value) if isinstance(value, bytes) else value
    try:
        with Image.open(source) as image:  # type: ignore[arg-type]
            picture = image.convert("L" if int(getattr(encoder.config, "num_channels", 3)) == 1 else "RGB")
    except FileNotFoundError:
        raise DataError(f"no image file {str(value)[:200]}") from None
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read the image: {error}") from None
    values = numpy.asarray(picture)
    return _prepared(encoder, values[None] if values.ndim == 2 else values.transpose(2, 0, 1))


def _prepared(encoder: Encoder, image: numpy.ndarray) -> Tensor:
    """`[channel height width]`, resized, scaled and normalised as the checkpoint wants it."""
    if encoder.processor is None:
        raise UsageError("this model has no preprocessor_config.json, so it cannot read images")
    prepared = encoder.processor(images=[image], input_data_format="channels_first", return_tensors="pt")
    pixels = prepared["pixel_values"][0]
    size = getattr(encoder.config, "image_size", None)
    if isinstance(size, int) and tuple(pixels.shape[-2:]) != (size, size):
        height, width = pixels.shape[-2:]
        raise DataError(f"the image is {height} x {width} when prepared, the model takes {size} x {size}")
    return pixels
