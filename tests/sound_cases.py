"""Sounds for the tiny models that hear: what prepares them, made-up rows, and how transformers is asked about one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

Row = dict[str, Any]


@dataclass(frozen=True)
class Listener:
    """A feature extractor and a tokenizer, which are saved beside each other."""

    ear: Any
    tokens: PreTrainedTokenizerFast

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both."""
        self.ear.save_pretrained(folder)
        self.tokens.save_pretrained(folder)


def spectrum(frames: int, bins: int) -> WhisperFeatureExtractor:
    """Whisper's own for one second, of which it makes so many frames."""
    return WhisperFeatureExtractor(
        feature_size=bins, sampling_rate=16_000, hop_length=16_000 // frames, chunk_length=1, n_fft=400
    )


def waves(rate: int = 1_600) -> Wav2Vec2FeatureExtractor:
    """Samples as they are, normalised."""
    return Wav2Vec2FeatureExtractor(sampling_rate=rate, do_normalize=True)


def sound(length: int, *, seed: int, rate: int) -> Row:
    """So many samples of a tone in noise, as data sets hold a decoded sound."""
    draw = numpy.random.Generator(numpy.random.Philox([seed, length]))
    samples = numpy.sin(numpy.arange(length) * draw.uniform(0.02, 0.5)) / 2 + draw.normal(size=length) / 8
    return {"array": samples.astype(numpy.float32).tolist(), "sampling_rate": rate}


def heard(ear: Any, row: Row) -> dict[str, Tensor]:
    """What the model takes for a row's sound."""
    samples = numpy.array(row["audio"]["array"], dtype=numpy.float32)
    prepared = ear(samples, sampling_rate=row["audio"]["sampling_rate"], return_tensors="pt")
    return {name: prepared[name].double() for name in ("input_values", "input_features") if name in prepared}


def classified(ear: Any, row: Row) -> dict[str, Any]:
    """The arguments for a sound and its class."""
    return heard(ear, row) | {"labels": torch.tensor([row["label"]])}


def transcribed(listener: Listener, row: Row) -> dict[str, Any]:
    """The arguments for a sound and its transcript, without the token that the decoder starts with."""
    (ids,) = torch.tensor([listener.tokens(row["text"])["input_ids"]])
    return heard(listener.ear, row) | {"labels": ids[None, 1:]}
