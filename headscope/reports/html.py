"""HTML: one self-contained page with the rows, what the columns mean and where the numbers come from; no script."""

from __future__ import annotations

from headscope.reports._cells import exact, is_number, safe_text
from headscope.tables import Cell, Table

SUFFIXES: tuple[str, ...] = (".html", ".htm")

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>headscope: {{ title }}</title>
<style>
:root { color-scheme: light dark; --line: light-dark(#d4d4d8, #52525b); --head: light-dark(#f4f4f5, #27272a); }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
.wide { overflow: auto; max-height: 80vh; border: 1px solid var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
td.text, dd, li { overflow-wrap: anywhere; white-space: pre-wrap; }
th.number, td.number { text-align: right; white-space: nowrap; }
.wide thead th { position: sticky; top: 0; background: var(--head); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if notes %}
<h2>Notes</h2>
<ul>
{% for note in notes %}
<li>{{ note }}</li>
{% endfor %}
</ul>
{% endif %}
<div class="wide">
<table>
<thead><tr>{% for column in columns %}<th scope="col" class="{{ column.kind }}" title="{{ column.hover }}">
{{- column.name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for column, cell in row %}<td class="{{ column.kind }}"
{%- if cell.exact is not none %} data-value="{{ cell.exact }}" title="{{ cell.exact }}"{% endif %}>{{ cell.shown }}</td>
{%- endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
<h2>Columns</h2>
<table>
<thead><tr><th scope="col">column</th><th scope="col">unit</th><th scope="col">meaning</th>
<th scope="col">source</th></tr></thead>
<tbody>
{% for column in columns %}
<tr><th scope="row">{{ column.name }}</th><td>{{ column.unit }}</td><td>{{ column.meaning }}</td>
<td>{{ column.source }}</td></tr>
{% endfor %}
</tbody>
</table>
{% if provenance %}
<h2>Provenance</h2>
<dl>
{% for name, value in provenance %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
{% endif %}
</body>
</html>
"""


def render(table: Table) -> bytes:
    """The report as one page; floats show 4 significant digits, the exact value stands in `data-value`."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    columns = _columns(table)
    page = environment.from_string(_PAGE).render(
        title=safe_text(table.name),
        notes=[safe_text(note) for note in table.notes],
        columns=columns,
        rows=(
            [(column, _cell(row[name])) for column, name in zip(columns, table.names, strict=True)]
            for row in table.rows
        ),
        provenance=_provenance(table),
    )
    return page.encode()


def _columns(table: Table) -> list[dict[str, str]]:
    described = []
    for column in table.columns:
        numeric = any(is_number(row[column.name]) for row in table.rows)
        words = {"name": column.name, "unit": column.unit, "meaning": column.meaning, "source": column.source}
        safe = {key: safe_text(word) for key, word in words.items()}
        hover = f"{safe['meaning']} ({safe['unit']})" if column.unit else safe["meaning"]
        described.append({**safe, "hover": hover, "kind": "number" if numeric else "text"})
    return described


def _cell(cell: Cell) -> dict[str, str | None]:
    text = safe_text(exact(cell))
    if not isinstance(cell, float) or not text:
        return {"shown": text, "exact": None}
    return {"shown": f"{cell:.4g}", "exact": text}


def _provenance(table: Table) -> list[tuple[str, str]]:
    if table.provenance is None:
        return []
    items = []
    for name, value in table.provenance.as_dict().items():
        if isinstance(value, dict):
            value = ", ".join(f"{package} {version}" for package, version in value.items())
        if value != "":
            items.append((name.replace("_", " "), safe_text(str(value))))
    return items
