"""Sounds as examples, from files, bytes or decoded samples; shared by the tasks that read them.

Examples are never padded beside each other: models that normalise over time would hear the padding. What the
checkpoint's own feature extractor brings to one length (Whisper, spectrogram transformers) still runs side by side.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from torch import Tensor

from headscope.errors import DataError, UsageError
from headscope.examples import Example
from headscope.foreign import RAISED, first_line
from headscope.tasks import Encoder, Row

STEP = 0.02
"""Seconds that one position of most encoders hears; only batches are cut by it."""
FRAME = 0.01
"""Seconds from one frame of a spectrum to the next, where an extractor limits these."""


@dataclass(frozen=True)
class Sound:
    """One channel of samples `[time]`, full scale at 1, and how many there are in a second."""

    samples: numpy.ndarray
    rate: int


@dataclass(frozen=True)
class Heard:
    """What the model takes for a sound, about how many positions it makes of it, and whether an end was cut off."""

    inputs: dict[str, Tensor]
    length: int
    truncated: bool


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example of the sound, with its class where there is one."""
    heard, labelled = hear(encoder, row), "label" in encoder.columns
    target = encoder.label(row) if labelled else 0
    return [Example(number, heard.inputs, (target,), heard.length, labelled=labelled, truncated=heard.truncated)]


def hear(encoder: Encoder, row: Row) -> Heard:
    """The row's sound as the checkpoint's own feature extractor prepares it, at the rate that this expects.

    Raises:
        DataError: it cannot be read, or is too short for the model.
    """
    processor = encoder.processor
    rate = getattr(processor, "sampling_rate", None)
    if not isinstance(rate, int) or rate < 1:
        raise UsageError("this model has no feature extractor with a sampling rate, so it cannot hear")
    sound = read(encoder.cell(row, "audio"))
    samples = resampled(sound, rate)
    try:
        prepared = processor(samples, sampling_rate=rate, return_tensors="pt")
    except RAISED as error:
        raise DataError(f"the sound cannot be prepared: {first_line(error)}") from None
    inputs = {name: _unpadded(prepared, name) for name in ("input_features", "input_values") if name in prepared}
    _require_frames(encoder, inputs)
    most = _most_seconds(processor)
    return Heard(inputs, max(1, round(len(samples) / rate / STEP)), most is not None and len(samples) / rate > most)


def _unpadded(prepared: Mapping[str, Tensor], name: str) -> Tensor:
    """One input without what the extractor only fills it up with, where it masks places in time, which come first then.

    Those that pair frames (Wav2Vec2-BERT) fill up an odd one, which the model must not attend to.
    """
    values, mask = prepared[name][0], prepared.get("attention_mask")
    return values if mask is None or mask.shape[1] != len(values) else values[mask[0].bool()]


def _most_seconds(processor: Any) -> float | None:
    """Where a feature extractor cuts sounds off; None where it takes all of them."""
    samples, frames = (getattr(processor, name, None) for name in ("n_samples", "max_length"))
    if isinstance(samples, int):
        return samples / processor.sampling_rate
    return frames * FRAME if isinstance(frames, int) and hasattr(processor, "num_mel_bins") else None


def _require_frames(encoder: Encoder, inputs: Mapping[str, Tensor]) -> None:
    """Refuse a wave of which the convolutions in front of the layers leave nothing, and a spectrum without a frame.

    Raises:
        DataError: it is shorter than what they look at.
    """
    if not all(map(len, inputs.values())):
        raise DataError("the sound is too short for this model: nothing is left of it but padding")
    kernels, strides = (getattr(encoder.config, name, None) for name in ("conv_kernel", "conv_stride"))
    wave = inputs.get("input_values")
    if wave is None or wave.dim() != 1 or not isinstance(kernels, (list, tuple)) or not strides:
        return
    left = len(wave)
    for kernel, stride in zip(kernels, strides, strict=True):
        left = (left - kernel) // stride + 1
    if left < 1:
        raise DataError(f"the sound is too short for this model: {len(wave)} samples at its rate")


def read(value: Any) -> Sound:
    """A sound from a path, the bytes of a file, or `{"array": samples, "sampling_rate": n}` and the like.

    Raises:
        DataError: there is no such file, or it holds no sound that can be read.
    """
    if isinstance(value, Mapping):
        if value.get("array") is not None:
            return _checked(value["array"], value.get("sampling_rate"))
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, (str, bytes)):
        raise DataError(f"a {type(value).__name__} is no sound: expected a file or its bytes")
    try:
        content = value if isinstance(value, bytes) else _content(value)
        samples, rate = _wave(content) if content[:4] in (b"RIFF", b"RIFX", b"RF64") else _other(content)
    except (*RAISED, struct.error) as error:
        raise DataError(f"cannot read the sound: {first_line(error)}") from None
    return _checked(samples, rate)


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"no sound file {path[:200]}") from None


def _wave(content: bytes) -> tuple[numpy.ndarray, int]:
    """The samples of a .wav file, scaled by the range of its format; 24 bits arrive in the upper ones of 32."""
    from scipy.io import wavfile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wavfile.WavFileWarning)  # chunks that are no sound
        rate, samples = wavfile.read(io.BytesIO(content))
    if samples.dtype.kind == "u":
        return (samples.astype(numpy.float64) - 128) / 128, rate
    return samples / (-float(numpy.iinfo(samples.dtype).min) if samples.dtype.kind == "i" else 1.0), rate


def _other(content: bytes) -> tuple[numpy.ndarray, int]:
    """The samples of any file that libsndfile reads: flac, ogg, mp3 and others."""
    try:
        import soundfile
    except ImportError:
        raise DataError(
            "only .wav can be read without the package soundfile", hint="pip install 'headscope[audio]'"
        ) from None
    return soundfile.read(io.BytesIO(content))


def _checked(samples: Any, rate: Any) -> Sound:
    """One channel, the mean of all; `samples` are `[time]` or `[time channel]`."""
    try:
        values = numpy.asarray(samples, dtype=numpy.float64)
    except (TypeError, ValueError):
        raise DataError("the samples of the sound are no numbers") from None
    if not isinstance(rate, int) or rate < 1:
        raise DataError(f"a sampling rate of {str(rate)[:40]} is none")
    values = values.mean(axis=1) if values.ndim == 2 and values.shape[1] else values
    if values.ndim != 1 or not len(values):
        raise DataError("the sound holds no samples")
    if not numpy.isfinite(values).all():
        raise DataError("the sound holds samples that are not finite")
    return Sound(values, rate)


def resampled(sound: Sound, rate: int) -> numpy.ndarray:
    """The samples at another rate, filtered first where that is lower: `[time]`, float32."""
    samples = sound.samples
    if sound.rate != rate:
        from scipy.signal import resample_poly

        common = math.gcd(sound.rate, rate)
        samples = resample_poly(samples, rate // common, sound.rate // common)
    return samples.astype(numpy.float32)
