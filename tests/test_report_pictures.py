"""Every command that has a picture draws it to a file and into its page, and says what its numbers rest on."""

import json

import pytest
from checkpoints import command, refused
from conftest import SAMPLES

DIGITS = SAMPLES / "vit-digits"
FEW = ("--data", DIGITS / "dev.csv", "--limit", "8")
COMMANDS = {
    "inspect": ("inspect", DIGITS, *FEW, "--measures", "importance,attention"),
    "by layer": ("inspect", DIGITS, "--by", "layer"),
    "weights": ("inspect", DIGITS),
    "similarity": ("similarity", DIGITS, *FEW, "--measures", "output"),
    "evaluate": ("evaluate", DIGITS, DIGITS, *FEW),
}


@pytest.fixture
def run(monkeypatch, capsysbinary):
    return command(monkeypatch, capsysbinary)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_draws_to_a_file_and_into_its_page(run, name, tmp_path):
    ran = run(*COMMANDS[name], "--plot", tmp_path / "a.png", "--format", "html", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ran.out.count("<svg") == 1 and "://" not in ran.out
    assert "<dt>dtype</dt><dd>" in ran.out or name == "by layer", "read from the files' headers alone"
    assert f"<dt>model</dt><dd>{DIGITS}" in ran.out


def test_a_pruning_draws_what_went_and_says_what_it_rests_on(run, tmp_path, in_process):
    words = ("prune", DIGITS, "--heads", "0:1,2;3:0", "-o", tmp_path / "less", "--plot", tmp_path / "a.svg")
    assert run(*words, "--dry-run").code == 0 and {path.name for path in tmp_path.iterdir()} <= {"modules"}
    ran = run(*words, "--format", "json", "-q")
    assert (ran.code, ran.err) == (0, "")
    text = (tmp_path / "a.svg").read_text()
    assert "<!-- vit-digits: 3 of 32 heads removed as named -->" in text
    assert [text.count(f"<!-- {kept} of 8 -->") for kept in (8, 7, 6)] == [2, 1, 1]
    origin = json.loads(ran.out)["provenance"]
    assert origin["model"] == str(DIGITS) and len(origin["weights_digest"]) == 64
    assert {"seed", "device", "dtype", "attention", "skipped", "truncated", "versions"} <= set(origin)
    assert refused(run(*words[:-3], tmp_path / "other", *words[-2:]), 2, "a.svg exists already")


def test_a_matrix_that_is_not_whole_is_not_put_into_the_page(run):
    ran = run(*COMMANDS["similarity"], "--top", "3", "--format", "html", "-q")
    assert ran.code == 0 and "<svg" not in ran.out


def test_a_structure_has_a_page_without_a_picture(run):
    ran = run("inspect", DIGITS, "--structure", "--format", "html", "-q")
    assert ran.code == 0 and "<svg" not in ran.out and "<dt>weights digest</dt><dd>" in ran.out


def test_examples_that_were_cut_are_counted(run):
    words = ("inspect", SAMPLES / "sentiment-minilm", "--data", SAMPLES / "sentiment-minilm" / "dev.jsonl")
    ran = run(*words, "--limit", "8", "--max-length", "12", "--measures", "sensitivity", "--format", "json")
    count = json.loads(ran.out)["provenance"]["truncated"]
    assert count > 0 and f"{count} of 8 examples were longer than 12 tokens and cut" in ran.err


def test_scores_that_no_picture_knows_are_refused_before_the_model_is_opened(run, monkeypatch, tmp_path):
    monkeypatch.setattr("headscope.study.load", None)
    monkeypatch.setattr("headscope.head_pictures.DRAWN", ())
    words = ("inspect", "m", "--data", "d.csv", "--measures", "importance", "--plot", tmp_path / "a.png")
    assert refused(run(*words), 2, "--plot has nothing to draw of these measures", "--measures importance")
