"""What a number rests on: model and revision, data digest, versions, seed, dtype, device; every report carries it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    *("headscope", "torch", "transformers", "tokenizers", "accelerate", "datasets", "pandas", "numpy", "scipy"),
    *("safetensors", "huggingface_hub"),
)


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed versions by package name, read from metadata without importing anything; absent ones are left out."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Provenance:
    """Where the numbers of one report come from; empty strings stand for what does not apply."""

    model: str
    revision: str = ""
    weights_digest: str = ""
    data: str = ""
    data_digest: str = ""
    task: str = ""
    examples: int = 0
    skipped: int = 0
    truncated: int = 0
    seed: int = 0
    dtype: str = ""
    device: str = ""
    attention: str = ""
    versions: dict[str, str] = field(default_factory=versions)

    def as_dict(self) -> dict[str, object]:
        """A plain dictionary for JSON."""
        return asdict(self)
