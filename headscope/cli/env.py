"""`headscope env`: versions and devices for bug reports."""

from __future__ import annotations

import os
import platform


def env() -> None:
    """Print versions and devices for bug reports."""
    import torch

    from headscope.provenance import versions

    lines = {"python": platform.python_version(), "platform": platform.platform(), **versions()}
    lines["cuda"] = (
        f"{torch.version.cuda} on {torch.cuda.device_count()} devices" if torch.cuda.is_available() else "no"
    )
    for index in range(torch.cuda.device_count()):
        lines[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    lines["mps"] = "yes" if torch.backends.mps.is_available() else "no"
    lines["threads"] = str(torch.get_num_threads())
    lines["offline"] = "yes" if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "ON", "YES") else "no"
    for name, value in lines.items():
        print(f"{name}: {value}")  # noqa: T201
