"""Merging of key/value heads in tiny models: maps that change nothing, means, counts, moments, and the repair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from pruning_cases import difference, plan_of, said
from repair_cases import Plainly, opened
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from zoo_configs import RECIPES, grouped

from headscope import merge_maps
from headscope.alignment import Family, align, alikeness
from headscope.discovery import find_sites
from headscope.errors import InvalidPlan, UsageError
from headscope.heads import Role, Site
from headscope.inputs import probe_inputs
from headscope.mending import Mender
from headscope.merge_maps import find_merge
from headscope.merging import Merge, aligned, merge_heads, tied, unaligned
from headscope.original import Original
from headscope.output_weights import Patch, head_columns, patches, swapped
from headscope.repair import applied, fit
from headscope.study import Study
from headscope.surgery import keep_kv_heads
from headscope.trials import Trials

NOPE = {"no_rope_layers": [0, 0], "no_rope_layer_interval": 1}
MODELS = {
    "llama": (RECIPES["llama"], Family.HALVES, Family.ORTHOGONAL),
    "llama of 4": (grouped("llama", "LlamaForCausalLM", n_kv_heads=4), Family.HALVES, Family.ORTHOGONAL),
    "llama MHA": (grouped("llama", "LlamaForCausalLM", n_kv_heads=8), Family.HALVES, Family.ORTHOGONAL),
    "qwen2": (RECIPES["qwen2"], Family.HALVES, Family.ORTHOGONAL),
    "qwen3": (RECIPES["qwen3"], Family.NONE, Family.ORTHOGONAL),
    "gemma2": (RECIPES["gemma2"], Family.HALVES, Family.ORTHOGONAL),
    "phi3": (RECIPES["phi3"], Family.HALVES, Family.ORTHOGONAL),
    "glm": (
        grouped("glm", "GlmForCausalLM", head_dim=10, partial_rotary_factor=1.0),
        Family.INTERLEAVED,
        Family.ORTHOGONAL,
    ),
    "smollm3": (grouped("smollm3", "SmolLM3ForCausalLM", **NOPE), Family.ORTHOGONAL, Family.ORTHOGONAL),
}
RIDGE = 0.1
FEW = ("llama of 4", "qwen2", "phi3", "smollm3")


def bare(model: PreTrainedModel) -> Any:
    """A study of a model without data."""
    return SimpleNamespace(loaded=SimpleNamespace(model=model), sites=find_sites(model).sites, examples=None)


def built(name: str) -> Any:
    return bare(zoo.build(MODELS[name][0]))


def saying(model: PreTrainedModel) -> list[Tensor]:
    return said(model, probe_inputs(model))


def outputs(study: Any) -> list[Tensor]:
    """What each output projection writes, in float64 all the way, unlike what the norms of some models hand on."""
    found: list[Tensor] = []
    model = study.loaded.model
    handles = [
        model.get_submodule(site.output).register_forward_hook(lambda module, args, output: found.append(output))
        for site in study.sites
    ]
    saying(model)
    for handle in handles:
        handle.remove()
    return found


def planted(name: str, *, kv_heads: int) -> tuple[Any, Merge]:
    """A model whose heads of each group are one head, turned by maps that change nothing."""
    study = built(name)
    model = study.loaded.model
    plain = unaligned(model, study.sites, kv_heads)
    for patch in tied(model, study.sites, plain):
        patch.write()
    _, keys, values = MODELS[name]
    hidden = merge_maps._random(plain, keys=keys, values=values)
    for patch in aligned(model, study.sites, hidden):
        patch.write()
    return study, plain


# Alignment


@pytest.mark.parametrize("family", list(Family))
def test_the_nearest_map_is_orthogonal_and_no_other_of_the_family_is_nearer(family: Family) -> None:
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    best = family.nearest(target)
    assert_close(best @ best.T, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-12)
    value = float((best * target).sum())
    for _ in range(300):
        other = family.nearest(target + 0.3 * torch.randn(6, 6, generator=generator, dtype=torch.float64))
        assert float((other * target).sum()) <= value + 1e-12
    assert_close(family.nearest(best), best, rtol=0, atol=1e-12)


def test_the_nearest_orthogonal_map_reaches_the_nuclear_norm() -> None:
    """The most that `tr(Rᵀ target)` can be is the sum of the target's singular values (von Neumann)."""
    target = torch.randn(5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    reached = float((Family.ORTHOGONAL.nearest(target) * target).sum())
    assert reached == pytest.approx(float(torch.linalg.svdvals(target).sum()), rel=1e-12)


def test_rotations_of_halves_commute_with_the_rotary_embedding() -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(3, 6, 6, generator=generator, dtype=torch.float64)
    x = torch.randn(1, 1, 4, 6, generator=generator, dtype=torch.float64)
    angles = torch.arange(4)[:, None] * torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64)
    cosine, sine = (torch.cat([wave, wave], dim=-1)[None] for wave in (angles.cos(), angles.sin()))

    def apart(turn: Tensor) -> float:
        first, _ = apply_rotary_pos_emb(x @ turn, x, cosine, sine)
        second, _ = apply_rotary_pos_emb(x, x, cosine, sine)
        return float((first - second @ turn).abs().max())

    assert apart(Family.HALVES.nearest(noise[0])) <= 1e-12
    assert apart(Family.INTERLEAVED.nearest(noise[1])) > 1e-2
    assert apart(Family.ORTHOGONAL.nearest(noise[2])) > 1e-2


@pytest.mark.parametrize("family", [Family.ORTHOGONAL, Family.HALVES, Family.INTERLEAVED])
def test_planted_maps_are_found(family: Family) -> None:
    generator = torch.Generator().manual_seed(4)
    vectors = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    turns = [family.nearest(torch.randn(4, 4, generator=generator, dtype=torch.float64)) for _ in range(4)]
    heads = torch.stack([vectors @ turn for turn in turns])  # [head token d]
    moments = torch.einsum("ita,jtb->iajb", heads, heads)
    maps = align(moments, family)
    assert_close(heads @ maps, heads[:1].expand_as(heads), rtol=1e-9, atol=1e-9)
    still = torch.eye(4, dtype=torch.float64).expand(4, 4, 4)
    assert alikeness(moments, maps) > 1.5 * alikeness(moments, still)


def test_a_round_never_makes_heads_less_alike() -> None:
    generator = torch.Generator().manual_seed(5)
    heads = torch.randn(5, 40, 6, generator=generator, dtype=torch.float64)
    moments = torch.einsum("ita,jtb->iajb", heads, heads)
    best = {family: alikeness(moments, align(moments, family)) for family in Family}
    assert best[Family.NONE] < best[Family.HALVES] < best[Family.ORTHOGONAL]
    apart = sum(float((heads[i] - heads[j]).square().sum()) for i in range(5) for j in range(5) if i != j)
    assert best[Family.NONE] == pytest.approx((8 * float(heads.square().sum()) - apart) / 2)


# Exact maps


@pytest.mark.parametrize("name", MODELS)
def test_maps_of_the_family_found_change_nothing_and_wider_ones_do(name: str) -> None:
    study = built(name)
    model = study.loaded.model
    _, keys, values = MODELS[name]
    merge = find_merge(study, 1)
    assert (merge.keys, merge.values) == (keys, values)
    whole, wrote = saying(model), outputs(study)
    for turned in (merge, merge_maps._random(merge, keys=keys, values=values)):
        change = aligned(model, study.sites, turned)
        assert max(float((patch.values - patch.parameter.detach()).abs().max()) for patch in change) > 0.1
        with swapped(change):
            assert difference(whole, saying(model)) <= 1e-9
            assert difference(wrote, outputs(study)) <= 1e-9
    if keys is not Family.ORTHOGONAL:
        wider = Family.HALVES if keys is Family.NONE else Family.ORTHOGONAL
        with swapped(aligned(model, study.sites, merge_maps._random(merge, keys=wider))):
            assert difference(whole, saying(model)) > 1e-3
    assert difference(whole, saying(model)) == 0


# Tied and merged


@pytest.mark.parametrize("name", MODELS)
def test_tied_is_merged(name: str) -> None:
    """The whole model with equal heads in each group says what the merged one says; and not what it said whole."""
    study = built(name)
    model = study.loaded.model
    before = study.sites[0]
    for kv_heads in sorted({1, before.n_kv_heads // 2}):
        study = built(name)
        model = study.loaded.model
        whole = saying(model)
        merge = find_merge(study, kv_heads)
        with swapped(tied(model, study.sites, merge)):
            expected = saying(model)
        merge_heads(model, study.sites, merge)
        assert difference(expected, saying(model)) <= 1e-9 < 1e-3 < difference(whole, expected)
        after = find_sites(model).sites
        assert [(site.n_heads, site.n_kv_heads) for site in after] == [(before.n_heads, kv_heads)] * len(after)
        assert [site.heads for site in after] == [site.heads for site in study.sites]
        size = before.n_kv_heads // kv_heads
        assert all(site.kv_numbers == tuple(range(0, before.n_kv_heads, size)) for site in after)


@pytest.mark.parametrize("name", FEW)
def test_the_mean_is_of_what_the_heads_say(name: str) -> None:
    """By hand: keys and values of each merged head are the mean of its group's, turned."""
    study = built(name)
    model, site = study.loaded.model, study.sites[0]
    merge = find_merge(study, site.n_kv_heads // 2)
    one = merge.sites[0]
    for role, maps in ((Role.KEY, one.keys), (Role.VALUE, one.values)):
        old = _features(model, site, role)
        with swapped(tied(model, study.sites, merge)):
            new = _features(model, site, role)
        for group in one.groups:
            mean = sum(old[head] @ maps[head] for head in group) / len(group)
            assert all(torch.allclose(new[head], mean, rtol=0, atol=1e-9) for head in group)


def _features(model: PreTrainedModel, site: Site, role: Role) -> Tensor:
    """What the first layer's projection puts out, `[head token d]`."""
    piece = next(piece for piece in site.slices_of(role) if piece.name == "weight")
    seen: list[Tensor] = []
    module = model.get_submodule(piece.module)
    handle = module.register_forward_hook(lambda module, args, output: seen.append(output.flatten(0, 1)))
    saying(model)
    handle.remove()
    return torch.stack([seen[0][:, piece.indices(head)] for head in range(site.n_kv_heads)])


def test_the_cache_and_generation_follow() -> None:
    study = built("llama of 4")
    model = study.loaded.model
    merge = find_merge(study, 2)
    prompt = {name: value for name, value in probe_inputs(model).items() if name != "use_cache"}
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    with swapped(tied(model, study.sites, merge)):
        expected = model.generate(**prompt, **options)
    merge_heads(model, study.sites, merge)
    with torch.no_grad():
        cache = model(**prompt, use_cache=True).past_key_values
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 2]
    for use_cache in (True, False):
        assert torch.equal(model.generate(**prompt, **options, use_cache=use_cache), expected)


@pytest.mark.parametrize("name", FEW)
def test_copies_merge_without_loss(name: str) -> None:
    """Heads that are one head but for maps that change nothing become that one; without the maps something is lost."""
    kv_heads = 2 if name == "llama of 4" else 1
    study, _ = planted(name, kv_heads=kv_heads)
    model = study.loaded.model
    whole = saying(model)
    with swapped(tied(model, study.sites, find_merge(study, kv_heads, align_by=Family.NONE))):
        assert difference(whole, saying(model)) > 1e-3
    with swapped(tied(model, study.sites, find_merge(study, kv_heads))):
        assert difference(whole, saying(model)) <= 1e-9


def test_rounding_is_to_the_stored_format() -> None:
    study = built("llama")
    model = study.loaded.model
    merge = find_merge(study, 1)
    for patch in tied(model, study.sites, merge, dtype=torch.bfloat16):
        assert patch.values.dtype == torch.float64
        assert torch.equal(patch.values.bfloat16().double(), patch.values)


# Refusals


def test_only_possible_numbers() -> None:
    study = built("llama of 4")
    for number in (3, 4, 5):
        with pytest.raises(UsageError, match="the sites have 4 key/value heads") as caught:
            unaligned(study.loaded.model, study.sites, number)
        assert caught.value.hint == "possible: 1, 2"
    single = bare(zoo.build(RECIPES["llama-mqa"]))
    with pytest.raises(UsageError) as caught:
        unaligned(single.loaded.model, single.sites, 1)
    assert caught.value.hint == "there is nothing to merge"


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_models_without_a_count_are_refused(name: str) -> None:
    study = bare(zoo.build(RECIPES[name]))
    kind = type(study.loaded.model).__name__
    with pytest.raises(InvalidPlan, match=f"{kind}: its configuration has no key/value head count of its own"):
        unaligned(study.loaded.model, study.sites, 1)


def test_coupled_heads_are_refused() -> None:
    study = bare(zoo.build(RECIPES["olmo2"]))
    with pytest.raises(InvalidPlan, match="ties its heads together"):
        unaligned(study.loaded.model, study.sites, 1)


def test_borrowed_keys_are_refused() -> None:
    study = built("llama")
    lender, borrower = study.sites
    borrower = replace(borrower, slices=tuple(borrower.slices_of(Role.QUERY, Role.VALUE, Role.OUTPUT)))
    with pytest.raises(InvalidPlan, match=r"decoder\.causal\.1: no key projection of its own"):
        unaligned(study.loaded.model, (lender, borrower), 1)


def test_kept_places_are_those_named() -> None:
    """Surgery keeps the very key/value heads that are named, and each goes on to serve its share of the query heads."""
    study = built("llama MHA")
    model = study.loaded.model
    keep_kv_heads(model, study.sites, {site.id: [1, 6] for site in study.sites})
    after = find_sites(model).sites
    assert {(site.n_heads, site.n_kv_heads, site.kv_numbers) for site in after} == {(8, 2, (1, 6))}


# With data


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield opened("causal-llama", tmp_path_factory.mktemp("llama"))


def test_moments_are_of_real_tokens(case: Any) -> None:
    """Against the same example by example, where nothing is padded."""
    study = case.study
    plain = unaligned(study.loaded.model, study.sites, 1)
    found = merge_maps._Pass(study, plain).run()
    single = Study(study.loaded, study.examples, replace(study.options, batch_size=1))
    single.__dict__["discovery"] = study.discovery
    piece = merge_maps._pieces(study.loaded.model, study.sites[1], Role.VALUE)[0]
    total = torch.zeros(2, 10, 2, 10, dtype=torch.float64)

    def add(module: Any, args: Any, output: Tensor) -> None:
        heads = output[0].unflatten(-1, (2, 10)).double()
        total.add_(torch.einsum("tia,tjb->iajb", heads, heads))

    slowly = merge_maps._Pass(single, plain)
    handle = study.loaded.model.get_submodule(piece.module).register_forward_hook(add)
    again = slowly.run()
    handle.remove()
    assert found.keys() == again.keys() and len(found) == 4
    for place, block in found.items():
        assert_close(block, again[place], rtol=1e-9, atol=1e-9)
    assert_close(found[study.sites[1].output, Role.VALUE][0], total, rtol=1e-9, atol=1e-9)


def test_data_aligns_better_where_data_is(case: Any) -> None:
    """Maps from activations bring the heads nearer on the data than maps from weights, and these than none."""
    study = case.study
    bare_study = SimpleNamespace(loaded=study.loaded, sites=study.sites, examples=None)
    moments = merge_maps._Pass(study, unaligned(study.loaded.model, study.sites, 1)).run()
    seen = [find_merge(study, 1), find_merge(bare_study, 1), unaligned(study.loaded.model, study.sites, 1)]  # type: ignore[arg-type]
    for place, site in enumerate(study.sites):
        values = [alikeness(moments[site.output, Role.VALUE][0], merge.sites[place].values) for merge in seen]
        keys = [alikeness(moments[site.output, Role.KEY][0], merge.sites[place].keys) for merge in seen]
        assert values[0] > values[1] > values[2]
        assert keys[0] > keys[1] and keys[0] > keys[2]


def standing_of(case: Any) -> tuple[Merge, list[Patch]]:
    merge = find_merge(case.study, 1)
    return merge, tied(case.study.loaded.model, case.study.sites, merge)


def test_the_repair_is_least_squares_on_stored_activations(case: Any) -> None:
    """Of the tied model's outputs against those of the whole one, site by site, from the turned weights."""
    _, standing = standing_of(case)
    plan = plan_of(case.study.sites, [])
    original = Original(case.study, streams=False)
    found = fit(case.study, plan, ridges=(RIDGE,), standing=standing, original=original)
    assert found is not None and len(found.sites) == len(case.study.sites)
    plainly = Plainly(case, plan)
    for number, one in enumerate(found.sites):
        with swapped(standing):
            columns, _ = plainly.columns(found, number, RIDGE)
        assert_close(one.columns, columns, rtol=1e-8, atol=1e-8)
        assert one.error_after < one.error_before
    assert found.divergence_after < found.divergence_before


def test_judged_is_what_is_written(case: Any) -> None:
    """The verdict on the tied and repaired model is that on the merged model with the repair's weights."""
    study = case.study
    model = study.loaded.model
    _, standing = standing_of(case)
    plan = plan_of(study.sites, [])
    mender = Mender(study, standing=standing)
    verdict = Trials(study, None, mender, standing=standing).judged(plan)
    assert verdict.repair is not None
    assert verdict.final.divergence < verdict.pruned.divergence  # type: ignore[operator]
    inputs = probe_inputs(model)
    with swapped(standing):
        unrepaired = said(model, inputs)
        with applied(model, study.sites, verdict.repair):
            expected = said(model, inputs)
    with mender.mended(plan):
        assert difference(expected, said(model, inputs)) == 0
    other = case.model
    sites = find_sites(other).sites
    merge_heads(other, sites, find_merge(study, 1))
    assert difference(unrepaired, said(other, inputs)) <= 1e-9
    after = find_sites(other).sites
    for site, one in zip(after, verdict.repair.sites, strict=True):
        for patch in patches(other, site, range(site.n_heads), one.columns, bias=None):
            patch.write()
        assert_close(head_columns(other, site, range(8)), one.columns, rtol=0, atol=0)
    assert difference(expected, said(other, inputs)) <= 1e-9


def test_everything_is_put_back(case: Any) -> None:
    before = {name: value.clone() for name, value in case.study.loaded.model.state_dict().items()}
    _, standing = standing_of(case)
    fit(case.study, plan_of(case.study.sites, []), standing=standing)
    assert all(torch.equal(before[name], value) for name, value in case.study.loaded.model.state_dict().items())
