"""Bad data from end to end: text, labels and columns that do not fit, are cut, or are meant to do harm."""

import json

import pyarrow
import pytest
from bad_inputs import collector, made_room, names, read_json, tiny_models  # noqa: F401
from checkpoints import refused
from pyarrow import parquet

CASES, case = collector()
EVIL = "\x1b]0;t\x07\x1b[2J\r\x08\u202e[/red]</script>=1+1"


@case("B069")
def parquet_that_cannot_be_used(room):
    """Cut short, with lists or structs for a text: one line each."""
    path = room.path / "data.parquet"
    for column, words in (([["a"], ["b"]], "holds a list"), ([{"x": "a"}, {"x": "b"}], "holds a dict")):
        parquet.write_table(pyarrow.table({"text": column, "label": [0, 1]}), path)
        assert refused(room.run("inspect", room.models("classifier"), "--data", path), 1, "column 'text'", words)
    path.write_bytes(path.read_bytes()[:-7])
    assert refused(room.run("inspect", room.models("classifier"), "--data", path), 1, "not a whole Parquet file")


@case("B074")
def more_than_there_are(room):
    ran = room.run(
        "inspect", room.models("classifier"), "--data", room.labelled(6), "--limit", "50", "--measures", "importance"
    )
    assert ran.code == 0
    assert "6 examples" in ran.err and "note: --limit 50 is more than there are: all 6 examples are used" in ran.err
    for value in ("0", "-1", "9" * 5000, "all of them"):
        ran = room.run("inspect", room.models("classifier"), "--data", room.labelled(6), "--limit", value)
        assert refused(ran, 2, "--limit", "expected a positive whole number or 'all'")


@case("B075")
def one_class_only(room):
    """Duplicates of one class are judged, with a warning that this tells nothing."""
    data = room.data(*[{"text": "w1 w2", "label": 0}] * 6)
    for more in ([], ["--metric", "accuracy"]):
        ran = room.run("evaluate", room.models("classifier"), "--data", data, *more)
        assert ran.code == 0 and "note: all labels are of one class: " in ran.err
    mixed = room.run("evaluate", room.models("classifier"), "--data", room.labelled())
    assert mixed.code == 0 and "one class" not in mixed.err


@case("B080")
def longer_than_rotary_positions(room):
    """Rotary positions would go on without a word: texts are cut at the model's limit, or into chunks, and counted."""
    data = room.data({"text": " ".join(["w1", "w2"] * 20)}, {"text": "w3 w4"})
    words = ["inspect", room.models("writer"), "--data", data, "--measures", "importance"]
    cut = room.run(*words, "--on-long", "truncate")
    assert cut.code == 0 and "note: 1 of 2 examples were longer than 16 tokens and cut" in cut.err
    assert refused(room.run(*words, "--on-long", "error"), 1, "more than the limit of 16")
    chunks = room.run(*words)
    assert chunks.code == 0 and "4 examples" in chunks.err


@case("B084")
def nothing_labelled(room):
    data = room.data(*({"text": f"w{number}", "label": -100} for number in range(3)))
    ran = room.run("inspect", room.models("classifier"), "--data", data)
    assert refused(ran, 1, "no labelled token in")


@case("B086")
def labels_of_another_task(room):
    """Numbers for classes, and classes for a model with one output that does not say that it predicts numbers."""
    number = room.models("number")
    for label in (0.5, 1e300, -0.5):
        data = room.data({"text": "w1", "label": label})
        assert refused(room.run("inspect", room.models("classifier"), "--data", data), 1, "--task regression")
    classes = room.data(*({"text": f"w{place}", "label": place % 2} for place in range(4)))
    assert refused(room.run("inspect", number, "--data", classes), 1, "whole numbers", "--task regression")
    assert refused(room.run("inspect", number, "--data", classes, "--task", "text-classification"), 1, "one number")
    assert room.run("inspect", number, "--data", classes, "--task", "regression", "--measures", "importance").code == 0
    reals = room.data(*({"text": f"w{place}", "label": place / 3} for place in range(4)))
    assert room.run("inspect", number, "--data", reals, "--measures", "importance").code == 0


@case("B087")
def text_that_a_terminal_would_obey(room):
    """As label, column, file name, token and option: it reaches neither stream as it is, in no format."""
    model = room.models("classifier")
    bad_label = room.data({"text": "w1", "label": EVIL}, name="label.jsonl")
    bad_column = room.data({EVIL: "w1", "label": 0, "b": 1}, name="column.jsonl")
    bad_name = room.data({"text": "w1", "label": 7}, name="x\x1b[2J\n=1+1.jsonl")
    good = room.labelled()
    for words in (
        ["inspect", model, "--data", bad_label],
        ["inspect", model, "--data", bad_column],
        ["inspect", model, "--data", bad_name],
        ["inspect", model, "--data", good, "--label-column", EVIL],
        ["inspect", EVIL],
        ["inspect", model, EVIL],
        ["inspect", model, f"--{EVIL}", "x"],
        [EVIL],
        *(
            ["inspect", model, f"--{option}", EVIL]
            for option in ("format", "task", "by", "batch-size", "head", "columns")
        ),
    ):
        ran = room.run(*words)
        assert ran.code in (1, 2) and len(ran.err.splitlines()) <= 2, words
        assert not set(ran.err + ran.out) & set("\x1b\x07\r\x08\u202e"), words
    for name in ("table", "csv", "tsv", "json", "jsonl", "markdown", "html"):
        ran = room.run("inspect", model, "--text", EVIL, "--head", "0.0", "--format", name)
        assert ran.code == 0 and not set(ran.err + ran.out) & set("\x1b\x07\r\x08\u202e"), name


@case("B124")
def numbers_that_json_cannot_say(room):
    """Cells that are no number are null in JSON, and the report says of each such column why."""
    ran = room.run(
        "inspect", room.models("classifier"), "--data", room.labelled(1), "--measures", "importance", "--format", "json"
    )
    assert ran.code == 0
    (room.path / "x.json").write_text(ran.out)
    report = read_json(room.path / "x.json")
    assert all(row["importance_se"] is None for row in report["rows"])
    assert report["empty"] == {"importance_se": "not measured, or not defined there"}
    assert json.loads(ran.out) == report


@pytest.mark.parametrize("kind", names(CASES))
def test_bad_input(kind, room):
    CASES[kind](room)
