"""The report of `prune`: one row per site on stdout, and what changed for the whole model in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headscope.columns import Column
from headscope.counts import total_heads
from headscope.merging import Merge
from headscope.plan import SiteHeads
from headscope.pruned import Pruned
from headscope.publish import site_lines
from headscope.reports._removal import Block, Change, Removal
from headscope.tables import Cell, Table
from headscope.trials import Verdict

PRUNE_COLUMNS = (
    Column("site", "label", "stack.kind.layer", untrusted=True),
    Column("heads_before", "count", "query heads before"),
    Column("heads_after", "count", "query heads after; masked heads are still there"),
    Column("kv_before", "count", "key/value heads before"),
    Column("kv_after", "count", "key/value heads after"),
    Column("removed", "numbers", "the query heads that went, by their numbers in the unpruned model"),
)
_LOADERS = {
    "native": "plain transformers, and engines that read head_dim",
    "portable": "transformers with trust_remote_code=True, or headscope.load",
    "masked": "whatever loads the original; it saves neither time nor memory",
}


def prune_table(done: Pruned) -> Table:
    """One row per site."""
    rows: list[dict[str, Cell]] = [
        {
            "site": line.site,
            "heads_before": line.before,
            "heads_after": line.after,
            "kv_before": line.kv_before,
            "kv_after": line.kv_after,
            "removed": " ".join(map(str, line.removed)),
        }
        for line in site_lines(done)
    ]
    return Table("prune", PRUNE_COLUMNS, tuple(rows), "site", done.provenance, done.notes)


def removal(done: Pruned) -> Removal:
    """What a picture of the pruning shows: every head that the model had, or after a merge its key/value heads."""
    plan, before, after = done.plan, done.before, done.after
    costs = (
        Change("parameters", before.parameters, after.parameters),
        Change("attention MACs a token", before.macs_per_token, after.macs_per_token),
        Change("KV cache bytes a token", before.kv_bytes_per_token, after.kv_bytes_per_token),
        Change("weights in bytes", before.weight_bytes, after.weight_bytes),
    )
    layers: dict[str, list[list[Block]]] = {}
    for site in plan.sites:
        rows = layers.setdefault(f"{site.id.stack}.{site.id.kind}", [])
        rows += [[] for _ in range(site.id.layer + 1 - len(rows))]
        rows[site.id.layer] = _blocks(done, site)
    name = "" if done.provenance is None else f"{Path(done.provenance.model).name}: "
    things = "head" if done.merge is None else "key/value head"
    changed = tuple(change for change in costs if change.before)
    return Removal(f"{name}{next(_lines(done))}", things, layers, changed, tuple(_quality(done)))


def _blocks(done: Pruned, site: SiteHeads) -> list[Block]:
    """The heads of a site one by one, or its key/value heads with those side by side that became one."""
    if done.merge is None:
        gone = done.plan.removed_from(site.id)
        return [Block(number, stays=number not in gone) for number in site.heads]
    groups = next((one.groups for one in done.merge.sites if one.site == site.id), None)
    if groups is None:
        return [Block(place) for place in range(site.n_kv_heads)]
    return [Block(min(group), len(group)) for group in groups]


def summary(done: Pruned) -> list[str]:
    """What was removed, saved and lost, the proof, and who can load it."""
    return list(_lines(done))


def foreseen(done: Pruned, *, taken: float, start: float, libraries: int) -> list[str]:
    """What a run would take, after a dry run that took so many seconds; `start` of them, and so many bytes, were those
    of loading libraries, which the process that loads the checkpoint anew does too.
    """
    if done.foresight is None:
        return []
    ahead = done.foresight
    seconds = taken + start + ahead.seconds
    return [
        f"estimated time: {seconds:.0f} s, of which the plan and what it needs are {taken:.0f} s",
        f"estimated peak memory: {ahead.peak_bytes:,} bytes, and {libraries + ahead.reloaded_bytes:,} bytes "
        "of a process that loads the checkpoint anew",
    ]


def _lines(done: Pruned) -> Iterator[str]:
    plan, before, after = done.plan, done.before, done.after
    total = total_heads(plan.sites)
    verb = "silenced" if done.layout == "masked" else "removed"
    how = {"named": "as named", "scores": "by the scores given", "": "by plan"}.get(
        plan.criterion, f"by {plan.criterion}"
    )
    if done.merge is None:
        yield f"{len(plan.removed)} of {total} heads {verb} {how}"
    else:
        yield from _merged(done.merge, total)
    for number, entry in enumerate(done.history, 1) if len(done.history) > 1 else ():
        yield f"round {number}: {len(entry['taken'])} heads, {entry['gone']} gone"
    for name, old, new in (
        ("parameters", before.parameters, after.parameters),
        ("attention MACs a token", before.macs_per_token, after.macs_per_token),
        ("KV cache bytes a token", before.kv_bytes_per_token, after.kv_bytes_per_token),
        ("weights in bytes", before.weight_bytes, after.weight_bytes),
    ):
        if old:
            yield f"{name}: {old:,} -> {new:,} ({(new - old) / old:+.1%})"
    yield from _quality(done)
    for check in done.verification.checks:
        yield f"proof: {check.name} differ by {check.difference:.2g} (allowed {check.allowed:.2g})"
    where = f"{done.folder} " if done.folder is not None else "dry run, nothing was written: "
    yield f"{where}{'is' if done.folder is not None else 'it would be'} {done.layout}: for {_LOADERS[done.layout]}"


def _merged(merge: Merge, total: int) -> Iterator[str]:
    yield f"key/value heads merged in {len(merge.sites)} sites, {merge.kv_heads} left in each; all {total} heads stay"
    yield f"merged: {merge.how}; this is not exact"


def _quality(done: Pruned) -> Iterator[str]:
    """What is lost on held-out data, with the 95 % interval of the loss by paired bootstrap; and what repair did."""
    verdict = done.verdict
    if verdict is None:
        return
    whole, final = verdict.whole, verdict.final
    if whole.loss is not None and final.loss is not None:
        rise = "" if verdict.increase is None else f", {verdict.increase}"
        yield f"held-out loss: {whole.loss:.4f} -> {final.loss:.4f}{rise}"
    if whole.metric is not None and final.metric is not None:
        yield f"held-out {whole.metric_name}: {whole.metric:.4f} -> {final.metric:.4f}"
    if final.divergence is not None:
        yield f"divergence from the whole model: {final.divergence:.4g} {verdict.unit}"
    yield _repair(verdict)


def _repair(verdict: Verdict) -> str:
    if verdict.repair is None:
        return "not repaired"
    less, count = verdict.pruned, len(verdict.repair.sites)
    losses = "" if less.loss is None else f"loss {less.loss:.4f}, "
    what = f"the output projection{'s' if count > 1 else ''} of {count} site{'s' if count > 1 else ''}"
    harmful = (less.divergence or 0.0) < (verdict.final.divergence or 0.0)
    advice = ", which is less: more data makes a better repair, --no-compensate none" if harmful else ""
    return f"repaired: {what} fitted anew; without that {losses}divergence {less.divergence:.4g} {verdict.unit}{advice}"
