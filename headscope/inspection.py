"""The reports of `inspect`: heads, layers, the whole model, and how its heads map to parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from headscope.columns import Column
from headscope.cost import SiteShape, model_summary, site_kv_values, site_macs
from headscope.heads import Site, SiteId
from headscope.provenance import Provenance
from headscope.tables import Cell, Table

if TYPE_CHECKING:
    from headscope.study import Scores, Study

HEAD_COLUMNS = (
    Column("head", "label", "stack.kind.layer.head, numbered as in the unpruned model", untrusted=True),
    Column("stack", "name", "encoder, decoder, vision or audio", untrusted=True),
    Column("kind", "name", "self (bidirectional), causal, or cross attention"),
    Column("layer", "number", "layer in its stack, from 0"),
    Column("index", "number", "query head in its layer, from 0"),
    Column("kv_head", "number", "key/value head that the query head reads; several may read one"),
    Column("shared_with", "labels", "the same physical head in other layers that share its module", untrusted=True),
    Column("parameters", "count", "its q and o slices; k and v slices are counted once, at the first head of a group"),
    Column(
        "flags",
        "names",
        "dead: writes nothing; coupled: other heads depend on its parameters, so it can be masked but not removed; "
        "mixed: heads are mixed in front of the output projection",
    ),
)
LAYER_COLUMNS = (
    Column("site", "label", "stack.kind.layer", untrusted=True),
    *HEAD_COLUMNS[1:4],
    Column("heads", "count", "query heads"),
    Column("kv_heads", "count", "key/value heads"),
    Column("head_dim", "numbers", "width of a query or key"),
    Column("parameters", "count", "parameters of all heads of the site, without the output projection's bias"),
    Column("macs_per_token", "count", "multiply-accumulates of the site's attention for each token at --tokens"),
    Column(
        "kv_bytes_per_token",
        "bytes",
        "what the KV cache keeps of the site for each token, as the checkpoint stores numbers",
    ),
)
MODEL_COLUMNS = (
    Column("model", "name", "the model as given", untrusted=True),
    Column("architecture", "name", "the class that the checkpoint was saved from", untrusted=True),
    Column("sites", "count", "attention modules, counted once for each layer"),
    Column("heads", "count", "query heads"),
    Column("kv_heads", "count", "key/value heads"),
    Column("head_dim", "numbers", "width of a query or key"),
    Column("attention", "name", "MHA, GQA or MQA"),
    Column("attention_parameters", "count", "parameters of all heads"),
    Column("total_parameters", "count", "parameters of the model, tied ones once"),
    Column("attention_share", "1", "attention_parameters over total_parameters"),
    Column("macs_per_token", "count", "multiply-accumulates of all attention for each token at --tokens"),
    Column("kv_bytes_per_token", "bytes", "what the KV cache keeps for each token, as the checkpoint stores numbers"),
)
STRUCTURE_COLUMNS = (
    Column("site", "label", "stack.kind.layer; empty for a remark about the model", untrusted=True),
    Column("module", "path", "the attention module, or what the remark is about", untrusted=True),
    Column("class", "name", "its class", untrusted=True),
    Column("heads", "count", "query heads"),
    Column("kv_heads", "count", "key/value heads"),
    Column("head_dim", "numbers", "width of a query or key"),
    Column("value_dim", "numbers", "width of a value"),
    Column("parameters", "paths", "role: parameter[axis] of every slice that belongs to heads", untrusted=True),
    Column(
        "coupled", "paths", "parameters that tie heads together, so that none can be removed exactly", untrusted=True
    ),
    Column("shared", "paths", "parameters that serve all heads and stay whole", untrusted=True),
    Column("remark", "words", "what is special", untrusted=True),
)


def head_table(study: Study, scores: Scores) -> Table:
    """One row per head: where it is, what it has, and every column of the measures."""
    from headscope.matrices import dead_heads, parameters_per_head

    columns = score_columns(scores)
    rows: list[dict[str, Cell]] = []
    for site in study.sites:
        parameters = parameters_per_head(study.loaded.model, site)
        dead = dead_heads(study.loaded.model, site)
        for place, head in enumerate(site.heads):
            row: dict[str, Cell] = {
                "head": str(head),
                "stack": site.id.stack,
                "kind": str(site.id.kind),
                "layer": site.id.layer,
                "index": head.index,
                "kv_head": site.kv_number(place),
                "shared_with": ";".join(f"{twin}.{head.index}" for twin in site.shared_with),
                "parameters": parameters[place],
                "flags": ";".join(_flags(site, dead[place])),
            }
            row |= {column.name: _cell(column, scores, site.id, place) for column in columns}
            rows.append(row)
    return Table(
        "inspect",
        (*HEAD_COLUMNS, *columns),
        tuple(rows),
        "head",
        study.provenance(),
        notes(study, scores),
    )


def score_columns(scores: Scores) -> tuple[Column, ...]:
    """The columns of the measures, in order."""
    from headscope.study import load_scores

    return tuple(column for score in load_scores(scores.measures).values() for column in score.columns)


def notes(study: Study, scores: Scores) -> tuple[str, ...]:
    """What a reader of the report should know."""
    found = [*study.loaded.notes, *(study.examples.notes if study.examples else ()), *scores.notes]
    found += [f"not analysed: {problem}" for problem in study.discovery.problems]
    silent = [site for site, values in scores.values.get("importance", {}).items() if not values.any()]
    if silent:
        found.append(f"importance is 0 for every head of {listed(silent)}, and importance_layer_norm is set to 0 there")
    return tuple(found)


def listed(things: Sequence[object], most: int = 3) -> str:
    """The first few of many, by name, and how many more there are."""
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(map(str, things[:most])) + more


def _flags(site: Site, dead: bool) -> Iterable[str]:
    if dead:
        yield "dead"
    if site.coupled:
        yield "coupled"
    if site.mixes_heads:
        yield "mixed"


def _cell(column: Column, scores: Scores, site: SiteId, head: int) -> Cell:
    """A measure of one head; a name where the column holds names."""
    value = float(scores.values[column.name][site][head])
    if not isfinite(value):
        return None
    return column.labels[int(value)] if column.labels else value


def layer_table(study: Study, scores: Scores, tokens: int) -> Table:
    """One row per site: sums of parameters and costs, and means of the measures over its heads.

    Standard errors and names are left out: they have no mean.
    """
    from headscope.matrices import site_shape

    shapes = [site_shape(study.loaded.model, site) for site in study.sites]
    table = outline_layers(shapes, tokens, study.loaded.value_bytes, study.provenance())
    kept = [column for column in score_columns(scores) if not column.name.endswith("_se") and not column.labels]
    rows = tuple(
        row | {column.name: float(scores.values[column.name][site.id].mean()) for column in kept}
        for row, site in zip(table.rows, study.sites, strict=True)
    )
    return Table("inspect", (*LAYER_COLUMNS, *kept), rows, "site", study.provenance(), notes(study, scores))


def outline_layers(shapes: Sequence[SiteShape], tokens: int, value_bytes: int, provenance: Provenance | None) -> Table:
    """One row per site, from shapes alone."""
    rows: list[dict[str, Cell]] = [
        {
            "site": str(shape.id),
            "stack": shape.id.stack,
            "kind": str(shape.id.kind),
            "layer": shape.id.layer,
            "heads": shape.n_heads,
            "kv_heads": shape.n_kv_heads,
            "head_dim": shape.d_head,
            "parameters": shape.parameters,
            "macs_per_token": site_macs(shape, tokens),
            "kv_bytes_per_token": site_kv_values(shape) * value_bytes,
        }
        for shape in shapes
    ]
    return Table("inspect", LAYER_COLUMNS, tuple(rows), "site", provenance)


def model_table(study: Study, tokens: int) -> Table:
    """One row for the whole model."""
    from headscope.matrices import site_shape, total_parameters

    model = study.loaded.model
    shapes = [site_shape(model, site) for site in study.sites]
    total = total_parameters(model)
    architecture = str((model.config.architectures or [type(model).__name__])[0])
    table = outline_model(
        shapes, tokens, study.loaded.value_bytes, study.provenance(), architecture=architecture, total=total
    )
    found = (*study.loaded.notes, *(f"not analysed: {problem}" for problem in study.discovery.problems))
    return Table("inspect", table.columns, table.rows, table.key, table.provenance, found)


def outline_model(
    shapes: Sequence[SiteShape],
    tokens: int,
    value_bytes: int,
    provenance: Provenance,
    *,
    architecture: str,
    total: int,
) -> Table:
    """One row for the whole model, from shapes alone."""
    summary = model_summary(shapes, total, tokens, kv_bytes_per_value=value_bytes)
    row: dict[str, Cell] = {"model": provenance.model, "architecture": architecture, "total_parameters": total}
    row |= summary
    ordered = {column.name: row[column.name] for column in MODEL_COLUMNS}
    return Table("inspect", MODEL_COLUMNS, (ordered,), "model", provenance)


def structure_table(study: Study) -> Table:
    """One row per site: where its heads live in the parameters, and what ties them together."""
    rows: list[dict[str, Cell]] = []
    for site in study.sites:
        pieces = [f"{piece.role}: {piece.path}[{piece.axis}]" for piece in site.slices]
        row: dict[str, Cell] = {
            "site": str(site.id),
            "module": site.module,
            "class": site.module_class,
            "heads": site.n_heads,
            "kv_heads": site.n_kv_heads,
            "head_dim": site.d_head,
            "value_dim": site.d_value,
            "parameters": "; ".join(pieces),
            "coupled": "; ".join(site.coupled),
            "shared": "; ".join(site.shared),
            "remark": "; ".join(_remarks(site)),
        }
        rows.append(row)
    blank: dict[str, Cell] = {column.name: None for column in STRUCTURE_COLUMNS}
    for problem in study.discovery.problems:
        module, _, why = problem.partition(": ")
        rows.append(blank | {"module": module, "remark": f"not analysed: {why}"})
    for other in study.discovery.others:
        remark = f"not softmax attention: {other.instead}"
        rows.append(blank | {"module": other.path, "class": other.module_class, "remark": remark})
    return Table("structure", STRUCTURE_COLUMNS, tuple(rows), "", study.provenance(), study.loaded.notes)


def _remarks(site: Site) -> Iterable[str]:
    if site.source == "function":
        yield "bypasses the attention interface"
    if site.shared_with:
        yield "one module for layers " + ", ".join(str(layer) for layer in sorted(_layers(site)))
    if site.mixes_heads:
        yield "heads are mixed in front of the output projection, so the context is gated instead"
    elif site.on_context:
        yield "no module projects its heads, so they are gated where the attention returns them"
    if site.coupled:
        yield "heads can be masked but not removed exactly"
    if site.window:
        yield f"a query sees at most {site.window} keys"


def _layers(site: Site) -> Iterable[int]:
    ids: tuple[SiteId, ...] = (site.id, *site.shared_with)
    return (twin.layer for twin in ids)


def summary(study: Study, scores: Scores) -> list[str]:
    """Lines for stderr: what was measured on how much, and how stable the rankings are."""
    loaded = study.loaded
    heads = sum(site.n_heads for site in study.sites)
    lines = [f"{type(loaded.model).__name__}: {heads} heads in {len(study.sites)} sites, task {loaded.task_name}"]
    if study.examples is not None and scores.examples:
        loss = "" if scores.loss is None else f", mean loss {scores.loss:.6g}"
        lines.append(f"{scores.examples} examples{loss}")
    for column, correlation in scores.stability.items():
        if correlation == correlation:
            lines.append(f"rank correlation of {column} between two random halves of the examples: {correlation:.3f}")
        elif scores.examples:
            lines.append(f"rank correlation of {column} between halves: not defined on so few examples")
    return lines


def heat_map(table: Table, column: str) -> dict[str, list[list[float]]]:
    """A column of a head table as layers by heads, for each stack and kind; NaN where a head was removed.

    A layer without heads is an empty row, so that every layer keeps its number.
    """
    blocks: dict[str, dict[int, list[float]]] = {}
    for row in table.rows:
        value = row[column]
        layers = blocks.setdefault(f"{row['stack']}.{row['kind']}", {})
        line = layers.setdefault(int(row["layer"] or 0), [])
        line += [float("nan")] * (int(row["index"] or 0) - len(line))
        line.append(float("nan") if value is None else float(value))
    return {name: [layers.get(layer, []) for layer in range(max(layers) + 1)] for name, layers in blocks.items()}
