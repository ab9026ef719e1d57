"""Structure checks of a checkpoint: what is built wrong shows before any score is believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from headscope.columns import Column
from headscope.data import load_examples
from headscope.discovery import find_sites
from headscope.errors import UnsupportedModel
from headscope.headers import TensorInfo, has_safetensors, read_headers
from headscope.heads import ParameterSlice, Role, Site
from headscope.location import Location, locate
from headscope.matrices import dead_heads, head_weights
from headscope.models import LoadOptions, blank_model, load
from headscope.offload import require_in_memory
from headscope.provenance import Provenance
from headscope.row_sums import EXAMPLES, row_sums
from headscope.study import Study, StudyOptions
from headscope.tables import Cell, Table
from headscope.weights import check_files

CHECK_COLUMNS = (
    Column("check", "name", "what was checked"),
    Column("site", "label", "where; empty for the whole model", untrusted=True),
    Column("status", "name", "pass, fail, or skip where there is nothing to look at, as after a failure"),
    Column("detail", "words", "what was found", untrusted=True),
)
_SMALL = 10**7
"""Parameters that can always be allocated."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check at one place."""

    check: str
    site: str
    status: str
    detail: str


def check(
    model: str, options: LoadOptions | None = None, *, data: str | None = None, reading: StudyOptions | None = None
) -> Table:
    """Check a checkpoint's structure; rows with status `fail` say what is wrong.

    With `data`, read as `reading` says, attention rows are added up too.

    Raises:
        ModelError: there is nothing that could be checked.
        DataError: the data cannot be read, or does not fit the task.
    """
    options = options or LoadOptions()
    location = locate(
        model, revision=options.revision, allow_pickle=options.allow_pickle, code=options.trust_remote_code
    )
    findings: list[Finding] = []
    if not location.gguf:
        check_files(location, allow_pickle=options.allow_pickle)
        if has_safetensors(location.folder):
            findings += _against_files(location, options)
    notes, provenance = location.notes, Provenance(model=model, revision=location.revision)
    if any(finding.status == "fail" for finding in findings):
        findings.append(Finding("weights", "", "skip", "the model cannot be loaded before its shapes are mended"))
    else:
        loaded = load(model, replace(options, tolerate_non_finite=True))
        require_in_memory(loaded.model, "--check")
        findings += _finite(loaded.non_finite)
        _replace_non_finite(loaded.model, loaded.non_finite)
        study = Study(loaded, None, reading or StudyOptions())
        for site in study.sites:
            findings += _of_site(loaded.model, site)
        notes = (*loaded.notes, *(f"not checked: {problem}" for problem in study.discovery.problems))
        if data is not None:
            findings += _rows(study, data)
            notes = (*notes, *(study.examples.notes if study.examples else ()))
        provenance = study.provenance()
    rows: list[dict[str, Cell]] = [dict(vars(finding)) for finding in findings]
    return Table("check", CHECK_COLUMNS, tuple(rows), "", provenance, notes)


def failures(table: Table) -> int:
    """How many checks of a table failed."""
    return sum(row["status"] == "fail" for row in table.rows)


def _against_files(location: Location, options: LoadOptions) -> list[Finding]:
    """Shapes that config.json asks for against those in the weights, attributed to sites and roles."""
    blank, stored = blank_model(location, options), read_headers(location.folder)
    expected = {name: tuple(tensor.shape) for name, tensor in blank.state_dict().items()}
    known = _by_name_in_model(stored, expected, f"{blank.base_model_prefix}.")
    wrong = [name for name in expected if name in known and known[name] != expected[name]]
    if not wrong:
        compared = f"{len(known)} of " if len(known) < len(stored) else ""
        return [Finding("config", "", "pass", f"{compared}{len(stored)} stored tensors fit config.json")]
    owners = _owners(location, options, sum(map(prod, expected.values())), sum(map(prod, known.values())))
    found: list[Finding] = []
    for name in wrong:
        where, what = str(list(known[name])), str(list(expected[name]))
        site, kind = "", "config"
        if name in owners:
            owner, piece = owners[name]
            site, kind = str(owner.id), _which(piece, known[name], expected[name])
        found.append(Finding(kind, site, "fail", f"{name} is stored as {where}, config.json asks for {what}"))
    return found


def _by_name_in_model(
    stored: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], prefix: str
) -> dict[str, tuple[int, ...]]:
    """Stored shapes under the names that the model has for them: with or without the prefix of its body."""
    found: dict[str, tuple[int, ...]] = {}
    for name, info in stored.items():
        for candidate in (name, prefix + name, name.removeprefix(prefix)):
            if candidate in expected:
                found.setdefault(candidate, info.shape)
                break
    return found


def _owners(
    location: Location, options: LoadOptions, wanted: int, stored: int
) -> dict[str, tuple[Site, ParameterSlice]]:
    """The site and slice of each parameter; empty where config.json asks for far more numbers than are stored."""
    if wanted > 4 * stored + _SMALL:
        return {}
    try:
        sites = find_sites(blank_model(location, options, device="cpu")).sites
    except (UnsupportedModel, RuntimeError):  # a model of such a shape need not run
        return {}
    return {piece.path: (site, piece) for site in sites for piece in site.slices}


def _which(piece: ParameterSlice, stored: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """The check that a wrong shape fails: along the heads, or across them."""
    along_heads = len(stored) != len(expected) or stored[piece.axis] != expected[piece.axis]
    if piece.role is Role.OUTPUT:
        return "concatenation" if along_heads else "output_width"
    return "head_count" if along_heads else "input_width"


def _finite(bad: dict[str, int]) -> Iterator[Finding]:
    if not bad:
        yield Finding("finite", "", "pass", "every weight is finite")
    for name, count in bad.items():
        yield Finding("finite", "", "fail", f"{count} values of {name} are NaN or infinite")


def _replace_non_finite(model: nn.Module, bad: dict[str, int]) -> None:
    """Let the other checks go on: NaN would reach every head."""
    with torch.no_grad():
        for name in bad:
            parameter = model.get_parameter(name)
            parameter.copy_(torch.nan_to_num(parameter, nan=0.0, posinf=0.0, neginf=0.0))


def _of_site(model: nn.Module, site: Site) -> Iterator[Finding]:
    where = str(site.id)
    yield _projections(site, where)
    yield _split(site, where)
    yield _concatenation(site, where)
    yield _output_width(model, site, where)
    yield _equal_heads(model, site, where)
    dead = [head for head, is_dead in enumerate(dead_heads(model, site)) if is_dead]
    if dead:
        yield Finding("dead_heads", where, "fail", "heads that write nothing: " + _listing(dead))
    else:
        yield Finding("dead_heads", where, "pass", "every head can write")


def _rows(study: Study, data: str) -> Iterator[Finding]:
    """Attention rows add up to 1 at every site, on the first examples of the data."""
    options = study.options.data
    few = replace(options, limit=min(options.limit or EXAMPLES, EXAMPLES))
    study.examples = load_examples(data, study.loaded, few)
    found = row_sums(study)
    for site in study.sites:
        sums, where = found.get(site.id), str(site.id)
        if sums is None:
            yield Finding("row_sums", where, "skip", "none of its attention rows was seen")
        else:
            yield Finding("row_sums", where, "pass" if sums.passed else "fail", sums.detail)


def _projections(site: Site, where: str) -> Finding:
    """Every head has a query, key and value slice of its own or of its group."""
    for role, count in ((Role.QUERY, site.n_heads), (Role.KEY, site.n_kv_heads), (Role.VALUE, site.n_kv_heads)):
        owned = {owner for piece in site.slices_of(role) for owner in piece.owner} - {-1}
        if site.slices_of(role) and owned != set(range(count)):
            missing = sorted(set(range(count)) - owned)
            return Finding("projections", where, "fail", f"no {role} slice for heads {_listing(missing)}")
    if site.coupled:
        return Finding("projections", where, "pass", "heads are coupled by " + ", ".join(site.coupled))
    return Finding("projections", where, "pass", f"own slices for {site.n_heads} query and {site.n_kv_heads} k/v heads")


def _split(site: Site, where: str) -> Finding:
    """All query heads are equally wide."""
    for piece in site.slices_of(Role.QUERY):
        widths = {piece.owner.count(head) for head in range(site.n_heads)}
        if len(widths) != 1:
            return Finding("split", where, "fail", f"{piece.path} is split into heads of widths {sorted(widths)}")
    return Finding("split", where, "pass", f"{site.n_heads} query heads of width {site.d_head}")


def _concatenation(site: Site, where: str) -> Finding:
    """The output projection reads every head's values side by side."""
    if site.mixes_heads:
        return Finding("concatenation", where, "pass", "heads are mixed in front of the output projection")
    counts = {site.channels.count(head) for head in range(site.n_heads)}
    if counts != {site.d_value}:
        detail = f"heads of width {site.d_value} feed {sorted(counts)} channels each"
        return Finding("concatenation", where, "fail", detail)
    return Finding("concatenation", where, "pass", f"{site.n_heads} heads of width {site.d_value} side by side")


def _output_width(model: nn.Module, site: Site, where: str) -> Finding:
    """The output projection returns to the width of the stream that the queries come from."""
    width = _input_width(model, site)
    if width is not None and width != site.d_model:
        detail = f"{site.output} returns width {site.d_model}, its queries come from width {width}"
        return Finding("output_width", where, "fail", detail)
    return Finding("output_width", where, "pass", f"back to width {site.d_model}")


def _input_width(model: nn.Module, site: Site) -> int | None:
    """The width that queries are projected from; None where they pass a latent first."""
    query = head_weights(model, site).query
    return None if query is None or site.shared else query.shape[1]


def _equal_heads(model: nn.Module, site: Site, where: str) -> Finding:
    """No two heads compute the same from equal query, key and value slices (all-zero heads are dead, not equal)."""
    if site.coupled and all(len(_shape(model, piece)) == 1 for piece in site.slices_of(Role.QUERY)):
        return Finding("equal_heads", where, "skip", "coupled heads have no query matrices of their own to compare")
    fingerprints: dict[bytes, list[int]] = {}
    for head in range(site.n_heads):
        parts = [
            _slice(model, piece, site.kv_head(head) if piece.role in (Role.KEY, Role.VALUE) else head)
            for piece in site.slices_of(Role.QUERY, Role.KEY, Role.VALUE, Role.EXTRA)
        ]
        if any(bool(part.any()) for part in parts):
            key = b"".join(part.contiguous().cpu().float().numpy().tobytes() for part in parts)
            fingerprints.setdefault(key, []).append(site.heads[head].index)
    equal = [heads for heads in fingerprints.values() if len(heads) > 1]
    if equal:
        detail = "heads with equal query, key and value weights: " + "; ".join(_listing(heads) for heads in equal)
        return Finding("equal_heads", where, "fail", detail)
    return Finding("equal_heads", where, "pass", "no two heads have equal weights")


def _shape(model: nn.Module, piece: ParameterSlice) -> torch.Size:
    return getattr(model.get_submodule(piece.module), piece.name).shape


def _slice(model: nn.Module, piece: ParameterSlice, owner: int) -> Tensor:
    parameter = getattr(model.get_submodule(piece.module), piece.name).detach()
    indices = torch.tensor(piece.indices(owner), device=parameter.device, dtype=torch.long)
    return parameter.index_select(piece.axis, indices)


def _listing(heads: list[int]) -> str:
    return ", ".join(str(head) for head in heads)
