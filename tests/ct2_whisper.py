"""A Whisper checkpoint of CTranslate2 as a transformers model with the same weights, in float32.

CTranslate2 stores a model as one flat list of named arrays (`model.bin`, little-endian, format 6): query, key and value
projections are stacked in one matrix, layer norms are gamma and beta, and each name says its place in the model. Only
unquantized arrays are read. Nothing is executed or unpickled.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

FORMAT = 6
"""The version of the binary format whose layout `read_arrays` knows."""
DTYPES = {0: torch.float32, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16}
END = "<|endoftext|>"
START = "<|startoftranscript|>"
PLAIN = "<|notimestamps|>"

STACKED = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
}
"""Matrices of several projections, one below the other."""
LAYER = {
    "self_attention/linear_1": "self_attn.out_proj",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
    "ffn/layer_norm": "final_layer_norm",
}
"""What stands where in a layer."""
OUTSIDE = {
    "encoder/conv1": "encoder.conv1",
    "encoder/conv2": "encoder.conv2",
    "encoder/position_encodings": "encoder.embed_positions",
    "encoder/layer_norm": "encoder.layer_norm",
    "decoder/embeddings": "decoder.embed_tokens",
    "decoder/position_encodings": "decoder.embed_positions",
    "decoder/layer_norm": "decoder.layer_norm",
}
"""What stands outside the layers."""
ENDS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


class _Bytes:
    """Reads numbers, names and arrays off a byte string, in order."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes.

        Raises:
            ValueError: the file ends before.
        """
        self.place += count
        if self.place > len(self.data):
            raise ValueError(f"model.bin ends at byte {len(self.data)}, expected at least {self.place}")
        return self.data[self.place - count : self.place]

    def number(self, form: str = "<I") -> int:
        """The next number, an unsigned one of 32 bits unless `form` says otherwise."""
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def name(self) -> str:
        """The next name: its length in 16 bits, then its letters and a zero."""
        return self.take(self.number("<H")).rstrip(b"\0").decode()

    def array(self) -> Tensor:
        """The next array: its rank, its sizes, the code of its type, its length in bytes, its values."""
        sizes = [self.number() for _ in range(self.number("<B"))]
        dtype = DTYPES[self.number("<B")]
        return torch.frombuffer(bytearray(self.take(self.number())), dtype=dtype).reshape(sizes)


def read_arrays(file: Path) -> dict[str, Tensor]:
    """Every array of a `model.bin` by name, those with two names under both.

    Raises:
        ValueError: the file has another format, or ends early or late.
    """
    stream = _Bytes(file.read_bytes())
    version, spec, _ = stream.number(), stream.name(), stream.number()
    if (version, spec) != (FORMAT, "WhisperSpec"):
        raise ValueError(f"{file}: holds {spec} in format {version}, expected WhisperSpec in format {FORMAT}")
    arrays = {stream.name(): stream.array() for _ in range(stream.number())}
    for _ in range(stream.number()):
        alias = stream.name()
        arrays[alias] = arrays[stream.name()]
    if stream.place != len(stream.data):
        raise ValueError(f"{file}: {len(stream.data) - stream.place} bytes follow the last array")
    return arrays


def renamed(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays under transformers' names in float32, stacked projections apart.

    Raises:
        ValueError: an array has no place in the model, or is quantized.
    """
    state: dict[str, Tensor] = {}
    for name, values in arrays.items():
        if not values.dim():  # settings
            continue
        if not values.is_floating_point():
            raise ValueError(f"{name}: quantized to {values.dtype}, expected float16 or float32")
        for path, part in _places(name, values):
            if path.endswith("k_proj.bias"):  # transformers' keys have none
                if part.any():
                    raise ValueError(f"{name}: the keys' bias is not zero")
                continue
            state[path] = part.float()
    return state


def _places(name: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Where the values of an array belong in a WhisperForConditionalGeneration."""
    place, _, end = name.rpartition("/")
    end = ENDS.get(end, end)
    inside = re.fullmatch(r"(encoder|decoder)/layer_(\d+)/(.+)", place)
    if place == "decoder/projection":
        yield f"proj_out.{end}", values
    elif place in OUTSIDE:
        yield f"model.{OUTSIDE[place]}.{end}", values
    elif inside and inside[3] in STACKED:
        paths = STACKED[inside[3]]
        for path, part in zip(paths, values.chunk(len(paths)), strict=True):
            yield f"model.{inside[1]}.layers.{inside[2]}.{path}.{end}", part
    elif inside and inside[3] in LAYER:
        yield f"model.{inside[1]}.layers.{inside[2]}.{LAYER[inside[3]]}.{end}", values
    else:
        raise ValueError(f"{name}: no place for it in a Whisper model")


@dataclass(frozen=True)
class Whisper:
    """A converted model with what turns sound into its frames and its tokens into text."""

    model: WhisperForConditionalGeneration
    tokenizer: PreTrainedTokenizerFast
    features: WhisperFeatureExtractor
    alignment_heads: tuple[tuple[int, int], ...]
    """The (layer, head) of the decoder's cross-attention that follow the sound, as the checkpoint lists them."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint that `from_pretrained` opens."""
        for part in (self.model, self.tokenizer, self.features):
            part.save_pretrained(folder)


def convert(folder: Path) -> Whisper:
    """The Whisper model in a CTranslate2 folder of `model.bin`, `config.json` and `tokenizer.json`."""
    arrays = read_arrays(folder / "model.bin")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=END, eos_token=END, pad_token=END
    )
    config = _config(arrays, tokenizer)
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(renamed(arrays), strict=True)
    model.generation_config = _generation(settings, config, tokenizer)
    heads = tuple((int(layer), int(head)) for layer, head in settings["alignment_heads"])
    return Whisper(model.eval(), tokenizer, WhisperFeatureExtractor(feature_size=config.num_mel_bins), heads)


def _config(arrays: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerFast) -> WhisperConfig:
    """Sizes as the arrays have them."""
    end, start = _token_ids(tokenizer, (END, START))
    vocab_size, d_model = arrays["decoder/embeddings/weight"].shape
    return WhisperConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        encoder_layers=_count(arrays, "encoder"),
        decoder_layers=_count(arrays, "decoder"),
        encoder_attention_heads=int(arrays["encoder/num_heads"]),
        decoder_attention_heads=int(arrays["decoder/num_heads"]),
        encoder_ffn_dim=len(arrays["encoder/layer_0/ffn/linear_0/bias"]),
        decoder_ffn_dim=len(arrays["decoder/layer_0/ffn/linear_0/bias"]),
        num_mel_bins=arrays["encoder/conv1/weight"].shape[1],
        max_source_positions=len(arrays["encoder/position_encodings/encodings"]),
        max_target_positions=len(arrays["decoder/position_encodings/encodings"]),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
    )


def _generation(settings: Mapping[str, list], config: WhisperConfig, tokenizer: PreTrainedTokenizerFast):
    """How an English-only Whisper writes, without timestamps."""
    (plain,) = _token_ids(tokenizer, (PLAIN,))
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        no_timestamps_token_id=plain,
        max_length=config.max_target_positions,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        alignment_heads=settings["alignment_heads"],
        is_multilingual=False,
        return_timestamps=False,
    )


def _token_ids(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str]) -> list[int]:
    """The numbers of tokens that the vocabulary must have."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def _count(arrays: Mapping[str, Tensor], stack: str) -> int:
    """How many layers a stack has."""
    return sum(bool(re.fullmatch(rf"{stack}/layer_\d+/ffn/layer_norm/beta", name)) for name in arrays)
