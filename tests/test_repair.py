"""Repair equals least squares on stored activations, is put back bit for bit, and never made where it does not help."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import slow_if
from pruning_cases import difference, gates, plan_of
from repair_cases import Plainly, one_of_each, opened
from task_cases import Opened
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from headscope import mending
from headscope import repair as repairing
from headscope.capture import gate
from headscope.discovery import find_sites
from headscope.examples import collate
from headscope.heads import HeadId
from headscope.least_squares import Fit, Moments, best
from headscope.mending import Mender
from headscope.objective import Objective
from headscope.original import Original
from headscope.output_weights import head_columns
from headscope.plan import Plan
from headscope.repair import Fitting, Repair, applied, fit, refitted, write
from headscope.study import Study, StudyOptions
from headscope.surgery import prune, silence_heads

NAMES = ["single", "causal-llama", "causal-gpt2", "seq2seq-t5", "image-classification", "masked-albert"]
NAMED = slow_if([*NAMES, "seq2seq-bart"], ["seq2seq-bart"])
"""With and without bias, groups, Conv1D, cross attention, images, one module for all layers."""
RIDGE = 0.1


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, tuple[Opened, Plan, Repair]] = {}

    def find(name: str) -> tuple[Opened, Plan, Repair]:
        if name not in known:
            case = opened(name, tmp_path_factory.mktemp(name))
            plan = one_of_each(case.study.sites)
            found = fit(case.study, plan, ridges=(RIDGE,), original=Original(case.study, streams=False))
            assert found is not None, f"{name}: no repair was found that helps"
            known[name] = case, plan, found
        return known[name]

    return find


def answers(case: Opened, model: PreTrainedModel | None = None) -> list[Tensor]:
    """What the study's model, or another, predicts on its first examples."""
    study = case.study
    assert study.examples is not None
    objective = Objective(model or study.loaded.model, study.loaded.task, study.sites if model is None else ())
    with torch.no_grad():
        return [objective.forward(collate(study.examples.items[:5], study.examples.pads))]


def weights(model: torch.nn.Module) -> dict[str, tuple[int, Tensor]]:
    return {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict(keep_vars=False).items()}


@pytest.mark.parametrize("name", NAMED)
def test_a_repair_is_least_squares_on_stored_activations(cases: Any, name: str) -> None:
    case, plan, found = cases(name)
    plainly = Plainly(case, plan)
    for number, one in enumerate(found.sites):
        columns, bias = plainly.columns(found, number, RIDGE)
        assert_close(one.columns, columns, rtol=1e-8, atol=1e-8)
        assert (one.bias is None) == (bias is None)
        if bias is not None:
            assert_close(one.bias, bias, rtol=1e-8, atol=1e-8)
        assert one.error_after < one.error_before
    assert found.divergence_after < found.divergence_before
    assert {one.site.kind for one in found.sites} >= {site.id.kind for site in case.study.sites[1:]}


STREAMS = {
    "single": ("dense", "LayerNorm"),
    "causal-llama": ("self_attn.o_proj", "post_attention_layernorm"),
    "causal-gpt2": ("attn.c_proj", "ln_2"),
}
"""What reads the sum of an attention's output and the stream, by the paths of both modules."""


@pytest.mark.parametrize("name", STREAMS)
def test_a_repair_makes_up_for_what_the_stream_lost_before(cases: Any, name: str) -> None:
    """Norms before or behind the sum: with all sums stored, the fit is the same."""
    case, _, _ = cases(name)
    sites = case.study.sites
    plan = plan_of(sites, sorted(HeadId(site.id, number) for site in sites for number in site.groups[1]))
    found = fit(case.study, plan, ridges=(RIDGE,))
    assert found is not None and len(found.sites) > 1
    plainly = Plainly(case, plan, STREAMS[name])
    for number, one in enumerate(found.sites):
        columns, bias = plainly.columns(found, number, RIDGE)
        assert_close(one.columns, columns, rtol=1e-8, atol=1e-8)
        assert (one.bias is None) == (bias is None)
        if one.bias is not None:
            assert_close(one.bias, bias, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["single", pytest.param("seq2seq-bart", marks=pytest.mark.slow)])
def test_padding_is_no_token(cases: Any, name: str) -> None:
    """Batches of one hold no padding, and the others do."""
    case, plan, found = cases(name)
    study = case.study
    single = type(study)(study.loaded, study.examples, replace(study.options, batch_size=1))
    single.__dict__["discovery"] = study.discovery
    again = fit(single, plan, ridges=(RIDGE,), original=Original(single, streams=False))
    assert again is not None and len(again.sites) == len(found.sites)
    for one, other in zip(found.sites, again.sites, strict=True):
        assert_close(one.columns, other.columns, rtol=1e-8, atol=1e-9)
        assert one.error_after == pytest.approx(other.error_after, rel=1e-8)


@pytest.mark.parametrize("name", ["single", "causal-gpt2", "masked-albert"])
def test_applied_is_put_back_bit_for_bit(cases: Any, name: str) -> None:
    case, _, found = cases(name)
    model, sites = case.study.loaded.model, case.study.sites
    before, plain = weights(model), answers(case)
    with pytest.raises(KeyboardInterrupt), applied(model, sites, found):
        assert not torch.equal(answers(case)[0], plain[0]), "the repair did nothing"
        raise KeyboardInterrupt
    after = weights(model)
    assert all(
        after[name][0] == pointer and torch.equal(after[name][1], value) for name, (pointer, value) in before.items()
    )
    assert torch.equal(answers(case)[0], plain[0])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("masked", [False, True])
def test_written_into_the_smaller_model_it_says_what_the_masked_one_says(cases: Any, name: str, masked: bool) -> None:
    case, plan, found = cases(name)
    model, sites = case.study.loaded.model, case.study.sites
    with gate(model, gates(sites, plan), sites), applied(model, sites, found):
        expected = answers(case)
    with gate(model, gates(sites, plan), sites):
        unrepaired = answers(case)
    less = copy.deepcopy(model)
    (silence_heads if masked else prune)(less, sites, plan)
    write(less, sites if masked else find_sites(less).sites, found)
    got = answers(case, less)
    assert difference(expected, got) <= 1e-9
    assert difference(unrepaired, got) > 1e-6


@pytest.mark.parametrize("name", ["single", "causal-llama", "causal-gpt2"])
def test_heads_that_an_earlier_masking_silenced_stay_silent(cases: Any, name: str) -> None:
    case, plan, found = cases(name)
    study = Study(
        replace(case.study.loaded, model=copy.deepcopy(case.study.loaded.model)), case.study.examples, StudyOptions()
    )
    model, sites = study.loaded.model, study.sites
    before = plan_of(sites, [HeadId(site.id, site.groups[0][0]) for site in sites])
    silence_heads(model, sites, before)
    repair = fit(study, plan, ridges=(RIDGE,))
    assert repair is not None and len(repair.sites) == len(found.sites)
    for one in repair.sites:
        assert {head.index for head in one.heads} == set(plan.kept(one.site)) - before.removed_from(one.site)
    write(model, sites, repair)
    assert not any(head_columns(model, site, [0]).any() for site in sites)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_those_that_the_stored_format_holds(cases: Any, dtype: torch.dtype) -> None:
    case, plan, _ = cases("causal-llama")
    original = Original(case.study, streams=False)
    found = fit(case.study, plan, ridges=(RIDGE,), dtype=dtype, original=original)
    assert found is not None
    small = copy.deepcopy(case.study.loaded.model).to(dtype)
    prune(small, case.study.sites, plan)
    sites = find_sites(small).sites
    write(small, sites, found)
    for one in found.sites:
        assert torch.equal(one.columns, one.columns.to(dtype).double())
        weight = small.get_submodule(next(site.output for site in sites if site.id == one.site)).weight
        assert weight.dtype == dtype
        assert torch.equal(weight.double().T.reshape(one.columns.shape), one.columns)


def test_no_repair_that_does_not_lower_the_divergence(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits that look good and are not: the divergence on held-out examples decides."""
    case, plan, _ = cases("single")
    before = weights(case.study.loaded.model)

    def harmful(fitting: Moments, held: Moments, ridges: Any, start: Tensor, *, dtype: torch.dtype) -> Fit:
        return Fit(3 * torch.randn(start.shape, generator=torch.Generator().manual_seed(0)).double(), 1.0, 1.0, 0.0)

    monkeypatch.setattr(repairing, "best", harmful)
    assert fit(case.study, plan) is None
    after = weights(case.study.loaded.model)
    assert all(
        after[name][0] == pointer and torch.equal(after[name][1], value) for name, (pointer, value) in before.items()
    )


def moments(seed: int, tokens: int, truth: Tensor, noise: float, *, constant: bool = False) -> Moments:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, len(truth) - constant, generator=generator, dtype=torch.float64)
    full = torch.cat([x, torch.ones(tokens, 1, dtype=torch.float64)], dim=1) if constant else x
    lack = full @ truth + noise * torch.randn(tokens, truth.shape[1], generator=generator, dtype=torch.float64)
    return Moments.of(x, lack, constant=constant)


def test_the_ridge_is_what_held_out_tokens_like_best() -> None:
    truth = torch.ones(8, 3, dtype=torch.float64)
    held = moments(1, 4000, truth, 1.0)
    grid = (1e-6, 1e-2, 1.0, 100.0)
    for tokens, noise, ridge in ((5000, 1e-3, 1e-6), (12, 3.0, 1.0)):
        found = best(moments(0, tokens, truth, noise), held, grid, torch.zeros_like(truth), dtype=torch.float64)
        assert found is not None and found.ridge == ridge
    nothing = moments(2, 10, torch.zeros(8, 3, dtype=torch.float64), 1.0)
    noise = moments(3, 4000, torch.zeros(8, 3, dtype=torch.float64), 1.0)
    assert best(nothing, noise, (1e-6, 1e-2), torch.zeros_like(truth), dtype=torch.float64) is None
    silent = Moments.of(torch.zeros(5, 8), torch.randn(5, 3), constant=False)
    assert best(silent, held, grid, torch.zeros_like(truth), dtype=torch.float64) is None


def test_errors_are_those_of_the_tokens_and_a_constant_is_not_held_back() -> None:
    generator = torch.Generator().manual_seed(4)
    x, lack = (torch.randn(50, width, generator=generator, dtype=torch.float64) for width in (4, 3))
    found = Moments.of(x[:20], lack[:20] + 7, constant=True) + Moments.of(x[20:], lack[20:] + 7, constant=True)
    change = found.change(1e6)
    assert change is not None
    assert_close(change[-1], lack.mean(dim=0) + 7, rtol=1e-3, atol=1e-3)
    left = lack + 7 - torch.cat([x, torch.ones(50, 1)], dim=1) @ change
    assert found.error(change) == pytest.approx(float(left.square().sum(dim=1).mean()), rel=1e-10)
    assert found.lack == pytest.approx(float((lack + 7).square().sum(dim=1).mean()), rel=1e-12)


def test_a_site_without_survivors_and_what_cannot_be_repaired_are_left(tmp_path: Path, cases: Any) -> None:
    case, _, _ = cases("single")
    sites = case.study.sites
    emptied = Plan(one_of_each(sites).sites, tuple(sites[1].heads))
    found = fit(case.study, emptied)
    assert found is None, "the last site has no head left, and the first lost none"
    mixed = opened("mixed-bitnet", tmp_path)
    assert all(site.mixes_heads for site in mixed.study.sites)
    working = Fitting(mixed.study, one_of_each(mixed.study.sites), (RIDGE,), torch.float64)
    assert list(working.sites()) == [] and all("mixed before" in note for note in working.notes)
    assert len(working.notes) == len(mixed.study.sites) - 1


def test_a_mender_fits_a_plan_once_and_mends_gated_models(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plan, _ = cases("single")
    model, sites = case.study.loaded.model, case.study.sites
    mender = Mender(case.study, ridges=(RIDGE,))
    assert mender.repair(replace(plan, removed=())) is None
    original = Original(case.study, emphasis=True)
    tried = fit(case.study, plan, ridges=(RIDGE,), original=original)
    assert tried is not None and mender.divergence(plan) == tried.divergence_after
    whole = refitted(case.study, plan, tried)
    with (
        gate(model, gates(sites, plan), sites),
        applied(model, sites, refitted(case.study, plan, tried, original=original)),
    ):
        expected = answers(case)
    with gate(model, gates(sites, plan), sites), applied(model, sites, whole):
        assert difference(expected, answers(case)) > 1e-6, "all tokens counted alike"
    with mender.mended(plan):
        assert difference(expected, answers(case)) <= 1e-12
    monkeypatch.setattr(mending, "fit", None)
    monkeypatch.setattr(mending, "refitted", None)
    assert mender.repair(plan) is not None


@pytest.mark.parametrize("name", NAMED)
def test_refitted_it_is_least_squares_on_all_examples(cases: Any, name: str) -> None:
    case, plan, found = cases(name)
    everything = refitted(case.study, plan, found, original=Original(case.study, streams=False))
    assert (everything.divergence_before, everything.divergence_after) == (
        found.divergence_before,
        found.divergence_after,
    )
    plainly = Plainly(case, plan, everything=True)
    for number, one in enumerate(everything.sites):
        columns, bias = plainly.columns(everything, number, RIDGE)
        assert_close(one.columns, columns, rtol=1e-8, atol=1e-8)
        assert not torch.allclose(one.columns, found.sites[number].columns, rtol=1e-6, atol=1e-6)
        if bias is not None:
            assert_close(one.bias, bias, rtol=1e-8, atol=1e-8)
