"""Surgery: pruned = masked on every architecture of the zoo, numbers stay, the rest of the model is untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from pruning_cases import difference, masked, plan_of, said, uneven
from zoo import SPECIMENS, Specimen, specimens

from headscope.discovery import find_sites
from headscope.errors import InvalidPlan, ModelError, UnsupportedModel
from headscope.heads import HeadId, Site
from headscope.surgery import is_separable, parameters_left, prune, silence_heads

COUPLED = ("olmo2", "bitnet")
"""A norm over all heads, or over all of a context: their heads can be gated, but not taken apart."""
OWN_COUNTS = ("codegen", "convbert", "stablelm")
"""Modules that cannot count fewer heads: `test_filled.py` prunes them."""
SEPARABLE = [name for name in SPECIMENS if name not in (*COUPLED, *OWN_COUNTS)]


@pytest.mark.parametrize("specimen", specimens(SEPARABLE))
def test_pruned_is_masked(specimen: Specimen) -> None:
    model = specimen.build()
    inputs, sites = specimen.inputs(model), find_sites(model).sites
    plan = uneven(sites)
    whole, expected = said(model, inputs), masked(model, sites, plan, inputs)
    left = parameters_left(model, sites, plan)
    prune(model, sites, plan)
    assert difference(expected, said(model, inputs)) <= 1e-9
    assert difference(whole, expected) > 1e-3, "removing these heads does nothing, so this test says nothing"
    assert sum(parameter.numel() for parameter in model.parameters()) == left
    kept = [str(head) for site in sites for head in site.heads if head not in plan.removed]
    assert [str(head) for site in find_sites(model).sites for head in site.heads] == kept


def test_the_zoo_has_thirty_architectures_whose_heads_come_apart() -> None:
    assert len(SEPARABLE) >= 30


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_heads_are_refused_by_name(name: str) -> None:
    model = SPECIMENS[name].build()
    sites = find_sites(model).sites
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidPlan, match=str(sites[0].id)):
        prune(model, sites, plan_of(sites, sites[0].heads[:1]))
    assert not any(is_separable(site) for site in sites)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "specimen", specimens(["bert", "gpt2", "gpt_neox", "llama", "t5", "vit", "bloom", "falcon-gqa"])
)
def test_two_steps_are_one(specimen: Specimen) -> None:
    """Pruning what is left of a plan later gives the same weights as doing it at once, in original numbers."""
    once, twice = specimen.build(), specimen.build()
    sites = find_sites(once).sites
    plan = uneven(sites)
    prune(once, sites, plan)
    first = [head for head in plan.removed if head.site in {site.id for site in sites[::2]}]
    prune(twice, find_sites(twice).sites, plan_of(find_sites(twice).sites, first))
    present = find_sites(twice).sites
    prune(twice, present, plan_of(present, [head for head in plan.removed if head not in first]))
    assert once.config.headscope == twice.config.headscope
    weights = twice.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in once.state_dict().items())


def test_two_steps_in_one_site_keep_original_numbers() -> None:
    """Prune head 0, then head 3 of what was four heads and more: head 3 is the one that was number 3."""
    once, twice = SPECIMENS["bert"].build(), SPECIMENS["bert"].build()
    sites = find_sites(once).sites
    heads = [HeadId(sites[0].id, number) for number in (0, 3)]
    prune(once, sites, plan_of(sites, heads))
    prune(twice, sites, plan_of(sites, heads[:1]))
    present = find_sites(twice).sites
    assert [head.index for head in present[0].heads] == [1, 2, 3, 4]
    prune(twice, present, plan_of(present, heads[1:]))
    weights = twice.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in once.state_dict().items())
    assert [head.index for head in find_sites(twice).sites[0].heads] == [1, 2, 4]


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neo", "llama", "mpt", "vit", "bart", "swin", "gpt_oss"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_site_without_heads_writes_its_bias(name: str, place: int) -> None:
    model = SPECIMENS[name].build()
    inputs, sites = SPECIMENS[name].inputs(model), find_sites(model).sites
    plan = plan_of(sites, sites[place].heads)
    expected = masked(model, sites, plan, inputs)
    prune(model, sites, plan)
    assert difference(expected, said(model, inputs)) <= 1e-9
    left = [site.id for site in find_sites(model).sites]
    assert left == [site.id for site in sites if site is not sites[place]], "layers keep their numbers"


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neo", "bart"])
def test_a_first_layer_without_heads_still_counts_tokens_for_the_cache(name: str) -> None:
    model = SPECIMENS[name].build()
    inputs, sites = SPECIMENS[name].inputs(model), find_sites(model).sites
    first = next(site for site in sites if site.id.kind == "causal")
    prune(model, sites, plan_of(sites, first.heads))
    prompt = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    limits = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**prompt, **limits), model.generate(**prompt, **limits, use_cache=False))


@pytest.mark.parametrize("name", ["albert-groups", "bloom", "t5"])
def test_modules_that_do_more_than_attend_keep_a_head(name: str) -> None:
    model = SPECIMENS[name].build()
    sites = find_sites(model).sites
    heads = [HeadId(label, head.index) for label in (sites[0].id, *sites[0].shared_with) for head in sites[0].heads]
    with pytest.raises(InvalidPlan, match="one of its heads must stay"):
        prune(model, sites, plan_of(sites, heads))


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "gpt2"])
def test_everything_outside_attention_is_untouched(name: str) -> None:
    model = SPECIMENS[name].build().bfloat16()
    sites = find_sites(model).sites
    before = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    owned = {piece.path for site in sites for piece in site.slices}
    tied = _tied(model)
    prune(model, sites, uneven(sites))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[path]) for path, tensor in before.items() if path not in owned)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert _tied(model) == tied


def _tied(model: torch.nn.Module) -> list[list[str]]:
    places: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(path)
    return sorted(paths for paths in places.values() if len(paths) > 1)


def test_groups_of_different_sizes_are_refused() -> None:
    model = SPECIMENS["llama"].build()
    sites = find_sites(model).sites
    with pytest.raises(InvalidPlan, match="--layout masked|groups"):
        prune(model, sites, plan_of(sites, sites[0].heads[:1]))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "olmo2"])
def test_silenced_heads_are_gated_heads(name: str) -> None:
    """Any heads, also single ones of a key/value group, and where a norm couples them."""
    model = SPECIMENS[name].build()
    inputs, sites = SPECIMENS[name].inputs(model), find_sites(model).sites
    plan = plan_of(sites, [site.heads[turn % site.n_heads] for turn, site in enumerate(sites)])
    expected = masked(model, sites, plan, inputs)
    shapes = {path: tensor.shape for path, tensor in model.state_dict().items()}
    silence_heads(model, sites, plan)
    assert difference(expected, said(model, inputs)) <= 1e-9
    assert {path: tensor.shape for path, tensor in model.state_dict().items()} == shapes
    assert [site.heads for site in find_sites(model).sites] == [site.heads for site in sites]


@pytest.mark.parametrize("operate", [prune, silence_heads])
def test_sites_that_share_a_parameter_lose_the_same_heads(operate: Callable[..., None]) -> None:
    model = SPECIMENS["bert"].build()
    first, second = (layer.attention.output.dense for layer in model.bert.encoder.layer[:2])
    second.weight = first.weight
    inputs, sites = SPECIMENS["bert"].inputs(model), find_sites(model).sites
    with pytest.raises(
        InvalidPlan, match=r"dense\.weight belongs to heads of encoder\.self\.0 and of encoder\.self\.1"
    ):
        operate(model, sites, plan_of(sites, [sites[0].heads[0], sites[1].heads[1]]))
    plan = plan_of(sites, [sites[0].heads[1], sites[1].heads[1]])
    expected = masked(model, sites, plan, inputs)
    operate(model, sites, plan)
    assert difference(expected, said(model, inputs)) <= 1e-9


def test_heads_that_are_mixed_before_the_projection_cannot_be_silenced() -> None:
    model = SPECIMENS["bitnet"].build()
    sites = find_sites(model).sites
    with pytest.raises(UnsupportedModel, match=str(sites[0].id)):
        silence_heads(model, sites, plan_of(sites, sites[0].heads[:1]))


def test_numbers_that_contradict_the_weights_are_refused() -> None:
    model = SPECIMENS["bert"].build()
    sites = find_sites(model).sites
    prune(model, sites, uneven(sites))
    model.config.headscope["sites"][0]["kept"] = [0]
    with pytest.raises(ModelError, match="headscope says 1 heads"):
        find_sites(model)


def test_a_module_keeps_its_own_attention_switch() -> None:
    """Modules that read counts from the configuration still see a change of the attention function."""
    model = SPECIMENS["phi3"].build()
    inputs, sites = SPECIMENS["phi3"].inputs(model), find_sites(model).sites
    prune(model, sites, uneven(sites))
    by_sdpa = said(model, inputs)
    model.set_attn_implementation("eager")
    modules: list[Site] = list(find_sites(model).sites)
    assert {model.get_submodule(site.module).config._attn_implementation for site in modules} == {"eager"}
    assert difference(by_sdpa, said(copy.deepcopy(model), inputs)) <= 2e-6  # its eager softmax is float32
