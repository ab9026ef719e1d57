"""A plan says what stays, refuses what cannot go together, and survives its JSON and hostile stand-ins for it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headscope.errors import DataError, HeadscopeError, InvalidPlan
from headscope.heads import AttentionKind, HeadId, Site, SiteId
from headscope.plan import Plan, SiteHeads, read_plan, require_removable


def site(layer: int, *groups: tuple[int, ...], shared_with: tuple[SiteId, ...] = ()) -> SiteHeads:
    return SiteHeads(SiteId("encoder", AttentionKind.SELF, layer), groups, shared_with)


def heads(*labels: str) -> tuple[HeadId, ...]:
    return tuple(HeadId.parse(f"encoder.self.{label}") for label in labels)


SITES = (
    site(0, (0, 1, 2), (3, 4, 5)),
    site(1, (0,), (2,), (3,), (7,)),  # heads 1, 4, 5 and 6 went earlier
    site(2, (0, 1), (2, 3), (6, 7)),
)
PLAN = Plan(
    SITES,
    heads("0.0", "0.4", "1.3", "2.2", "2.3"),
    criterion="fisher",
    scope="layer",
    unit="head",
    seed=3,
    scores={HeadId(each.id, number): number / 7 for each in SITES for number in each.heads},
    rounds=2,
)


def test_what_a_plan_keeps_by_original_numbers() -> None:
    assert [PLAN.kept(each.id) for each in SITES] == [(1, 2, 3, 5), (0, 2, 7), (0, 1, 6, 7)]
    assert PLAN.kept_groups(SITES[0].id) == ((1, 2), (3, 5))
    assert PLAN.kept_groups(SITES[2].id) == ((0, 1), (6, 7))  # the group in the middle is gone
    assert PLAN.removed_from(SITES[2].id) == {2, 3}
    assert SITES[0].heads == (0, 1, 2, 3, 4, 5)
    assert [(each.group_size, each.n_kv_heads) for each in SITES] == [(3, 2), (1, 4), (2, 3)]


def test_the_heads_of_a_discovered_site() -> None:
    found = Site(
        SITES[2].id, "layer", "Attention", "o", (), 2, 0, n_heads=6, n_kv_heads=3, d_head=2, d_value=2, d_model=12,
        numbers=(0, 1, 2, 3, 6, 7), kv_numbers=(0, 1, 3), shared_with=(SITES[0].id,),
    )  # fmt: skip
    assert SiteHeads.of(found) == site(2, (0, 1), (2, 3), (6, 7), shared_with=(SITES[0].id,))


@pytest.mark.parametrize(
    ("removed", "uniform"),
    [((), True), (("0.0", "0.1", "1.2", "1.3"), True), (("0.0", "0.2", "1.1", "1.3"), True),
     (("0.0", "0.1", "1.0", "1.2"), False), (("0.0", "0.1"), False)],
)  # fmt: skip
def test_uniform_means_query_and_key_value_heads(removed: tuple[str, ...], uniform: bool) -> None:
    pair = (site(0, (0, 1), (2, 3)), site(1, (0, 1), (2, 3)))
    assert Plan(pair, heads(*removed)).is_uniform() is uniform


def test_json_gives_the_same_plan_back() -> None:
    text = json.dumps(PLAN.as_dict(), allow_nan=False)
    assert Plan.from_dict(json.loads(text), SITES) == PLAN
    assert json.loads(text)["removed"][0] == "encoder.self.0.0"


def test_a_score_that_is_not_finite_is_left_out() -> None:
    first, second = heads("0.0", "0.1")
    data = Plan(SITES, (), scores={first: math.nan, second: 1.0}).as_dict()
    assert data["scores"] == {"encoder.self.0.1": 1.0}


@given(data=st.data())
def test_any_plan_survives_json(data: st.DataObject) -> None:
    known = [HeadId(each.id, number) for each in SITES for number in each.heads]
    plan = Plan(
        SITES,
        tuple(sorted(data.draw(st.sets(st.sampled_from(known))))),
        criterion=data.draw(st.sampled_from(["", "random", "scores.csv: fisher"])),
        seed=data.draw(st.integers(-(2**62), 2**62)),
        scores=data.draw(st.dictionaries(st.sampled_from(known), st.floats(allow_nan=False, allow_infinity=False))),
        rounds=data.draw(st.integers(1, 99)),
    )
    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict())), SITES) == plan


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["encoder.self.0"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@given(data=st.dictionaries(st.sampled_from(list(PLAN.as_dict())), JSON), whole=st.booleans())
def test_hostile_json_is_one_line_or_a_plan(data: dict[str, Any], whole: bool) -> None:
    try:
        plan = Plan.from_dict(PLAN.as_dict() | data if whole else data, SITES)
    except InvalidPlan as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert plan.sites == SITES and json.dumps(plan.as_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"removed": ["encoder.self.0.9"]}, "no head 'encoder.self.0.9' in this model"),
        ({"removed": ["encoder.self.1.1"]}, "no head 'encoder.self.1.1' in this model"),  # went earlier
        ({"removed": [3]}, "no head 3 in this model"),
        ({"removed": {}}, '"removed" must be a JSON array, not an object'),
        ({"removed": ["encoder.self.0.1"] * 3}, "encoder.self.0.1 is removed 3 times"),
        ({"schema_version": 2}, "a plan of schema version 2; this headscope reads version 1"),
        ({"schema_version": True}, '"schema_version" must be a whole number, not true or false'),
        ({"rounds": 0}, '"rounds" must be a whole number from 1 on, not 0'),
        ({"seed": 1.5}, '"seed" must be a whole number, not 1.5'),
        ({"seed": 2**63}, '"seed" must be a whole number, not 9223372036854775808'),
        ({"scope": "modell"}, '"scope" is \'modell\''),
        ({"unit": None}, '"unit" must be a short text, not null'),
        ({"criterion": "a\x1b[31m"}, "\"criterion\" must be a short text, not 'a\\x1b[31m'"),
        ({"scores": {"encoder.self.0.0": math.inf}}, "the score of encoder.self.0.0 must be a finite number, not inf"),
        ({"scores": {"encoder.self.0.0": 10**400}}, "the score of encoder.self.0.0 must be a finite number"),
        ({"scores": {"encoder.self.0.0": True}}, "the score of encoder.self.0.0 must be a finite number, not true"),
        ({"scores": {"decoder.self.0.0": 1}}, "no head 'decoder.self.0.0' in this model"),
        ({"sites": [7]}, "a site must be a JSON object, not 7"),
        ({"sites": [{"site": "encoder.self.0"}]}, "another model, or cut short: it does not have the site encoder.se"),
        ({"sites": [{"site": "encoder.self.0", "heads": 4}]}, "another model: there encoder.self.0 has 4 heads, and "),
        ({"sites": [{"site": "encoder.self.0", "groups": [[0]]}]}, "another model: there encoder.self.0 has other he"),
        ({"sites": [{"site": "encoder.self.0"}] * 2}, "encoder.self.0 stands twice among the sites"),
        ({"sites": [{"site": "decoder.self.0"}]}, "another model: it has a site 'decoder.self.0', and this model has"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_plan_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        Plan.from_dict(PLAN.as_dict() | change, SITES)
    assert message in str(caught.value)


def test_a_misspelt_head_gets_a_hint() -> None:
    with pytest.raises(InvalidPlan) as caught:
        Plan.from_dict({"removed": ["encodr.self.0.1"]}, SITES)
    assert caught.value.hint == "did you mean encoder.self.0.1?"


@pytest.mark.parametrize("data", [[], "plan", None, 3, {}, {"heads": []}])
def test_what_is_no_plan(data: object) -> None:
    with pytest.raises(InvalidPlan, match="a plan"):
        Plan.from_dict(data, SITES)


def test_an_empty_site_needs_consent() -> None:
    plan = Plan((site(3, (0,), (1,)),), heads("3.0", "3.1"))
    require_removable(plan, min_heads=0, structural=True)
    with pytest.raises(InvalidPlan) as caught:
        require_removable(plan, min_heads=1, structural=True)
    text = "encoder.self.3: removing [0, 1] leaves no head; pass --min-heads 0 or lower --ratio"
    assert str(caught.value) == text


def test_too_few_heads_left() -> None:
    plan = Plan((site(3, (0,), (1,), (2,)),), heads("3.0", "3.1"))
    require_removable(plan, min_heads=1, structural=True)
    with pytest.raises(InvalidPlan) as caught:
        require_removable(plan, min_heads=2, structural=True)
    expected = "encoder.self.3: removing [0, 1] leaves 1 head, fewer than --min-heads 2; lower it or --ratio"
    assert str(caught.value) == expected


def test_a_site_that_loses_nothing_may_be_small() -> None:
    plan = Plan((site(0, (0,), (1,), (2,), (3,)), site(1, (0,))), heads("0.0"))
    require_removable(plan, min_heads=3, structural=True)


@pytest.mark.parametrize(
    ("removed", "fine"),
    [(("0.0", "0.1", "0.2"), True), (("0.0", "0.4"), True), (("0.0",), False), (("0.0", "0.1", "0.4"), False),
     (("0.3", "0.4", "0.5", "0.1"), True)],  # a whole group, and one head of the only group left
)  # fmt: skip
def test_groups_stay_equal(removed: tuple[str, ...], fine: bool) -> None:
    plan = Plan(SITES[:1], heads(*removed))
    require_removable(plan, min_heads=1, structural=False)
    if fine:
        require_removable(plan, min_heads=1, structural=True)
    else:
        with pytest.raises(InvalidPlan, match="but all groups must be of one size") as caught:
            require_removable(plan, min_heads=1, structural=True)
        assert caught.value.hint is not None and "--layout masked" in caught.value.hint


def test_layers_of_one_module_lose_the_same() -> None:
    first, second = site(0, (0,), (1,)).id, site(1, (0,), (1,)).id
    pair = (site(0, (0,), (1,), shared_with=(second,)), site(1, (0,), (1,), shared_with=(first,)))
    require_removable(Plan(pair, heads("0.1", "1.1")), min_heads=1, structural=True)
    for removed in (("0.1",), ("1.1",), ("0.1", "1.0")):
        with pytest.raises(InvalidPlan, match="are one module, but lose different heads") as caught:
            require_removable(Plan(pair, heads(*removed)), min_heads=0, structural=False)
        assert caught.value.hint is not None


def test_a_head_that_the_model_lacks() -> None:
    with pytest.raises(InvalidPlan, match=r"no head encoder\.self\.1\.1 in this model"):
        require_removable(Plan(SITES, heads("1.1")), min_heads=0, structural=False)


ROWS: list[dict[str, Any]] = [
    {"site": "encoder.self.0", "heads_before": 6, "heads_after": 4, "kv_before": 2, "kv_after": 2, "removed": "0 4"},
    {"site": "encoder.self.1", "heads_before": 4, "heads_after": 3, "kv_before": 4, "kv_after": 3, "removed": "3"},
    {"site": "encoder.self.2", "heads_before": 6, "heads_after": 4, "kv_before": 3, "kv_after": 2, "removed": "2 3"},
]


def csv(rows: list[dict[str, Any]], delimiter: str = ",") -> str:
    cells = [list(rows[0]), *(["" if cell is None else str(cell) for cell in row.values()] for row in rows)]
    return "".join(delimiter.join(f'"{cell}"' if "," in cell else cell for cell in line) + "\n" for line in cells)


def changed(**cells: Any) -> list[dict[str, Any]]:
    return [ROWS[0] | cells, *ROWS[1:]]


MASKED = [row | {"heads_after": row["heads_before"], "kv_after": row["kv_before"]} for row in ROWS]
COMMAS = [row | {"removed": row["removed"].replace(" ", ", ")} for row in ROWS]
SOURCES = {
    "plan.json": json.dumps(PLAN.as_dict()),
    "removed.json": json.dumps({"removed": PLAN.as_dict()["removed"]}),
    "manifest.json": json.dumps({"schema_version": 9, "plan": PLAN.as_dict(), "files": {}}),
    "report.json": json.dumps({"schema_version": 1, "report": "prune", "rows": ROWS}),
    "numbers.json": json.dumps({"rows": [row | {"removed": [int(x) for x in row["removed"].split()]} for row in ROWS]}),
    "report.csv": csv(ROWS),
    "commas.csv": csv(COMMAS),
    "marked.csv": "\ufeff" + csv(ROWS),
    "report.tsv": csv(ROWS, "\t"),
    "masked.csv": csv(MASKED),
    "masked.json": json.dumps({"rows": MASKED}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_form_of_a_plan_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SOURCES[name], encoding="utf-8")
    plan = read_plan(tmp_path / name, SITES)
    assert plan.removed == PLAN.removed
    assert plan.sites == SITES
    if name in ("plan.json", "manifest.json"):
        assert plan == PLAN


def test_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "headscope.json").write_text(SOURCES["manifest.json"])
    assert read_plan(tmp_path, SITES) == PLAN


def test_a_site_that_loses_nothing_has_an_empty_cell(tmp_path: Path) -> None:
    for name, text in (
        ("a.csv", csv(changed(removed="", heads_after=6))),
        ("a.json", json.dumps({"rows": changed(removed=None, heads_after=6)})),
    ):
        (tmp_path / name).write_text(text)
        assert read_plan(tmp_path / name, SITES).removed == PLAN.removed[2:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"{", "cut short at line 1"),
        (b"[1]", "a JSON object is needed"),
        (b'{"removed": [], "removed": []}', "stands twice"),
        (b'{"a": 1}', "neither a plan nor a report"),
        (b'{"rows": []}', "neither a plan nor a report"),
        (b'{"rows": [{"site": 3, "removed": ""}]}', "a site must be a text, not 3"),
        (b'{"rows": [{"site": "x", "removed": [[1]]}]}', "'x': removed holds an array, not a whole number"),
        (b'{"rows": [{"site": "x", "removed": true}]}', "removed holds true or false"),
        (b'{"removed": [' + b"1" * 5000 + b"]}", "not usable JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"removed": ' + b"[" * 900 + b"]" * 900 + b"}", "no head an array in this model"),
        (b"site,removed\nencoder.self.0,\xff\n", "not UTF-8 text at byte 28"),
        (b"head,importance\nencoder.self.0.0,1\n", "no column 'site'"),
        (b"site;removed\nencoder.self.0;1\n", "is the separator ;?"),
        (b"site,removed\n", "empty"),
        (b"just words\n", "empty"),
        (b"just\nwords\n", "no column 'site'"),
        (b"site,removed\nencoder.self.0,1,2\n", "3 cells, but the header has 2"),
        (b"PK\x03\x04\x00\xff", "not UTF-8"),
        (csv(changed(removed="0 x")).encode(), "'encoder.self.0': removed holds 'x', not a whole number"),
        (csv(changed(removed="-1 0")).encode(), "removed holds '-1'"),
        (csv(changed(removed="0")).encode(), "goes from 6 to 4 heads, but lists 1 as removed"),
        (csv(changed(removed="0", heads_after=7)).encode(), "goes from 6 to 7 heads, but lists 1 as removed"),
        (csv(changed(removed="0 0")).encode(), "encoder.self.0.0 is removed 2 times"),
        (csv(changed(removed="0 9")).encode(), "no head 'encoder.self.0.9' in this model"),
        (csv(changed(heads_before=8, heads_after=6)).encode(), "there encoder.self.0 has 8 heads, and here it has 6"),
        (csv(changed(kv_before=6)).encode(), "there encoder.self.0 has 6 kv_heads, and here it has 2"),
        (csv(changed(heads_before="six")).encode(), "heads_before holds 'six'"),
        (csv(ROWS[:2]).encode(), "cut short: it does not have the site encoder.self.2"),
        (csv([*ROWS, ROWS[0]]).encode(), "encoder.self.0 stands twice"),
        (json.dumps({"rows": [ROWS[0], {}]}).encode(), "a site must be a text, not null"),
    ],
)  # fmt: skip
def test_a_broken_plan_file_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(content)
    with pytest.raises((DataError, InvalidPlan)) as caught:
        read_plan(tmp_path / "plan", SITES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@given(content=st.binary(max_size=60), start=st.sampled_from([b"", b"{", b'{"removed":', b"site,removed\n"]))
def test_no_bytes_get_through(content: bytes, start: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "plan"
    path.write_bytes(start + content)
    try:
        plan = read_plan(path, SITES)
    except HeadscopeError as error:
        assert "\n" not in str(error)
    else:
        assert plan.removed == ()


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "absent.json", "No such file"),
        (tmp_path, "No such file"),  # a folder without a manifest
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(DataError, match=message):
            read_plan(path, SITES)
