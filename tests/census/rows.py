"""The census as a table: one row a model type, in a CSV file that is kept and compared, and its counts in Markdown."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
CENSUS = Path(__file__).parent / "census.csv"
EXACT, REFUSED, WRONG, NOT_RUN = "exact", "refused", "wrong", "not_run"
VERDICTS = ("masked", "pruned_uniform", "pruned_uneven", "pruned_query_in_group", "reloaded")
"""The columns that hold a verdict."""


@dataclass(frozen=True)
class Row:
    """What came of one model type; `sites_found` counts expected modules that were found, `kinds` all sites."""

    model_type: str
    started: str = "no"
    reason: str = ""
    sites_expected: int = 0
    sites_found: int = 0
    kinds: str = ""
    masked: str = NOT_RUN
    pruned_uniform: str = NOT_RUN
    pruned_uneven: str = NOT_RUN
    pruned_query_in_group: str = NOT_RUN
    reloaded: str = NOT_RUN
    coupled: str = ""
    seconds: float = 0.0
    source: str = ""
    """Digest of the source that the row was made with."""

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict columns by name."""
        return {name: getattr(self, name) for name in VERDICTS}


COLUMNS = tuple(field.name for field in fields(Row))


def source_digest() -> str:
    """The first twelve hexadecimal digits of the SHA-256 of headscope's source."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "headscope").rglob("*.py")):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def read(path: Path = CENSUS) -> dict[str, Row]:
    """The rows of a file by model type; empty where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {values["model_type"]: _row(values) for values in csv.DictReader(file)}


def _row(values: Mapping[str, str]) -> Row:
    numbers = {name: int(values[name]) for name in ("sites_expected", "sites_found")}
    return Row(**(dict(values) | numbers | {"seconds": float(values["seconds"])}))  # type: ignore[arg-type]


def write(rows: Iterable[Row], path: Path = CENSUS) -> None:
    """Write the rows in the order given; the file is replaced at once, so that an interruption leaves a whole one."""
    fresh = path.with_suffix(".part")
    with fresh.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    fresh.replace(path)


def summary(rows: Iterable[Row]) -> str:
    """The counts of a census as a table in Markdown."""
    rows = list(rows)
    started = [row for row in rows if row.started == "yes"]
    heads = [row for row in started if row.sites_expected or row.kinds]
    found = sum(row.sites_found == row.sites_expected for row in heads)
    lines = [
        "| model types | number |",
        "|---|---|",
        f"| in AutoModel's mapping | {len(rows)} |",
        f"| that start as a tiny random model | {len(started)} |",
        f"| of these with softmax attention | {len(heads)} |",
        f"| of these with every expected attention module found | {share(found, len(heads))} |",
        "",
        "| check | exact | refused by name | wrong | not run |",
        "|---|---|---|---|---|",
    ]
    for name in VERDICTS:
        counts = [sum(getattr(row, name) == verdict for row in heads) for verdict in (EXACT, REFUSED, WRONG, NOT_RUN)]
        run = sum(counts[:3])
        lines.append(
            f"| {name.replace('_', ' ')} | {share(counts[0], run)} | {counts[1]} | {counts[2]} | {counts[3]} |"
        )
    return "\n".join(lines)


def share(part: int, whole: int) -> str:
    """A count with its percentage, rounded down to a tenth so that it never flatters."""
    return f"{part} ({part * 1000 // whole / 10:.1f} %)" if whole else str(part)
