"""Names of models: odd folder names work or are refused with a reason, Hub ids are told from paths."""

import os
import shutil

import pytest
from checkpoints import bert, command, refused


@pytest.fixture
def run(monkeypatch, capsysbinary):
    return command(monkeypatch, capsysbinary)


@pytest.mark.parametrize("name", ["with space", "quo'te\"s", "new\nline", "esc\x1b[31m", "-lead", "=1+1", "ünï"])
def test_odd_folder_names(run, tmp_path, name):
    bert(tmp_path / name)
    ran = run("inspect", tmp_path / name, "--by", "model")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert len(ran.out.splitlines()) == 2
    missing = run("inspect", f"{tmp_path / name}x")
    assert refused(missing, 1, "no such model", "did you mean")
    assert "\x1b" not in missing.err


def test_folders_given_by_relative_name(run, tmp_path, monkeypatch):
    bert(tmp_path / "-lead")
    shutil.copytree(tmp_path / "-lead", tmp_path / "=1+1")
    monkeypatch.chdir(tmp_path)
    assert refused(run("inspect", "-lead"), 2, "./-lead")
    assert run("inspect", "--by", "layer", "--", "-lead").code == 0
    assert run("inspect", "./-lead", "--by", "layer").code == 0
    formula = run("inspect", "=1+1", "--by", "model")
    assert formula.out.splitlines()[1].startswith('"""=1+1""",BertFor')


def test_folders_that_cannot_be_opened(run, tmp_path):
    raw = bert(tmp_path / os.fsdecode(b"raw\xff"))
    assert refused(run("inspect", raw), 2, "not UTF-8", "raw\\udcff")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refused(run("inspect", tmp_path / "loop"), 1, "a link that leads nowhere")
    assert refused(run("inspect", bert(tmp_path / "m") / "config.json"), 1, "is a file")
    (tmp_path / "empty").mkdir()
    assert refused(run("inspect", tmp_path / "empty"), 1, "a model folder needs config.json")


@pytest.mark.parametrize("name", ["a/b/c", "white space", "", " ", "=x", "a//b", "owner/na\nme"])
def test_names_that_are_no_model(run, name):
    assert refused(run("inspect", name), 2, "form owner/name")


def test_hub_ids_without_the_hub(run):
    for name in ("no-such-owner/no-such-model", "no-such-model"):
        assert refused(run("inspect", name, "--revision", "v9"), 1, f"{name} is no folder here", "go online")
