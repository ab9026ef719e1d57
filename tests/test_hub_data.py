import json
from io import BytesIO

import datasets
import pytest
from huggingface_hub import constants

from headscope.errors import DataError, UsageError
from headscope.hub_data import could_be_id, hub_rows
from headscope.sources import read


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub whose answer to every name is one set of JSON lines with two splits, and the calls it got."""
    files = {}
    for split, texts in (("train", "abc"), ("validation", "de")):
        path = tmp_path / f"{split}.jsonl"
        path.write_text("".join(json.dumps({"text": text, "label": 1}) + "\n" for text in texts))
        files[split] = str(path)
    load, calls = datasets.load_dataset_builder, []

    def answer(name, config):
        calls.append((name, config))
        return load("json", data_files=files, cache_dir=str(tmp_path / "cache"))

    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(datasets, "load_dataset_builder", answer)
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.fixture
def broken_hub(monkeypatch, tmp_path):
    """Makes the Hub answer with an error."""

    def break_it(error):
        def answer(*_):
            raise error

        monkeypatch.setattr(datasets, "load_dataset_builder", answer)

    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    return break_it


def test_a_named_split(hub):
    rows = read("owner/name", split="train", config="en")
    assert [row["text"] for row in rows.rows] == ["a", "b", "c"]
    assert (rows.columns, rows.numbers, rows.name, rows.notes) == (["text", "label"], [1, 2, 3], "owner/name", [])
    assert hub == [("owner/name", "en")]
    assert len(read("owner/name", split="train[:1]+validation").rows) == 3


def test_held_out_rows_are_taken_when_no_split_is_named(hub):
    rows = read("name")
    assert [row["text"] for row in rows.rows] == ["d", "e"]
    assert rows.notes == ["split 'validation' is used, of train, validation; --split takes another"]


def test_the_digest_tells_splits_and_names_apart(hub):
    digests = [read("a").digest, read("a").digest, read("b").digest, read("a", split="train").digest]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_an_unknown_split_lists_the_splits(hub):
    with pytest.raises(UsageError, match="name has no --split 'vaildation'") as caught:
        read("name", split="vaildation")
    assert caught.value.hint == "did you mean 'validation'? known: train, validation"
    with pytest.raises(UsageError, match=r"--split 'train\[:x\]' cannot be read"):
        read("name", split="train[:x]")


def test_an_existing_folder_or_file_is_not_asked_of_the_hub(hub, tmp_path):
    (tmp_path / "glue").mkdir()
    with pytest.raises(DataError, match="no examples in glue"):
        read("glue")
    assert hub == []


def test_names_of_readers_are_refused(hub):
    for name in ("csv", "text", "imagefolder"):
        with pytest.raises(DataError, match=f"no file or folder '{name}', and no Hub data set can have that name"):
            read(name)
    assert hub == []


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (
            datasets.exceptions.DatasetNotFoundError("x"),
            "no file, folder or Hub data set 'trian'",
            "did you mean train",
        ),
        (datasets.exceptions.DatasetNotFoundError("a gated one"), "cannot be read: a gated one", "did you mean train"),
        (ConnectionError("x"), "'trian', and the Hub cannot be reached", "did you mean train"),
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "scripts are not run", "parquet"),
        (ValueError("two\nlines"), "Hub data set trian cannot be read: two$", "did you mean train"),
        (datasets.exceptions.DatasetGenerationError("\x1b"), r"cannot be read: \\x1b$", "did you mean train"),
    ],
)
def test_failures_of_the_hub(broken_hub, tmp_path, error, message, hint):
    (tmp_path / "train").mkdir()
    broken_hub(error)
    with pytest.raises(DataError, match=message) as caught:
        read("trian")
    assert hint in caught.value.hint


def test_configs_are_listed(broken_hub):
    broken_hub(ValueError("BuilderConfig 'ed' not found. Available: ['de', 'en']"))
    with pytest.raises(UsageError, match="name has no --config 'ed'") as caught:
        read("name", config="ed")
    assert "known: de, en" in caught.value.hint
    broken_hub(
        ValueError("Config name is missing.\nPlease pick one among the available configs: ['de', 'en']\nExample")
    )
    with pytest.raises(UsageError, match="name needs a --config") as caught:
        read("name")
    assert caught.value.hint == "known: de, en"


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_nothing_is_fetched_when_offline(hub, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # imported before the variable was set
    with pytest.raises(DataError, match=f"'owner/name', and no Hub data .*: offline, as {variable} is set$"):
        read("owner/name")
    assert hub == []


def test_offline_and_not_in_the_cache(broken_hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    broken_hub(ConnectionError("Couldn't reach"))
    with pytest.raises(DataError, match="offline, as HF_HUB_OFFLINE is set"):
        hub_rows("name", config=None, split=None, hint=None)


@pytest.mark.parametrize(("data", "expected"), [("imdb", True), ("a-b/c.d_e", True), ("a/b/c", False), (".a", False)])
def test_what_could_be_an_id(data, expected):
    assert could_be_id(data) is expected


def test_config_and_split_are_for_the_hub(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match="--split 'test' is for Hub data sets"):
        read(str(tmp_path / "a.txt"), split="test")
    with pytest.raises(UsageError, match="--config 'en' is for Hub data sets, and stdin is none"):
        read("-", config="en", stdin=BytesIO(b"x"))
    with pytest.raises(UsageError, match="--data is empty"):
        read("")
