"""The report of a curve: one row for each series and number of heads, one line a series on stderr, and its picture."""

from __future__ import annotations

from headscope.card import Quality
from headscope.curve_columns import CURVE_COLUMNS
from headscope.curves import RANDOM, Curve, Point, Series
from headscope.reports._curve import Line, Panel
from headscope.tables import Cell, Table

_MIDDLE = 0.5
"""The share of heads that the summary is about."""
_LABELS = {
    "importance": "importance (Michel et al. 2019)",
    "importance-layer-norm": "importance, normalised by layer",
    "scores": "the scores given",
}


def curve_table(found: Curve) -> Table:
    """One row for each series and number of heads, in the order of the series."""
    rows: list[dict[str, Cell]] = [
        {
            "criterion": series.criterion,
            "repair": series.repair,
            "ratio": point.removed / found.heads,
            "heads_removed": point.removed,
            "loss": point.quality.loss,
            "metric": point.quality.metric,
            "divergence": point.quality.divergence,
        }
        for series in found.series
        for point in series.points
    ]
    return Table("curve", CURVE_COLUMNS, tuple(rows), "", found.provenance, found.notes)


def summary(found: Curve) -> list[str]:
    """How the whole model does on held-out examples, and each series as near to half of the heads as it comes."""
    lines = [f"the whole model, {found.heads} heads, on {found.examples} examples: {_said(found.whole, found.unit)}"]
    for series in found.series:
        point = min(series.points, key=lambda point: abs(point.removed / found.heads - _MIDDLE))
        how = "repaired" if series.repair else "not repaired"
        share = f"{point.removed / found.heads:.1%} ({point.removed} heads)"
        lines.append(f"{series.criterion}, {how}, without {share}: {_said(point.quality, found.unit)}")
    return lines


def _said(quality: Quality, unit: str) -> str:
    parts = [] if quality.loss is None else [f"loss {quality.loss:.4f}"]
    parts += [] if quality.metric is None else [f"{quality.metric_name} {quality.metric:.4f}"]
    parts += [] if quality.divergence is None else [f"divergence {quality.divergence:.4g} {unit}"]
    return ", ".join(parts)


def panels(found: Curve) -> list[Panel]:
    """What there is to draw: loss and metric where there are labels, and the divergence."""
    whole = found.whole
    shown = [] if whole.loss is None else [Panel("loss", "loss", "nats")]
    shown += [] if whole.metric is None else [Panel("metric", whole.metric_name)]
    return [*shown, Panel("divergence", "divergence from the whole model", found.unit)]


def lines(found: Curve) -> list[Line]:
    """Every series as it is drawn; the random ones belong to one band."""
    return [_line(series, found) for series in found.series]


def _line(series: Series, found: Curve) -> Line:
    asked = series.criterion == found.criterion
    label = _LABELS.get(series.criterion, series.criterion)
    if asked and found.series[0].repair:
        label += ", repaired" if series.repair else ", not repaired"
    role = "repaired" if series.repair else "asked" if asked else "random" if series.criterion in RANDOM else ""
    return Line(
        label,
        role or series.criterion,
        tuple(point.removed / found.heads for point in series.points),
        {name: tuple(_number(point, name) for point in series.points) for name in ("loss", "metric", "divergence")},
    )


def _number(point: Point, name: str) -> float:
    value = {"loss": point.quality.loss, "metric": point.quality.metric, "divergence": point.quality.divergence}[name]
    return float("nan") if value is None else value
