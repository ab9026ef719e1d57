"""Safetensors files written one tensor at a time, byte for byte as the format's own library writes them from memory.

A file is the length of its header (8 bytes, little-endian), the header as JSON, padded with spaces to a multiple of 8
bytes, and the tensors' bytes, by width of their type and then by name (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""The format's names of number formats, in its own order; in a file the last of them come first."""
_ORDER = list(_TYPES)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write a file of `tensors`, of which only shape and number format are used; `read` gives the values of one.

    Raises:
        OSError: the file cannot be written.
    """
    order = sorted(tensors, key=lambda name: (-_ORDER.index(tensors[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        entry = {"dtype": _TYPES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = entry | {"data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            values = read(name).detach().cpu().contiguous()
            assert (values.shape, values.dtype) == (tensors[name].shape, tensors[name].dtype), name
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)
