"""Rows: what one data source holds, before a task makes examples of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """The rows of one data source in file order, each a dict from column name to value.

    `columns` are in file order, `name` is the path or id as given (`-` for stdin), and `digest` is the SHA-256 of the
    raw bytes (of a folder: of its files; of a Hub data set: of id, revision, config, split and rows). `numbers` holds
    the 1-based line of each row, or its row number where there are no lines. `skipped` counts bad rows left out.
    """

    rows: list[dict[str, object]]
    columns: list[str]
    name: str
    digest: str
    numbers: list[int]
    skipped: int
    notes: list[str]
