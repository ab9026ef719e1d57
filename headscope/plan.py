"""A plan: which query heads a model is to lose, and why; plain values that see no weights, JSON in and JSON out."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from headscope.errors import InvalidPlan
from headscope.heads import HeadId, Site, SiteId
from headscope.plan_files import plan_document
from headscope.plan_values import array, finite, mapping, shown, text, whole

SCHEMA_VERSION = 1
SCOPES = ("model", "layer", "uniform")
UNITS = ("auto", "head", "group")
_LONGEST_LABEL = 200


@dataclass(frozen=True)
class SiteHeads:
    """The query heads that one site has before pruning, by their numbers in the unpruned model.

    `groups[k]` are those that read the k-th key/value head still present, all equally many (one each under MHA).
    `shared_with` are the layers that use the same module: a head removed here is removed there.
    """

    id: SiteId
    groups: tuple[tuple[int, ...], ...]
    shared_with: tuple[SiteId, ...] = ()

    @classmethod
    def of(cls, site: Site) -> SiteHeads:
        """The heads of a site that discovery found."""
        return cls(site.id, tuple(site.groups), site.shared_with)

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers of all query heads, in order."""
        return tuple(number for group in self.groups for number in group)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return len(self.groups[0]) if self.groups else 0

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads."""
        return len(self.groups)


@dataclass(frozen=True)
class Plan:
    """Which heads to remove (`removed`, sorted), and why: the rules of the choice, and the scores it was made from.

    `sites` are those of the model before pruning; `scores` are of all heads, where there are any, lowest goes first.
    """

    sites: tuple[SiteHeads, ...]
    removed: tuple[HeadId, ...]
    criterion: str = ""
    scope: str = "model"
    unit: str = "auto"
    seed: int = 0
    scores: Mapping[HeadId, float] = field(default_factory=dict)
    rounds: int = 1

    def kept(self, site: SiteId) -> tuple[int, ...]:
        """The numbers of the heads that the site keeps."""
        return tuple(number for group in self.kept_groups(site) for number in group)

    def kept_groups(self, site: SiteId) -> tuple[tuple[int, ...], ...]:
        """The same by key/value head; a key/value head that no query head reads any more is left out."""
        gone = self.removed_from(site)
        left = (tuple(number for number in group if number not in gone) for group in self._groups[site])
        return tuple(group for group in left if group)

    def removed_from(self, site: SiteId) -> frozenset[int]:
        """The numbers of the heads that the site loses."""
        return self._removed.get(site, frozenset())

    @cached_property
    def _groups(self) -> dict[SiteId, tuple[tuple[int, ...], ...]]:
        return {site.id: site.groups for site in self.sites}

    @cached_property
    def _removed(self) -> dict[SiteId, frozenset[int]]:
        numbers: dict[SiteId, set[int]] = {}
        for head in self.removed:
            numbers.setdefault(head.site, set()).add(head.index)
        return {site: frozenset(found) for site, found in numbers.items()}

    def is_uniform(self) -> bool:
        """Whether every site keeps as many query heads and as many key/value heads as every other."""
        return len({(len(self.kept(site.id)), len(self.kept_groups(site.id))) for site in self.sites}) <= 1

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values; heads stand as labels, and a score that is not finite is left out."""
        return {
            "schema_version": SCHEMA_VERSION,
            "criterion": self.criterion,
            "scope": self.scope,
            "unit": self.unit,
            "seed": self.seed,
            "rounds": self.rounds,
            "sites": [{"site": str(site.id), "groups": [list(group) for group in site.groups]} for site in self.sites],
            "removed": [str(head) for head in self.removed],
            "scores": {str(head): float(score) for head, score in self.scores.items() if math.isfinite(score)},
        }

    @classmethod
    def from_dict(cls, data: object, sites: Sequence[SiteHeads]) -> Plan:
        """The plan in JSON values of unknown origin, for the model that has these sites.

        Raises:
            InvalidPlan: no plan, one of a later version, or one for a model with other heads.
        """
        values = mapping(data, "a plan")
        version = whole(values, "schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise InvalidPlan(f"a plan of schema version {version}; this headscope reads version {SCHEMA_VERSION}")
        if "removed" not in values:
            raise InvalidPlan('a plan without "removed", the list of heads to remove')
        _require_same_model(array(values, "sites"), sites)
        known = {str(head): head for site in sites for head in _heads(site)}
        removed = [_known(label, known) for label in array(values, "removed")]
        for head, times in Counter(removed).items():
            if times > 1:
                raise InvalidPlan(f"{head} is removed {times} times")
        return cls(
            tuple(sites),
            tuple(sorted(removed)),
            criterion=text(values, "criterion", ""),
            scope=text(values, "scope", "model", SCOPES),
            unit=text(values, "unit", "auto", UNITS),
            seed=whole(values, "seed", 0),
            scores=_scores(values.get("scores", {}), known),
            rounds=whole(values, "rounds", 1, least=1),
        )


def require_removable(plan: Plan, *, min_heads: int, structural: bool) -> None:
    """Refuse heads that cannot be removed together.

    With `structural` they are to be removed for real: the key/value heads that stay in a site must serve equally many
    query heads each, so that a site loses whole groups, the same number of heads of every group, or both.

    Raises:
        InvalidPlan: a site keeps too few heads or unequal groups, or layers that share a module lose different heads.
    """
    known = {head for site in plan.sites for head in _heads(site)}
    for head in plan.removed:
        if head not in known:
            raise InvalidPlan(f"no head {head} in this model")
    for site in plan.sites:
        gone = plan.removed_from(site.id)
        for twin in site.shared_with:
            if any(other.id == twin for other in plan.sites) and plan.removed_from(twin) != gone:
                raise InvalidPlan(
                    f"{site.id} and {twin} are one module, but lose different heads: "
                    f"{sorted(gone)} and {sorted(plan.removed_from(twin))}",
                    hint="a head of a shared module is removed from all its layers: name it in each",
                )
        if gone:
            _require_enough(plan, site.id, min_heads)
            if structural:
                _require_equal_groups(plan, site.id)


def read_plan(path: Path, sites: Sequence[SiteHeads]) -> Plan:
    """The plan in a file, for the model that has these sites.

    The file is a plan, a checkpoint's manifest (or the folder it is in), or the rows that `headscope prune` prints as
    JSON, CSV or TSV.

    Raises:
        DataError: the file cannot be read.
        InvalidPlan: what it holds is no plan, or one for a model with other heads.
    """
    document = plan_document(path)
    try:
        return Plan.from_dict(document, sites)
    except InvalidPlan as error:
        raise InvalidPlan(f"{path}: {error}", hint=error.hint) from None


def _heads(site: SiteHeads) -> Iterable[HeadId]:
    return (HeadId(site.id, number) for number in site.heads)


def _require_enough(plan: Plan, site: SiteId, min_heads: int) -> None:
    left, gone = len(plan.kept(site)), sorted(plan.removed_from(site))
    if left >= min_heads:
        return
    if left == 0:
        lower = "--min-heads 0" if min_heads == 1 else f"--min-heads 0 instead of {min_heads}"
        raise InvalidPlan(f"{site}: removing {gone} leaves no head; pass {lower} or lower --ratio")
    heads = "1 head" if left == 1 else f"{left} heads"
    raise InvalidPlan(
        f"{site}: removing {gone} leaves {heads}, fewer than --min-heads {min_heads}; lower it or --ratio"
    )


def _require_equal_groups(plan: Plan, site: SiteId) -> None:
    groups = plan.kept_groups(site)
    if len({len(group) for group in groups}) > 1:
        gone = sorted(plan.removed_from(site))
        raise InvalidPlan(
            f"{site}: removing {gone} leaves key/value groups of {', '.join(str(len(group)) for group in groups)} "
            "query heads, but all groups must be of one size",
            hint="remove whole groups or equally many heads of every group, or use --layout masked",
        )


def _require_same_model(entries: list[object], sites: Sequence[SiteHeads]) -> None:
    """What a plan says about the sites it was made for must be true of the model's; a plan may say nothing."""
    if not entries:
        return
    expected = {str(site.id): site for site in sites}
    seen: set[str] = set()
    for entry in entries:
        values = mapping(entry, "a site")
        label = values.get("site")
        if not isinstance(label, str) or label not in expected:
            raise InvalidPlan(f"a plan for another model: it has a site {shown(label)}, and this model has none")
        if label in seen:
            raise InvalidPlan(f"{label} stands twice among the sites")
        seen.add(label)
        site = expected[label]
        here = {
            "groups": [list(group) for group in site.groups],
            "heads": len(site.heads),
            "kv_heads": site.n_kv_heads,
        }
        for name, value in here.items():
            if name in values and (values[name] != value or isinstance(values[name], bool)):
                what = "other heads" if name == "groups" else f"{shown(values[name])} {name}, and here it has {value}"
                raise InvalidPlan(f"a plan for another model: there {label} has {what}")
    missing = [label for label in expected if label not in seen]
    if missing:
        raise InvalidPlan(f"a plan for another model, or cut short: it does not have the site {missing[0]}")


def _known(label: object, known: Mapping[str, HeadId]) -> HeadId:
    if isinstance(label, str) and label in known:
        return known[label]
    near = (
        difflib.get_close_matches(label, known, n=1) if isinstance(label, str) and len(label) < _LONGEST_LABEL else []
    )
    raise InvalidPlan(f"no head {shown(label)} in this model", hint=f"did you mean {near[0]}?" if near else None)


def _scores(value: object, known: Mapping[str, HeadId]) -> dict[HeadId, float]:
    found: dict[HeadId, float] = {}
    for label, score in mapping(value, '"scores"').items():
        head = _known(label, known)
        found[head] = finite(score, f"the score of {head}")
    return found
