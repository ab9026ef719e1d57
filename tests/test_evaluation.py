"""Judgements equal loops over single examples on plain models, with the divergence written from its formula."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from task_cases import CASES, Open, Opened, Row, open_case, opener
from task_reference import asked, item_of
from torch import Tensor, nn

from headscope import evaluation
from headscope.capture import gate
from headscope.errors import DataError, UsageError
from headscope.evaluation import Judgement, Run, judge
from headscope.losses import Distribution
from headscope.objective import Objective

BOTH = ("first", "other")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return opener(tmp_path_factory)


def moved(model: nn.Module) -> Any:
    """A copy whose every parameter is a little off, the same way each time."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return other


def run_of(opened: Opened, model: Any) -> Run:
    return Objective(model, opened.study.loaded.task, opened.study.sites).forward


def judged(opened: Opened, *, size: int | None = None, metric: str | None = None) -> list[Judgement]:
    """The case's model, and the moved copy."""
    loaded, examples = opened.study.loaded, opened.study.examples
    assert examples is not None
    runs = [run_of(opened, loaded.model), run_of(opened, moved(loaded.model))]
    batches = examples.batches(size, tokens=512)
    return judge(runs, loaded.task, loaded.task_name, batches, metric=metric)


@dataclass(frozen=True)
class Said:
    """What a plain model says to one row: a distribution, number or direction at each predicted position."""

    loss: float
    rows: list[list[float]]
    targets: list[float]


def said(opened: Opened, model: Any, row: Row) -> Said:
    """By transformers alone: one row, no padding."""
    arguments, task = asked(opened, row), opened.case.task
    with torch.no_grad():
        output = model(**arguments)
    if task == "embedding":
        pooled = output.last_hidden_state[0].mean(dim=0)
        return Said(math.nan, [pooled.tolist()], [])
    loss = float(output.loss)
    if task == "regression":
        return Said(loss, [output.logits[0].tolist()], arguments["labels"].flatten().tolist())
    if task == "question-answering":
        both = torch.stack([output.start_logits[0], output.end_logits[0]])
        return Said(loss, shares(both), [int(arguments["start_positions"]), int(arguments["end_positions"])])
    labels, logits = arguments["labels"], output.logits[0]
    if labels.is_floating_point():
        yes = logits.sigmoid()
        return Said(loss, torch.stack([1 - yes, yes], dim=1).tolist(), labels[0].tolist())
    if labels.dim() == 1:
        return Said(loss, shares(logits[None]), labels.tolist())
    if task == "causal-lm":
        return Said(loss, shares(logits[:-1]), labels[0, 1:].tolist())
    places = [place for place, label in enumerate(labels[0].tolist()) if label != -100]
    return Said(loss, shares(logits[places]), labels[0, places].tolist())


def shares(logits: Tensor) -> list[list[float]]:
    exps = [[math.exp(value) for value in row] for row in logits.tolist()]
    return [[value / sum(row) for value in row] for row in exps]


def apart(task: str, a: list[float], b: list[float]) -> float:
    """The definition's divergence of two predictions, by a loop."""
    if task == "regression":
        variance = 0.5
        return (a[0] - b[0]) ** 2 / (2 * variance)
    if task == "embedding":
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return 1 - dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(p * math.log(p / q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_judgements_are_those_of_a_loop(name: str, opened: Open) -> None:
    case = opened(name)
    plain = {"first": case.model, "other": moved(case.model)}
    numbers = sorted(item.number for item in case.study.examples.items)
    found = dict(zip(BOTH, judged(case), strict=True))
    assert torch.equal(found["first"].divergences, torch.zeros(len(numbers), dtype=torch.float64))
    for row in case.case.rows:
        place = numbers.index(item_of(case, row).number)
        one = {which: said(case, model, row) for which, model in plain.items()}
        gaps = [apart(case.case.task, a, b) for a, b in zip(one["first"].rows, one["other"].rows, strict=True)]
        assert sum(gaps) > 0
        assert float(found["other"].divergences[place]) == pytest.approx(sum(gaps) / len(gaps), rel=1e-9)
        for which in BOTH if case.case.task != "embedding" else ():
            check_row(found[which], one[which], place, number=case.case.task == "regression")


def check_row(found: Judgement, one: Said, place: int, *, number: bool) -> None:
    assert float(found.losses[place]) == pytest.approx(one.loss, rel=1e-9)
    assert found.predictions is not None
    own = found.predictions.example == place
    chosen = [row[0] if number else row.index(max(row)) for row in one.rows]
    assert found.predictions.prediction[own].tolist() == pytest.approx(chosen, rel=1e-9)
    assert found.predictions.target[own].tolist() == pytest.approx(one.targets)
    if not number:
        surprise = [-math.log(row[int(target)]) for row, target in zip(one.rows, one.targets, strict=True)]
        assert found.predictions.loss[own].tolist() == pytest.approx(surprise, rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_batches_and_pieces_change_nothing(name: str, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = judged(opened(name))[1]
    monkeypatch.setattr(evaluation, "CHUNK_VALUES", 1)  # pieces of 16 rows
    for size in (1, 3, 7):
        found = judged(opened(name), size=size)[1]
        assert torch.allclose(found.divergences, wanted.divergences, rtol=1e-9, atol=1e-12)
        assert torch.allclose(found.losses, wanted.losses, rtol=1e-9, atol=1e-12)
        assert found.metric == (wanted.metric if wanted.metric is None else pytest.approx(wanted.metric, rel=1e-9))
        if wanted.predictions is not None and found.predictions is not None:
            assert numpy.array_equal(found.predictions.target, wanted.predictions.target)
            assert numpy.array_equal(found.predictions.example, wanted.predictions.example)


def test_means_and_names(opened: Open) -> None:
    first, other = judged(opened("token-classification"))
    assert first.metric_name == "token-accuracy"
    assert other.loss == pytest.approx(sum(other.losses.tolist()) / 7, rel=1e-12)
    assert other.divergence == pytest.approx(sum(other.divergences.tolist()) / 7, rel=1e-12)
    assert (first.divergence, first.examples) == (0.0, 7)
    assert judged(opened("token-classification"), metric="f1")[0].metric_name == "f1"
    embedded = judged(opened("embedding"))[1]
    assert (embedded.loss, embedded.metric, embedded.metric_name, len(embedded.losses)) == (None, None, "", 0)


def test_gated_runs_of_one_model(opened: Open) -> None:
    """A masked model needs no copy; gates of 1 change nothing, and every run sees each batch in turn."""
    case = opened("causal-llama")
    loaded, sites = case.study.loaded, case.study.sites
    plain, order = run_of(case, loaded.model), []

    def gated(value: float) -> Run:
        gates = {sites[0].id: torch.tensor([value, *[1.0] * (sites[0].n_heads - 1)], dtype=torch.float64)}

        def run(batch: Any) -> Tensor:
            order.append((value, batch.numbers))
            with gate(loaded.model, gates, sites):
                return plain(batch)

        return run

    batches = case.study.examples.batches(3, tokens=512)
    told: list[tuple[int, int]] = []
    runs = [plain, gated(1.0), gated(0.0)]
    found = judge(runs, loaded.task, loaded.task_name, batches, progress=lambda *one: told.append(one))
    assert found[1].divergence == 0.0 and torch.equal(found[1].losses, found[0].losses)
    assert found[2].divergence > 1e-6
    assert order == [(value, batch.numbers) for batch in batches for value in (1.0, 0.0)]
    assert told == [(3, 7), (6, 7), (7, 7)]


def test_no_gradients_are_kept(opened: Open) -> None:
    case = opened("single")
    model = copy.deepcopy(case.study.loaded.model).requires_grad_(True)
    seen = []

    def run(batch: Any) -> Tensor:
        seen.append(run_of(case, model)(batch).requires_grad)
        return run_of(case, model)(batch)

    judge([run], case.study.loaded.task, "", case.study.examples.batches(None, tokens=512))
    assert seen == [False]


def test_chances_of_zero_and_small_differences() -> None:
    """A class that neither model can choose adds nothing, and differences far below float32's rounding are seen."""
    never = torch.tensor([[0.0, -math.inf, 1.0]])
    assert float(evaluation.divergences(never, never + 0.5, Distribution.CATEGORICAL)) == pytest.approx(0, abs=1e-15)
    broken = torch.full_like(never, torch.nan)
    for pair in ((never, broken), (broken, never), (broken, broken)):
        assert bool(evaluation.divergences(*pair, Distribution.CATEGORICAL).isnan().all()), "NaN is no divergence of 0"
    a, small = torch.tensor([[0.5, -0.25, 0.1]], dtype=torch.float64), 1e-6
    b = a + torch.tensor([[small, 0.0, 0.0]], dtype=torch.float64)
    chance = float(a.softmax(dim=1)[0, 0])
    found = float(evaluation.divergences(a, b, Distribution.CATEGORICAL))
    assert found == pytest.approx(small**2 / 2 * chance * (1 - chance), rel=1e-3)
    turned = torch.tensor([[math.cos(small), math.sin(small)]], dtype=torch.float64)
    ahead = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    assert float(evaluation.divergences(ahead, turned, Distribution.DIRECTION)) == pytest.approx(small**2 / 2, rel=1e-6)


def test_what_cannot_be_judged(opened: Open) -> None:
    case = opened("single")
    loaded, batches = case.study.loaded, case.study.examples.batches(None, tokens=512)
    plain = run_of(case, loaded.model)
    with pytest.raises(UsageError, match="predicts 2 numbers at a position, the first 3"):
        judge([plain, lambda batch: plain(batch)[:, :2]], loaded.task, loaded.task_name, batches)
    number = batches[0].numbers[0]

    def broken(batch: Any) -> Tensor:
        rows = plain(batch).clone()
        rows[0] = math.nan
        return rows

    with pytest.raises(DataError, match=f"the loss of example {number} is not finite"):
        judge([plain, broken], loaded.task, loaded.task_name, batches)


def test_halves_after_memory_ran_out(opened: Open) -> None:
    case = opened("single")
    loaded, batches = case.study.loaded, case.study.examples.batches(None, tokens=512)
    plain = run_of(case, loaded.model)

    def narrow(batch: Any) -> Tensor:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("too much")
        return plain(batch)

    whole = judge([plain], loaded.task, loaded.task_name, batches)[0]
    found = judge([plain, narrow], loaded.task, loaded.task_name, batches)
    assert torch.allclose(found[0].losses, whole.losses, rtol=1e-12)
    assert len(found[1].losses) == 7
    assert found[0].notes == ("memory ran out: batches were halved (results do not depend on the batch size)",)


def test_unlabelled_data_gives_only_a_divergence(opened: Open, tmp_path: Path) -> None:
    from dataclasses import replace

    case = CASES["single"]
    bare = open_case(replace(case, rows=[{"text": row["text"]} for row in case.rows]), tmp_path)
    found = judged(bare)[1]
    assert (found.loss, found.metric, found.metric_name) == (None, None, "")
    assert found.divergence == pytest.approx(judged(opened("single"))[1].divergence, rel=1e-12)
