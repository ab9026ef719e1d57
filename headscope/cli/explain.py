"""`headscope explain`: what a column of a report means, with its unit and source."""

from __future__ import annotations

from typing import Annotated

import typer

from headscope.errors import UsageError, nearest


def explain(
    column: Annotated[str | None, typer.Argument(metavar="[COLUMN]", help="A column; all without it.")] = None,
) -> None:
    """Say what COLUMN means, or list all columns."""
    from headscope import checks, inspection, registry
    from headscope.columns import Column
    from headscope.comparison_columns import columns_of
    from headscope.curve_columns import CURVE_COLUMNS
    from headscope.estimate import ESTIMATE_COLUMNS
    from headscope.maps import MAP_COLUMNS
    from headscope.prune_report import PRUNE_COLUMNS
    from headscope.relations import RELATION_COLUMNS
    from headscope.similarity_report import every_column

    tables = (inspection.HEAD_COLUMNS, inspection.LAYER_COLUMNS, inspection.MODEL_COLUMNS)
    more = (inspection.STRUCTURE_COLUMNS, checks.CHECK_COLUMNS, RELATION_COLUMNS)
    scores = [score.columns for score in registry.load_all("scores", "SCORE").values()]
    known: dict[str, list[Column]] = {}
    reports = (PRUNE_COLUMNS, CURVE_COLUMNS, columns_of(speed=True), every_column(), MAP_COLUMNS, ESTIMATE_COLUMNS)
    for columns in (*tables, *scores, *more, *reports):
        for found in columns:  # one name may mean different things in different reports
            if found.meaning not in [other.meaning for other in known.setdefault(found.name, [])]:
                known[found.name].append(found)
    if column is not None and column not in known:
        raise UsageError(f"no column {column!r}", hint=nearest(column, known))
    for found in [one for same in known.values() for one in same] if column is None else known[column]:
        print(f"{found.name} [{found.unit}]: {found.meaning}")  # noqa: T201
        if found.source and column is not None:
            print(f"source: {found.source}")  # noqa: T201
