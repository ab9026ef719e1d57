"""Reading the recipe in a configuration: a head keeps its number in the unpruned model for ever.

`config.headscope` holds the entries that `portable` restores, and `sites`: for every site its label, its module, how
many heads it had, and the numbers of those that are left (`kept`, `kv_kept`) or are there with nothing to say
(`masked`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from headscope.errors import ModelError
from headscope.heads import HeadId, Site, SiteId
from headscope.jsonfiles import quote
from headscope.portable import carried, find

VERSION = 1
Counts = dict[str, Any]
_MOST_HEADS = 100_000
_MOST_FILLED = 1024
"""Times as large as what is stored a filled parameter may be."""


def renumbered(model: nn.Module, sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """The sites under the labels and head numbers that the model's configuration keeps from before pruning.

    Raises:
        ModelError: it speaks of other heads than the model has.
    """
    entries = _entries(model)
    labels = {site.id: _label(entries.get((site.module, site.call)), site) for site in sites}
    found: list[Site] = []
    for site in sites:
        entry = entries.get((site.module, site.call))
        if entry is None or "kept" not in entry:
            found.append(site)
            continue
        kept, kv_kept = tuple(entry["kept"]), tuple(entry["kv_kept"])
        if (len(kept), len(kv_kept)) != (site.n_heads, site.n_kv_heads):
            raise ModelError(
                f"config.json: headscope says {len(kept)} heads for {site.module}, the weights have {site.n_heads}",
                hint="remove the entry `headscope` of config.json to number heads anew",
            )
        twins = tuple(labels[twin] for twin in site.shared_with)
        found.append(replace(site, id=labels[site.id], shared_with=twins, numbers=kept, kv_numbers=kv_kept))
    return tuple(found)


def _label(entry: Counts | None, site: Site) -> SiteId:
    return site.id if entry is None or "kept" not in entry else HeadId.parse(f"{entry['id']}.0").site


def _entries(model: nn.Module) -> dict[tuple[str, int], Counts]:
    """The entries of the configuration's numbering by module path in this model, and call."""
    kept = carried(getattr(model, "config", None))
    if not kept:
        return {}
    check_recipe(kept)
    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    found: dict[tuple[str, int], Counts] = {}
    for entry in kept.get("sites", ()):
        module = find(model, entry["module"])
        if module is not None:
            found[paths[id(module)], entry["call"]] = entry
    return found


def check_recipe(content: object) -> None:
    """Refuse a recipe that is not of the form that headscope writes: it comes from a file of a stranger.

    Raises:
        ModelError: naming the entry.
    """
    if not isinstance(content, dict) or type(content.get("version")) is not int or content["version"] < 1:
        raise ModelError(f"config.json: headscope is {quote(content)}, not a recipe of headscope")
    if content["version"] > VERSION:
        raise ModelError("config.json: its heads were removed by a newer headscope", hint="pip install -U headscope")
    forms = {"parameters": _is_shape, "attributes": _are_counts, "settings": _are_counts, "arguments": _are_slices}
    forms |= {"silent": _is_output, "filled": _is_filling}
    for name, fits in forms.items():
        entry = content.get(name, {})
        if not isinstance(entry, dict) or not all(isinstance(path, str) for path in entry):
            raise ModelError(f"config.json: headscope.{name} is {quote(entry)}, expected paths")
        for path, value in entry.items():
            if not fits(value):
                raise ModelError(f"config.json: headscope.{name} has {quote(value)} for {quote(path)}")
    sites = content.get("sites", [])
    for site in sites if isinstance(sites, list) else [sites]:
        if not _is_site(site):
            raise ModelError(f"config.json: headscope.sites has {quote(site)}")
    for name in (lambda site: site["id"], lambda site: (site["module"], site["call"])):
        places = [name(site) for site in sites]
        if len(set(places)) < len(places):
            raise ModelError("config.json: headscope.sites names a site twice")


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**31 for one in value)


def _is_shape(value: object) -> bool:
    return _naturals(value) and isinstance(value, list) and 1 <= len(value) <= 8


def _are_counts(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and not name.startswith("_") and (_naturals([count]) or _naturals(count))
        for name, count in value.items()
    )


def _are_slices(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and one.get("where") in ("forward", "attention")
        and isinstance(one.get("name"), str)
        and _naturals([one.get("axis"), one.get("heads")])
        and _are_places(one.get("kept"), one["heads"])
        for one in value
    )


def _is_filling(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("left"), dict):
        return False
    return _are_gaps(value.get("gaps")) and all(
        isinstance(left, dict)
        and _naturals([left.get("axis"), left.get("heads"), left.get("kv_heads")])
        and _are_places(left.get("kept"), left["heads"])
        and _are_places(left.get("kv_kept"), left["kv_heads"])
        for left in value["left"].values()
    )


def _are_gaps(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("module"), str)
        and isinstance(one.get("name"), str)
        and not one["name"].startswith("_")
        and _naturals([one.get("axis"), one.get("size")])
        and one["axis"] < 8
        and _are_runs(one.get("kept"), one["size"])
        for one in value
    )


def _are_runs(value: object, size: int) -> bool:
    """Whether a value lists ranges below `size`, in rising order, that do not touch and leave not too much to fill."""
    if not isinstance(value, list) or not all(_naturals(run) and len(run) == 2 for run in value):
        return False
    if size > _MOST_FILLED * sum(stop - start for start, stop in value):
        return False
    bounds = [bound for run in value for bound in run]
    return all(low < high for low, high in zip([-1, *bounds], [*bounds, size + 1], strict=True))


def _is_output(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("items"), list)
        and all(item is None or isinstance(item, str) for item in value["items"])
        and (value.get("projection") is None or isinstance(value["projection"], str))
        and isinstance(value.get("cache"), bool)
        and _naturals([value.get("width")])
    )


def _is_site(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("module"), str) or not isinstance(value.get("id"), str):
        return False
    try:
        HeadId.parse(f"{value['id']}.0")
    except ValueError:
        return False
    counts = [value.get(name) for name in ("call", "heads", "kv_heads")]
    if not _naturals(counts) or not 1 <= value["kv_heads"] <= value["heads"]:
        return False
    bounds = {"kept": value["heads"], "kv_kept": value["kv_heads"], "masked": value["heads"]}
    return all(_are_places(value[name], bound) for name, bound in bounds.items() if name in value) and (
        ("kept" in value) is ("kv_kept" in value)
    )


def _are_places(value: object, count: int) -> bool:
    """Whether a value lists some of `count` heads, in rising order, each once."""
    if not isinstance(value, list) or not _naturals(value) or not 1 <= count <= _MOST_HEADS:
        return False
    return all(low < high for low, high in zip(value, value[1:], strict=False)) and all(
        place < count for place in value
    )
