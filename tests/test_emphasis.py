"""Tokens weigh by what a random error there does to the prediction; runs that go on where they stopped say the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import slow_if
from pruning_cases import plan_of
from repair_cases import one_of_each, opened
from task_cases import Opened
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from headscope.emphasis import EVEN, Emphasis
from headscope.examples import collate
from headscope.heads import HeadId, SiteId
from headscope.objective import Objective
from headscope.original import Original
from headscope.output_moments import drawn
from headscope.repair import fit
from headscope.study import Study

ROWS = 24
NAMES = ["single", "causal-llama", "seq2seq-t5", "image-classification", "masked-albert"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, Opened] = {}

    def find(name: str) -> Opened:
        if name not in known:
            known[name] = opened(name, tmp_path_factory.mktemp(name), ROWS)
        return known[name]

    return find


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, and not as many as make a good estimate of so few rows."""
    monkeypatch.setattr("headscope.output_moments.MOST_DRAWS", 3)


def with_batches(study: Study, size: int) -> Study:
    other = Study(study.loaded, study.examples, replace(study.options, batch_size=size))
    other.__dict__["discovery"] = study.discovery
    return other


def harm(case: Opened, site: SiteId, number: int, token: int, errors: Tensor) -> float:
    """The mean divergence when `errors` `[draw channel]` are added to what enters a projection at one token."""
    study = case.study
    assert study.examples is not None
    items = [item for item in study.examples.items if item.number == number]
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    path = next(one.output for one in study.sites if one.id == site)

    def disturbed(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = args[0].clone()
        changed[:, token] += errors
        return (changed, *args[1:])

    with torch.no_grad():
        plain = objective.forward(collate(items, study.examples.pads)).double().log_softmax(dim=1)
        handle = study.loaded.model.get_submodule(path).register_forward_pre_hook(disturbed)
        other = objective.forward(collate(items * len(errors), study.examples.pads)).double().log_softmax(dim=1)
        handle.remove()
    gaps = plain - other.view(len(errors), *plain.shape)
    return float((plain.exp() * gaps).sum(dim=2).mean())


@pytest.mark.parametrize("name", slow_if(["single", "causal-llama"], ["causal-llama"]))
def test_weights_follow_the_harm_that_small_random_errors_do(cases: Any, name: str, monkeypatch: Any) -> None:
    """With very many draws the part beyond the even share is the expected divergence itself, up to one factor."""
    monkeypatch.setattr("headscope.output_moments.MOST_DRAWS", 200)
    monkeypatch.setattr("headscope.output_moments.ENOUGH_DRAWN", 10**9)
    case = cases(name)
    assert case.study.examples is not None
    few = case.study.on(replace(case.study.examples, items=case.study.examples.items[:3]))
    found, site = Emphasis.of(few), case.study.sites[0]
    errors = 1e-4 * torch.randn(300, len(site.channels), generator=torch.Generator().manual_seed(0)).double()
    expected, got = [], []
    for item in few.examples.items if few.examples else ():
        weights = found.at(site.id, [item.number], [item.length])
        for token in (0, item.length - 2):
            expected.append(harm(case, site.id, item.number, token, errors))
            got.append(float(weights[token]) - EVEN)
    ratios = torch.tensor(got) / torch.tensor(expected)
    assert max(expected) > 1.5 * min(expected), "nothing to tell apart"
    assert float(ratios.std() / ratios.mean()) < 0.25


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("name", NAMES)
def test_weights_have_mean_one_and_do_not_depend_on_batches(cases: Any, name: str) -> None:
    study = cases(name).study
    assert study.examples is not None and all(wanted.smooth for wanted in drawn(study))
    found, again = Emphasis.of(with_batches(study, 7)), Emphasis.of(with_batches(study, 1))
    for site in study.sites:
        rows = found._weights[site.id]
        assert set(rows) == {item.number for item in study.examples.items}
        assert float(torch.cat(list(rows.values())).mean()) == pytest.approx(1.0, rel=1e-9)
        assert min(float(row.min()) for row in rows.values()) >= EVEN
        assert any(float(row.std()) > 1e-3 for row in rows.values() if len(row) > 1)
        for number, row in rows.items():
            assert_close(row, again._weights[site.id][number], rtol=1e-6, atol=1e-9)


def test_tokens_that_were_not_there_have_the_even_share() -> None:
    site = HeadId.parse("encoder.self.0.0").site
    found = Emphasis({site: {3: torch.tensor([2.0, 0.5]).double()}})
    assert found.at(site, [3, 3, 4], [3, 1, 2]).tolist() == [2.0, 0.5, EVEN, 2.0, 1.0, 1.0]


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    "name",
    slow_if(
        ["single", "causal-llama", "causal-gpt2", "image-classification", "seq2seq-t5", "seq2seq-bart"],
        ["seq2seq-t5", "seq2seq-bart"],
    ),
)
def test_runs_that_go_on_where_they_stopped_fit_the_same_weights(cases: Any, name: str) -> None:
    case = cases(name)
    study, sites = case.study, case.study.sites
    plan = plan_of(sites, sorted(HeadId(site.id, number) for site in sites for number in site.groups[1]))
    work: list[int] = []
    repairs = []
    for room in (2**31, 0):
        with FlopCounterMode(display=False) as counter:
            repairs.append(fit(study, plan, ridges=(0.1,), original=Original(study, room=room)))
        work.append(counter.get_total_flops())
    first, second = repairs
    assert first is not None and second is not None
    assert first.divergence_after == second.divergence_after
    for one, other in zip(first.sites, second.sites, strict=True):
        assert torch.equal(one.columns, other.columns)
    assert work[0] < 0.95 * work[1]


def test_nothing_is_left_behind(cases: Any) -> None:
    study = cases("single").study
    fit(study, one_of_each(study.sites), ridges=(0.1,))
    for module in study.loaded.model.modules():
        assert "forward" not in module.__dict__ and not module._forward_hooks and not module._forward_pre_hooks
