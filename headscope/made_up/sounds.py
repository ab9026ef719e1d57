"""Made-up sounds: waves or spectra, with masks where a model asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headscope.made_up._asked import BATCH, TOKENS, Asked, size

SAMPLES = 3840
FRAMES = 40
_CODED = ("audio_channels", "codebook_size", "downsampling_ratios", "dac_config")
"""Settings of models that read a wave as channels of a sound."""
_BINS = (
    *("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "n_mels", "n_mel_bins", "mel_bins"),
    *("input_feat_size", "input_dim", "input_size", "feature_size", "input_channels"),
)


def made(asked: Asked) -> dict[str, Any]:
    """The sounds that a model asks for; nothing where it asks for none."""
    found: dict[str, Any] = {}
    if asked.takes("input_values") and _hears(asked, "input_values"):
        found["input_values"] = _wave(asked)
        if asked.config.model_type.startswith("vibevoice"):
            found["padding_mask"] = torch.ones(BATCH, SAMPLES, dtype=torch.bool)
        _masked(asked, found, ("input_values_mask",), SAMPLES)
    if asked.needs("audio_mel"):
        found["audio_mel"] = asked.draw(BATCH, FRAMES, _bins(asked))
        found["audio_mel_mask"] = torch.zeros(BATCH, FRAMES, dtype=torch.bool)
    if asked.takes("audio_embed_sizes"):
        found["audio_input_features"] = asked.draw(BATCH, FRAMES, _bins(asked))
        found["audio_embed_sizes"] = torch.full((BATCH,), -(-FRAMES // int(asked.audio.time_reduction)))
        found["audio_attention_mask"] = torch.ones(BATCH, FRAMES, dtype=torch.bool)
    if asked.takes("input_features") and _hears(asked, "input_features"):
        spectrum = _spectrum(asked)
        frames = spectrum.shape[1 if _frames_first(asked) else -1]
        found["input_features"] = spectrum
        _masked(asked, found, ("input_features_mask", "feature_attention_mask"), frames)
    return found


def _masked(asked: Asked, found: dict[str, Any], names: tuple[str, ...], length: int) -> None:
    summed_up = hasattr(asked.config, "downsample_rate")  # its mask is of what its projector leaves
    for name in names:
        if asked.takes(name) and not summed_up:
            found[name] = torch.ones(BATCH, length, dtype=torch.bool)


def _hears(asked: Asked, name: str) -> bool:
    return asked.needs(name) or asked.audio is not asked.config


def _wave(asked: Asked) -> Tensor:
    config = asked.audio
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if isinstance(bins, int) and isinstance(frames, int) and config.model_type == "audio-spectrogram-transformer":
        return asked.draw(BATCH, frames, bins)
    if asked.takes("decoder_input_values") and not any("prenet" in path for path, _ in asked.model.named_modules()):
        return asked.draw(BATCH, FRAMES, config.hidden_size)  # without its own front it reads what that would make
    coded = any(
        getattr(config, name, None) for name in ("audio_channels", "codebook_size", "downsampling_ratios", "dac_config")
    )
    coded = coded or config.model_type.startswith("omniasr")
    return asked.draw(BATCH, 1, SAMPLES) if coded else asked.draw(BATCH, SAMPLES)


def _bins(asked: Asked) -> int:
    linear = next((one for path, one in asked.model.named_modules() if path.endswith("input_linear")), None)
    if isinstance(linear, nn.Linear):
        return linear.in_features
    found = size(asked.audio, _BINS, None) or size(asked.config, _BINS, None)
    if isinstance(found, int):
        return found * int(getattr(asked.audio, "num_stacked_frames", None) or 1)
    first = asked.convolution(axes=1)
    if hasattr(asked.audio, "subsampling_conv_channels"):
        return 128  # its convolutions over an image of the sound fit this number only
    return first.in_channels if isinstance(first, nn.Conv1d) else 80


def _spectrum(asked: Asked) -> Tensor:
    bins, side = _bins(asked), getattr(asked.audio, "spec_size", None)
    if isinstance(side, int):
        return asked.draw(BATCH, 1, side * side // bins, bins)
    if _frames_first(asked):
        return asked.draw(BATCH, FRAMES, bins)
    frames = size(asked.audio, ("max_source_positions",), None)
    if asked.takes("num_delay_tokens"):
        return asked.draw(BATCH, bins, 8 * TOKENS)  # each word is added to the sound of eight frames
    window = size(asked.audio, ("n_window",), 1)
    length = -(-FRAMES // (2 * window)) * 2 * window
    return asked.draw(BATCH, bins, 2 * frames if isinstance(frames, int) and window == 1 else length)


def _frames_first(asked: Asked) -> bool:
    """Whether time is the first axis of a spectrum: not where a convolution over time has the bins for channels."""
    if hasattr(asked.audio, "n_window") or asked.config.model_type == "clvp":
        return False
    if asked.config.model_type.startswith(("nemotron3_5", "nemo_speechlm")):
        return True
    if hasattr(asked.audio, "input_feat_per_channel"):
        return True
    first = asked.convolution(axes=1)
    mixes = isinstance(first, nn.Conv1d) and first.groups == 1 and first.kernel_size[0] > 1
    return not (mixes and first.in_channels == _bins(asked))  # type: ignore[union-attr]
