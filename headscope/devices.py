"""Devices and number formats: what a name on the command line means on this machine."""

from __future__ import annotations

import torch

from headscope.errors import DeviceError, UsageError, nearest

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def resolve_device(name: str) -> torch.device | str:
    """The device that `name` means; `auto` takes the first of cuda, mps, cpu; `balanced` stays for the loader.

    Raises:
        DeviceError: it is not there; a named device is never replaced by another.
        UsageError: no such device is known.
    """
    if name == "balanced":
        return name
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        hint = nearest(name, ["auto", "cpu", "cuda", "cuda:0", "mps", "balanced"])
        raise UsageError(f"no device {name!r}", hint=hint) from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise DeviceError(f"no CUDA device found for --device {name}", hint="use --device cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("no MPS device found", hint="use --device cpu")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"--device {name} is not supported", hint="use cpu, cuda, mps or balanced")
    return device


def device_of_rank(name: str, local_rank: int) -> str:
    """What `name` means for one of several processes on a machine: each has a GPU of its own, in turn."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{local_rank % torch.cuda.device_count()}"
    return name


def resolve_dtype(name: str, device: torch.device | str = "cpu") -> torch.dtype:
    """The number format that `name` means; `auto` is float32 on a CPU and bfloat16 on a GPU, `balanced` the first one
    there is.

    Raises:
        UsageError: no such format.
    """
    if name not in DTYPES:
        raise UsageError(f"no dtype {name!r}", hint=nearest(name, DTYPES))
    if name == "auto" and device == "balanced":
        device = resolve_device("auto")
    if name == "auto":
        return torch.float32 if str(device) == "cpu" else torch.bfloat16
    return getattr(torch, name)


def check_attention(name: str, *, trust_remote_code: bool) -> None:
    """Refuse an attention implementation that is a kernel of the Hub, and so code, unless that was allowed.

    Raises:
        UsageError: it is one.
    """
    if "/" in name and not trust_remote_code:
        raise UsageError(
            f"--attn-implementation {name} is code of the Hub", hint="read it, then pass --trust-remote-code to run it"
        )


def free_memory() -> int:
    """Bytes of the host's memory that could be had now; half of all where the system does not say."""
    import os

    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
