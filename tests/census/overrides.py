"""What single model types or families need besides the rules of `shrink`, as fields to set in their configuration."""

from __future__ import annotations

from typing import Any

OVERRIDES: dict[str, dict[str, Any]] = {}


def changed(model_type: str, values: dict[str, Any]) -> dict[str, Any]:
    """The small configuration with a type's own settings; nested fields are named `part.field`."""
    for name, value in OVERRIDES.get(model_type, {}).items():
        *parts, last = name.split(".")
        target = values
        for part in parts:
            target = target[part]
        target[last] = value
    return values
