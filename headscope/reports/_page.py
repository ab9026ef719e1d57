"""The page that the format html fills: its frame, its looks in light and dark, and the script of its table."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --line: #d4d4d8; --head: #f4f4f5; --page: #fff; --soft: #52525b; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --line: #52525b; --head: #27272a; --page: #18181b; --soft: #a1a1aa; --link: #7cc0ff; }
}
body { font: 15px/1.45 system-ui, sans-serif; background: var(--page); margin: 1.5rem auto; max-width: 100rem;
  padding: 0 1rem; }
h1 { margin-bottom: .2rem; overflow-wrap: anywhere; } h2 { margin-top: 2rem; }
.about, .hint, #count { color: var(--soft); } .about { margin-top: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
figure svg { background: #fff; border-radius: 4px; max-width: 100%; height: auto; }
.tools { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: center; margin: 1rem 0 .5rem; }
.tools[hidden] { display: none; }
#find { font: inherit; padding: .3rem .5rem; width: min(24rem, 100%); box-sizing: border-box; }
#find::placeholder { color: var(--soft); }
.wide { overflow: auto; max-height: 80vh; width: fit-content; max-width: 100%;
  box-sizing: border-box; border: 1px solid var(--line); }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
td.text { white-space: pre-wrap; max-width: 30rem; overflow-wrap: break-word; }
td:first-child { max-width: min(30rem, 45vw); }
th.number, td.number { text-align: right; white-space: nowrap; }
thead th { position: sticky; top: 0; background: var(--head); z-index: 2; white-space: nowrap; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--page); z-index: 1; }
thead th:first-child { background: var(--head); z-index: 3; }
tbody tr:hover td { background: var(--head); }
th button { all: unset; cursor: pointer; } th button:hover, th button:focus-visible { color: var(--link); }
th button:focus-visible { outline: 2px solid var(--link); }
th[aria-sort=ascending] button::after { content: " \\25b2"; }
th[aria-sort=descending] button::after { content: " \\25bc"; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .15rem 1rem; }
dt { font-weight: 600; overflow-wrap: anywhere; } dd { margin: 0; }
dd, li { overflow-wrap: anywhere; white-space: pre-wrap; }
@media (max-width: 40rem) { dl { display: block; } dd { margin: 0 0 .4rem 1rem; } }
"""

SCRIPT = """
"use strict";
const table = document.getElementById("report"), body = table.tBodies[0], rows = [...body.rows];
const heads = [...table.tHead.rows[0].cells], names = heads.map(head => head.textContent);
const find = document.getElementById("find"), count = document.getElementById("count");
const words = new Intl.Collator("en", {numeric: true});
const valueOf = (row, place) => row.cells[place].dataset.value ?? row.cells[place].textContent;
const texts = new Map(rows.map(row => [row, [...row.cells].map(cell => cell.textContent).join("\\n").toLowerCase()]));

function sort(place, direction) {
  const numeric = heads[place].className === "number", keys = new Map(rows.map(row => [row, valueOf(row, place)]));
  const compare = (one, other) => {
    const a = keys.get(one), b = keys.get(other);
    if (a === "" || b === "") return (a === "") - (b === "");  // what was not measured stays at the end
    return direction * (numeric ? a - b : words.compare(a, b));
  };
  body.append(...(direction ? [...rows].sort(compare) : rows));
  heads.forEach((head, at) => head.setAttribute("aria-sort",
    at !== place || !direction ? "none" : direction > 0 ? "ascending" : "descending"));
}

const tests = {
  "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b,
  "=": (a, b) => a === b, "!=": (a, b) => a !== b,
};

function matches(row, word) {
  const [, name, test, wanted] = /^([^<>=!]+)(<=|>=|!=|=|<|>)(.+)$/.exec(word) ?? [];
  const place = names.findIndex(known => known.toLowerCase() === name);
  if (place < 0) return texts.get(row).includes(word);
  const found = valueOf(row, place).toLowerCase();
  if (found === "") return false;
  return heads[place].className === "number" ? tests[test](Number(found), Number(wanted)) : tests[test](found, wanted);
}

function filter() {
  const wanted = find.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    row.hidden = !wanted.every(word => matches(row, word));
    shown += !row.hidden;
  }
  count.textContent = `${shown} of ${rows.length} rows`;
}

heads.forEach((head, place) => {
  const button = document.createElement("button"), first = head.className === "number" ? -1 : 1;
  const next = {none: first, ascending: first > 0 ? -1 : 0, descending: first > 0 ? 0 : 1};
  button.type = "button";
  button.textContent = names[place];
  button.addEventListener("click", () => sort(place, next[head.getAttribute("aria-sort") ?? "none"]));
  head.replaceChildren(button);
});
body.addEventListener("pointerover", event => {
  const cell = event.target.closest("td[data-value]");
  if (cell) cell.title = cell.dataset.value;
});
find.addEventListener("input", filter);
document.querySelector(".tools").hidden = false;
filter();
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if about %}
<p class="about">{{ about }}</p>
{% endif %}
{% if notes %}
<h2>Notes</h2>
<ul>
{% for note in notes %}
<li>{{ note }}</li>
{% endfor %}
</ul>
{% endif %}
{% if picture %}
<figure>{{ picture }}</figure>
{% endif %}
<div class="tools" hidden>
<input id="find" type="search" aria-label="filter rows" placeholder="filter: a word, {{ example }}">
<span id="count" role="status"></span>
<span class="hint">A click on a column's name sorts; pointing at a number shows all its digits.</span>
</div>
<div class="wide" tabindex="0">
<table id="report">
<thead><tr>{% for column in columns %}<th scope="col" class="{{ column.kind }}" title="{{ column.hover }}">
{{- column.name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for column, cell in row %}<td class="{{ column.kind }}"
{%- if cell.exact is not none %} data-value="{{ cell.exact }}"{% endif %}>{{ cell.shown }}</td>
{%- endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
<h2>Columns</h2>
<dl>
{% for column in columns %}
<dt>{{ column.name }}</dt><dd>{{ column.explained }}</dd>
{% endfor %}
</dl>
{% if provenance %}
<h2>Provenance</h2>
<dl>
{% for name, value in provenance %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
{% endif %}
<script>{{ script }}</script>
</body>
</html>
"""
