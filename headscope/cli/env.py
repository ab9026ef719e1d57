"""`headscope env`: versions and devices for bug reports."""

from __future__ import annotations

import os
import platform

_MORE = ("matplotlib", "jinja2", "rich", "typer", "scikit-learn", "pillow", "gguf", "peft", "flash_attn", "kernels")
"""What reports and extras need, and what brings other attention backends."""


def env() -> None:
    """Print versions and devices for bug reports."""
    import torch

    from headscope.provenance import PACKAGES, versions

    lines = {"python": platform.python_version(), "platform": platform.platform()}
    found = versions((*PACKAGES, *_MORE))
    lines |= {package: found.get(package, "not installed") for package in (*PACKAGES, *_MORE)}
    lines["cuda"] = (
        f"{torch.version.cuda} on {torch.cuda.device_count()} devices" if torch.cuda.is_available() else "no"
    )
    for index in range(torch.cuda.device_count()):
        lines[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    lines["mps"] = "yes" if torch.backends.mps.is_available() else "no"
    lines["threads"] = f"{torch.get_num_threads()} on {os.cpu_count()} processors"
    lines["offline"] = "yes" if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "ON", "YES") else "no"
    for name, value in lines.items():
        print(f"{name}: {value}")  # noqa: T201
