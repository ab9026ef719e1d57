"""What a local model folder says before anything is loaded: config.json and the headers of its safetensors files."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from headscope.errors import ModelError
from headscope.jsonfiles import inside, json_object, kind, quote, read, unique

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG_LIMIT = 16 * 1024**2
"""Bytes; the largest configurations of the Hub have a few hundred kB."""
HEADER_LIMIT = 100_000_000
"""Bytes; the limit of the safetensors library, taken for the index file too."""
NEEDS = "a model folder needs config.json and *.safetensors"
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of one value of each safetensors type."""
COUNTS = frozenset({
    "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "vocab_size", "head_dim",
    "n_head", "n_heads", "n_layer", "n_layers", "n_embd", "num_heads", "num_layers", "d_model", "d_kv",
    "encoder_attention_heads", "decoder_attention_heads", "encoder_layers", "decoder_layers", "num_decoder_layers",
})  # fmt: skip
"""Fields that must be whole numbers from 1."""
REQUIRED = frozenset({"num_attention_heads", "num_hidden_layers", "hidden_size"})
"""Those that may be absent but not null."""


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: its name, safetensors type, shape and the file that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a model folder as plain JSON.

    Raises:
        ModelError: config.json is absent, too large, or no JSON object.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder", hint=NEEDS)
    if not os.path.lexists(folder / CONFIG):
        raise ModelError(f"{folder}: no config.json", hint=NEEDS)
    path = inside(folder, CONFIG)
    data, _ = read(path, CONFIG_LIMIT)
    return json_object(data, path)


def has_safetensors(folder: Path) -> bool:
    """Whether the folder holds model.safetensors, whole or in shards with an index."""
    return any(os.path.lexists(folder / name) for name in (WEIGHTS, INDEX))


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor that a model folder's safetensors files hold, by name; model.safetensors goes before an index.

    Raises:
        ModelError: there are none, a file name leaves the folder, or a header contradicts its file or the index.
    """
    if not has_safetensors(folder):
        raise _no_weights(folder)
    if os.path.lexists(folder / WEIGHTS):
        return _read_header(inside(folder, WEIGHTS))
    index = inside(folder, INDEX)
    where = _weight_map(index)
    paths = [_shard(folder, index, name) for name in sorted(set(where.values()))]
    found: dict[str, TensorInfo] = {}
    for path in paths:
        for name, info in _read_header(path).items():
            if name in found:
                raise ModelError(
                    f"{folder}: tensor {quote(name)} is in {quote(found[name].file)} and {quote(path.name)}"
                )
            found[name] = info
    _compare_with_index(index, where, found)
    return found


def check_config(config: Mapping[str, Any]) -> None:
    """Counts and widths of a configuration and its parts must be whole numbers that a model can have.

    Raises:
        ModelError: one is not, or key/value heads do not divide the query heads.
    """
    for prefix, part in _parts(config):
        for field in sorted(COUNTS & part.keys()):
            _check_count(prefix + field, part[field])
        heads, kv_heads = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
            raise ModelError(
                f"config.json: {prefix}num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
            )


def check_sizes(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse counts and widths that no stored tensor bears out, before anything of that size is allocated.

    Call it after `check_config`. A width, a vocabulary or a number of heads is at most the largest dimension stored;
    layers are at most the stored tensors (a small number is always allowed, since layers may share theirs).

    Raises:
        ModelError: a field is larger than the weights allow.
    """
    largest = max((size for info in tensors.values() for size in info.shape), default=0)
    for prefix, part in _parts(config):
        for field in sorted(COUNTS & part.keys()):
            value = part[field]
            bound = max(len(tensors), 1000) if "layers" in field or field == "n_layer" else max(largest, 1000)
            if isinstance(value, int) and value > bound:
                raise ModelError(f"config.json: {prefix}{field} is {value}, but the weights have at most {bound}")


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration and the ones nested in it, each with the prefix of its fields."""
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    while waiting:
        prefix, part = waiting.pop()
        yield prefix, part
        for name, value in part.items():
            if isinstance(value, dict) and (name.endswith("_config") or name in ("encoder", "decoder")):
                waiting.append((f"{prefix}{name}." if len(prefix) < 200 else prefix, value))


def _check_count(field: str, value: object) -> None:
    plain = field.rpartition(".")[2]
    if value is None and plain not in REQUIRED:
        return
    limit = 10**6 if "heads" in plain or plain == "n_head" else 10**9
    items = value if isinstance(value, list) else [value]
    if not items or any(type(item) is not int or not 1 <= item <= limit for item in items):
        expected = f"expected a whole number from 1 to {limit}"
        raise ModelError(f"config.json: {field} is {quote(value)}, {expected}", hint="mend it or fetch the model again")


def _no_weights(folder: Path) -> ModelError:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return ModelError(f"{folder}: cannot be read: {error.strerror}", hint=NEEDS)
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")) and "model" in name]
    if pickles:
        first = next((name for name in pickles if name == "pytorch_model.bin"), pickles[0])
        hint = f"convert it to safetensors, or pass --allow-pickle if you trust who wrote {quote(first)}"
        return ModelError(
            f"{folder}: no safetensors, only pickled weights ({quote(first)}), which can run code", hint=hint
        )
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return ModelError(f"{folder}: neither {WEIGHTS} nor {INDEX}, only {quote(others[0])}", hint=NEEDS)
    return ModelError(f"{folder}: no weights", hint=NEEDS)


def _weight_map(index: Path) -> dict[str, str]:
    data, _ = read(index, HEADER_LIMIT)
    where = json_object(data, index, unique).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ModelError(f"{index}: no weight_map with the file of each tensor")
    for name, file in where.items():
        if not isinstance(file, str):
            raise ModelError(f"{index}: weight_map gives {quote(name)} no file name but {kind(file)}")
    return where


def _shard(folder: Path, index: Path, name: str) -> Path:
    """The path of one shard; its name must be a plain file name, so that an index cannot point elsewhere."""
    plain = name not in ("", ".", "..") and not set(name) & set("/\\:\0") and name.isprintable()
    if not plain or len(name.encode("utf-8", "replace")) > 255:
        raise ModelError(f"{index}: {quote(name)} is not a plain file name inside the folder")
    if not name.endswith(".safetensors"):
        raise ModelError(f"{index}: {quote(name)} is not a .safetensors file")
    return inside(folder, name)


def _compare_with_index(index: Path, where: Mapping[str, str], found: Mapping[str, TensorInfo]) -> None:
    for name, file in where.items():
        if name not in found:
            raise ModelError(f"{index}: tensor {quote(name)} is not in {quote(file)}")
        if found[name].file != file:
            raise ModelError(f"{index}: tensor {quote(name)} is in {quote(found[name].file)}, not in {quote(file)}")
    for name, info in found.items():
        if name not in where:
            raise ModelError(f"{index}: tensor {quote(name)} of {quote(info.file)} is not listed")


def _read_header(path: Path) -> dict[str, TensorInfo]:
    start, size = read(path, HEADER_LIMIT, length=8)
    if len(start) < 8:
        raise ModelError(f"{path}: {'cut short' if start else 'empty'}: {size} bytes, a safetensors file starts with 8")
    (length,) = struct.unpack("<Q", start)
    if length > HEADER_LIMIT:
        raise ModelError(f"{path}: not safetensors: header of {length} bytes, more than the limit of {HEADER_LIMIT}")
    if 8 + length > size:
        raise ModelError(f"{path}: cut short or not safetensors: header of {length} bytes in a file of {size}")
    data, _ = read(path, HEADER_LIMIT, length=length, offset=8)
    header = json_object(data, f"{path}: header", unique)
    header.pop("__metadata__", None)
    spans = {name: _entry(path, name, entry) for name, entry in header.items()}
    _check_spans(path, spans, size - 8 - length)
    return {name: info for name, (info, _, _) in spans.items()}


def _entry(path: Path, name: str, entry: object) -> tuple[TensorInfo, int, int]:
    """One tensor of a header with the first and the last byte (exclusive) of its values."""
    where = f"{path}: tensor {quote(name)}"
    if not isinstance(entry, dict):
        raise ModelError(f"{where}: described by {kind(entry)}, not by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ModelError(f"{where}: dtype {quote(dtype)} is not known")
    if not _naturals(shape):
        raise ModelError(f"{where}: shape {quote(shape)} is not a list of whole numbers from 0")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{where}: data_offsets {quote(offsets)} are not two ascending whole numbers")
    begin, end = offsets
    if not _fits(shape, BITS[dtype], end - begin):
        raise ModelError(f"{where}: {end - begin} bytes do not hold shape {quote(shape)} of {dtype}")
    return TensorInfo(name, dtype, tuple(shape), path.name), begin, end


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _fits(shape: Sequence[int], bits: int, size: int) -> bool:
    if 0 in shape:
        return size == 0
    total = bits
    for factor in shape:
        total *= factor
        if total > 8 * size:
            return False
    return total == 8 * size


def _check_spans(path: Path, spans: Mapping[str, tuple[TensorInfo, int, int]], available: int) -> None:
    """The tensors must lie one after the other and fill the file."""
    position = 0
    for name, (_, begin, end) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if end > available:
            raise ModelError(f"{path}: cut short: tensor {quote(name)} ends at byte {end} of {available}")
        if begin != position:
            raise ModelError(f"{path}: tensor {quote(name)} starts at byte {begin}, the one before ends at {position}")
        position = end
    if position != available:
        raise ModelError(f"{path}: {available - position} bytes at the end belong to no tensor")


_FLOATS = frozenset({"F16", "BF16", "F32", "F64", "F8_E5M2", "F8_E4M3"})
_TORCH = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


def parameter_count(tensors: Iterable[TensorInfo]) -> int:
    """Floating values stored; whole-number buffers such as position numbers are none."""
    return sum(prod(info.shape) for info in tensors if info.dtype in _FLOATS)


def value_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Bytes of one value in the floating type that holds most of them."""
    kind = _main_type(tensors)
    return BITS[kind] // 8 if kind else 4


def stored_dtype(tensors: Iterable[TensorInfo]) -> str | None:
    """torch's name of that type; None where it is none that models compute in."""
    return _TORCH.get(_main_type(tensors) or "")


def _main_type(tensors: Iterable[TensorInfo]) -> str | None:
    sizes: dict[str, int] = {}
    for info in tensors:
        if info.dtype in _FLOATS:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + prod(info.shape)
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None
