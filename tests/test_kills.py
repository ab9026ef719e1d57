"""The command on the samples, in one process and in several, killed at random and taken up again: the same bytes.

Every process is killed by itself at an event that a seed has chosen: the end of a batch, a unit that is written but not
yet under its name, one that has just got it, or one that is added up.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SAMPLES, TEST_FILES
from rank_cases import Ended, spread
from test_samples import study
from torch import Tensor

from headscope import shares, work
from headscope.cli import _run
from headscope.launching import Standing
from headscope.likeness import Question, compare_heads
from headscope.pairing import Party
from headscope.study import Study

pytestmark = pytest.mark.slow

EXAMPLES = {"llama-gqa-web": 24}
"""Long texts; of the others 32: six and eight units at one example a batch."""
MEASURES = ["importance", "sensitivity", "attention"]
PAIRED = ("attention", "hellinger", "output", "cosine", "qk", "ov")
COMMANDS = {"inspect": ("--measures", ",".join(MEASURES)), "similarity": ("--measures", ",".join(PAIRED))}
OTHERS = {
    "ablation": ("inspect", "--measures", "ablation,only"),
    "evaluate": ("evaluate", "--columns", "loss,metric,divergence"),
}
"""Further commands, on one sample each: passes with gated heads, and two models side by side."""
KILLS = 3
"""Of each sample and command: 24 in all."""
EVENTS = 6
"""A process that is to be killed dies at one of so many first events; each unit that is added up makes one at least."""


@dataclass(frozen=True)
class Death:
    """Which rank is killed, and at which of its events."""

    rank: int
    event: int


def counting(function: Callable[..., Any], event: int, count: itertools.count[int]) -> Callable[..., Any]:
    """The function, in a process that is killed when this event begins."""

    def counted(*given: Any) -> Any:
        if next(count) == event:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given)

    return counted


def command(words: list[str], death: Death | None) -> Callable[[Standing], tuple[int, str]]:
    """The command in a forked process: its exit code, and what it said on stderr."""

    def run(place: Standing) -> tuple[int, str]:
        if death is not None and place.rank == death.rank:
            events = itertools.count(1)
            shares._Told.batch = counting(shares._Told.batch, death.event, events)
            shares._Told.finished = counting(shares._Told.finished, death.event, events)
            work._flush = counting(work._flush, death.event, events)
        sys.argv, sys.stdout, sys.stderr = ["headscope", *words], io.StringIO(), io.StringIO()
        return _run(), sys.stderr.getvalue()

    return run


def ran(size: int, words: list[str], folder: Path, death: Death | None = None) -> list[Ended]:
    return spread(size, command(words, death), folder, patience=60.0)


def words_of(name: str, command_of: str) -> list[str]:
    data = SAMPLES / name / TEST_FILES[name]
    rest = ("--limit", str(EXAMPLES.get(name, 32)), "--batch-size", "1", "--no-progress", "--force")
    return [command_of, str(SAMPLES / name), "--data", str(data), *COMMANDS[command_of], *rest]


def words_of_other(name: str, folder: Path) -> list[str]:
    """The words of one of `OTHERS`, on the digits; a second model is the first without some heads."""
    place = SAMPLES / "vit-digits"
    rest = ("--data", str(place / TEST_FILES["vit-digits"]), "--limit", "32", "--batch-size", "1")
    models = [str(place)]
    if name == "evaluate":
        models.append(str(folder / "pruned"))
        command(["prune", *models[:1], "--heads", "0.1,1.2", "-o", models[1], "--no-progress"], None)(Standing())
    verb, *more = OTHERS[name]
    return [verb, *models, *rest, *more, "--no-progress", "--force"]


def written(size: int, words: list[str], folder: Path) -> bytes:
    """The report of a run that nobody disturbs."""
    target = folder / "report.csv"
    for ended in ran(size, [*words, "-o", str(target)], folder):
        assert ended.given is not None and ended.given[0] == 0, ended
    return target.read_bytes()


@pytest.mark.parametrize("command_of", sorted(COMMANDS))
@pytest.mark.parametrize("name", sorted(TEST_FILES))
def test_b112_two_processes_and_killed_ones_write_the_bytes_of_one(name: str, command_of: str, tmp_path: Path) -> None:
    wanted = killed_and_resumed(words_of(name, command_of), random.Random(f"{name} {command_of}"), tmp_path)
    assert wanted.count(b"\n") > 30


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_b112_gated_passes_and_judgements_outlive_kills(name: str, tmp_path: Path) -> None:
    words = words_of_other(name, tmp_path)
    wanted = killed_and_resumed(words, random.Random(name), tmp_path)
    assert wanted.count(b"\n") == (33 if name == "ablation" else 3)


def killed_and_resumed(words: list[str], chance: random.Random, tmp_path: Path) -> bytes:
    """The report of one process, after two, and processes that were killed and resumed, have written the same."""
    wanted = written(1, words, tmp_path)
    assert written(2, words, tmp_path) == wanted
    kept, target = tmp_path / "work", tmp_path / "killed.csv"
    for size in chance.sample([1, 2, 3], KILLS):
        death = Death(chance.randrange(size), chance.randint(1, EVENTS))
        every = ran(size, [*words, "--work", str(kept), "-o", str(target)], tmp_path, death)
        assert every[death.rank].signal == signal.SIGKILL, "the chosen process was killed"
        teller = next((one for rank, one in enumerate(every) if rank != death.rank), None)
        if teller is not None:
            assert teller.given is not None, "the others end by themselves"
            code, said = teller.given
            assert code == 1 and said.startswith(f"error: rank {death.rank} ") and f"units in {kept}" in said
        assert not target.exists(), "no report is written then"
    done = {path.name: path.stat().st_mtime_ns for path in kept.glob("*.safetensors")}
    assert written(chance.choice([1, 2, 3]), [*words, "--work", str(kept)], tmp_path) == wanted
    assert done.items() <= {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}.items(), "and reads those"
    return wanted


def numbers(found: Study) -> dict[str, Tensor]:
    """All scores of heads and likenesses of pairs, by column."""
    scores = {name: torch.cat(list(one.values())) for name, one in found.scores(MEASURES).values.items()}
    pairs = compare_heads(Party((found,)), Question(PAIRED)).values
    return scores | {f"{name} of pairs": one.values for name, one in pairs.items()}


def apart(found: Tensor, wanted: Tensor, scale: Tensor) -> float:
    """The largest difference, relative to a scale, which is one number for all or one for each."""
    assert torch.equal(found.isnan(), wanted.isnan())
    return float(((found - wanted).nan_to_num().abs() / scale.clamp_min(1e-300)).max())


def scale_of(title: str, wanted: dict[str, Tensor]) -> Tensor:
    """Importance is compared head by head, and so is the mean gradient, whose parts it adds up without their signs; of
    other columns some numbers are next to 0, and all are compared on the scale of the largest.
    """
    if title in ("importance", "gradient_mean"):
        return wanted["importance"]
    return wanted[title].nan_to_num().abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-9)])
@pytest.mark.parametrize("name", sorted(TEST_FILES))
def test_b107_the_batch_size_changes_only_rounding(name: str, dtype: str, tolerance: float) -> None:
    whole = study(name, limit={"llama-gqa-web": 5}.get(name, 62), batch_size=1, dtype=dtype)
    wanted = numbers(whole)
    for size in (4, 61):
        other = Study(whole.loaded, whole.examples, replace(whole.options, batch_size=size))
        for title, values in numbers(other).items():
            gap = apart(values, wanted[title], scale_of(title, wanted))
            assert gap <= tolerance, f"{title} at batch size {size}"
