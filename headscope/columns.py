"""A column of a report: its name, unit, meaning and source, in words that `headscope explain` prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column; `untrusted` marks text that comes from data or model files and must be escaped."""

    name: str
    unit: str
    meaning: str
    source: str = ""
    untrusted: bool = False
    labels: tuple[str, ...] = ()
    """Names that the column's whole numbers stand for, where it holds names."""
