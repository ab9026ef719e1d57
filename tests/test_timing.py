"""Times are medians of runs that take turns, and the predicted ratio is that of the matrix products."""

from __future__ import annotations

import itertools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from task_cases import CASES, Opened, open_case, recipe
from torch import nn
from zoo_configs import RECIPES

from headscope import timing
from headscope.cost import site_macs
from headscope.discovery import find_sites
from headscope.matrices import site_shape
from headscope.timing import FEWEST, MOST, Timing, made_up, matrix_macs, take_turns, time_models

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still but for what is added to it."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    return spend


def test_candidates_take_turns_and_the_first_rounds_do_not_count(clock: Callable[[float], None]) -> None:
    order: list[str] = []
    first, second = itertools.chain([9.0, 1.0], itertools.repeat(0.5)), itertools.count(1)

    def a() -> None:
        order.append("a")
        clock(next(first))

    def b() -> None:
        order.append("b")
        clock(next(second))

    found = take_turns([a, b], CPU, seconds=21.0)  # the second warm-up round takes 1 + 2: seven rounds fit
    assert order == ["a", "b"] * (2 + 7)
    assert found[0] == pytest.approx((0.5,) * 7)
    assert found[1] == pytest.approx(tuple(range(3, 10)))


@pytest.mark.parametrize(("spent", "rounds"), [(100.0, FEWEST), (1e-6, MOST), (0.0, MOST)])
def test_rounds_stay_within_bounds(clock: Callable[[float], None], spent: float, rounds: int) -> None:
    (found,) = take_turns([lambda: clock(spent)], CPU)
    assert len(found) == rounds


def test_median_quartiles_and_throughput() -> None:
    found = Timing(8, (0.5, 0.1, 0.2, 0.4, 0.3))
    assert found.latency == pytest.approx(0.3)
    assert found.spread == pytest.approx(0.4 - 0.2)
    assert found.throughput == pytest.approx(8 / 0.3)


def expected_macs(model: Any, tokens: int) -> int:
    """The cost page's formula for attention, and weights times tokens for every other linear map that runs."""
    sites = find_sites(model).sites
    total = sum(site_macs(site_shape(model, site), tokens) * tokens for site in sites)
    inside = {piece.module for site in sites for piece in site.slices} | {site.output for site in sites}
    once = ("pooler", "classifier")  # these see one position of a text
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path not in inside:
            total += module.weight.numel() * (1 if any(name in path for name in once) else tokens)
    return total


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_matrix_products_are_those_of_the_formula(name: str) -> None:
    """`llama` groups its keys and has a language-model head, `t5` has cross attention."""
    chosen = recipe("bert", "BertForSequenceClassification") if name == "bert" else RECIPES[name]
    model = zoo.build(chosen).requires_grad_(False)
    ids = torch.arange(5, 16)[None]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})
    before = model.config._attn_implementation
    for _ in range(2):
        assert matrix_macs(model, inputs) == expected_macs(model, 11)
    assert model.config._attn_implementation == before == "sdpa"


def test_the_attention_is_put_back_after_an_error() -> None:
    model = zoo.build(RECIPES["llama"]).requires_grad_(False)
    with pytest.raises(TypeError):
        matrix_macs(model, {"input_ids": "no tokens"})
    assert model.config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    return lambda name: open_case(CASES[name], tmp_path_factory.mktemp(name))


def inputs_of(opened: Opened, *, size: int, tokens: int) -> dict[str, Any]:
    study = opened.study
    assert study.examples is not None
    return made_up(study.loaded.model, study.loaded.task, study.examples, size=size, tokens=tokens)


def test_texts_of_any_length_are_made_of_a_real_one(opened: Callable[[str], Opened]) -> None:
    case = opened("pair")
    longest = max(case.study.examples.items, key=lambda item: item.length)
    inputs = inputs_of(case, size=3, tokens=30)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), (3, 30)
    )
    ids = longest.inputs["input_ids"]
    assert inputs["input_ids"][2].tolist() == [*(ids * 3)[:29], ids[-1]]
    assert inputs_of(case, size=1, tokens=4)["input_ids"].tolist() == [[*ids[:3], ids[-1]]]


def test_source_and_target_are_as_long_and_caches_are_off(opened: Callable[[str], Opened]) -> None:
    inputs = inputs_of(opened("seq2seq-t5"), size=2, tokens=20)
    assert inputs["input_ids"].shape == inputs["decoder_input_ids"].shape == (2, 20)
    assert inputs["use_cache"] is False
    assert inputs_of(opened("image-classification"), size=2, tokens=20)["pixel_values"].shape == (2, 3, 12, 12)


def test_models_are_timed_on_batches_of_the_size_asked_for(
    opened: Callable[[str], Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = opened("single")
    model, task, examples = case.study.loaded.model, case.study.loaded.task, case.study.examples
    monkeypatch.setattr(timing, "MOST", 6)
    found = time_models([model, model], task, examples, size=2, tokens=9)
    assert found is not None
    assert [(one.batch_size, len(one.seconds)) for one in found] == [(2, 6), (2, 6)]
    assert all(second > 0 for one in found for second in one.seconds)

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("too much")

    handle = model.register_forward_pre_hook(full)
    assert time_models([model], task, examples, size=2, tokens=9) is None
    handle.remove()


def test_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a small model: what it says of BERT-base is for a quiet machine."""
    script = Path(__file__).parent / "benchmarks" / "speed.py"
    words = ["--layers", "1", "--tokens", "16", "--batches", "1,2", "--seconds", "0.1"]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["1", "2"]
    assert "predicted" in lines[-3]
