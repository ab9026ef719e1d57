"""Modules that cannot count fewer heads run on filled parameters: exact, smaller, and the same after a round trip."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pruning_cases import difference, masked, plan_of, said, uneven
from torch import Tensor, nn
from transformers import PreTrainedModel
from zoo import build, inputs
from zoo_configs import GROUPED, IMAGE, RECIPES, TEXT, Recipe

from headscope.discovery import find_sites
from headscope.errors import InvalidPlan
from headscope.heads import HeadId, Role
from headscope.portable import restore
from headscope.surgery import prune, silence_heads


def text(model_type: str, model_class: str, **config: Any) -> Recipe:
    """A tiny text encoder or decoder; what must be found in it is asked elsewhere."""
    return Recipe(model_type, model_class, TEXT | config, {}, 5, 5, 6, 6)


KINDS = {
    "codegen": RECIPES["codegen"],
    "convbert": RECIPES["convbert"],
    "stablelm": RECIPES["stablelm"],
    "squeezebert": text(
        "squeezebert",
        "SqueezeBertModel",
        embedding_size=30,
        **{f"{name}_groups": 5 for name in "qkv"},
        **{f"{name}_groups": 1 for name in ("post_attention", "intermediate", "output")},
    ),
    "longformer": text("longformer", "LongformerModel", attention_window=[4, 4], max_position_embeddings=64),
    "big_bird": text("big_bird", "BigBirdModel", block_size=4),
    "xlnet": Recipe(
        "xlnet",
        "XLNetModel",
        {"vocab_size": 53, "d_model": 30, "n_layer": 2, "n_head": 5, "d_inner": 37}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        {},
        *(5, 5, 6, 6),
    ),
    "wavlm": Recipe("wavlm", "WavLMModel", RECIPES["wav2vec2"].config, {}, 5, 5, 6, 6, inputs="wave"),
    "siglip_vision": Recipe("siglip_vision_model", "SiglipVisionModel", IMAGE, {}, 5, 5, 6, 6, inputs="image"),
    "doge": Recipe("doge", "DogeModel", GROUPED, {}, 8, 2, 10, 10),
}
"""Heads laid out by fixed blocks, one module a head, a convolution on the queries, grouped convolutions, windows, a
swap of modules while running, products with bare parameters, torch's own multi-head attention (with and without a
position bias, and pooled), and values that also make the mask."""


def specimen(name: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of one of the kinds, and a batch for it."""
    model = build(KINDS[name])
    return model, inputs(KINDS[name].inputs, model)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # WavLM's own masks
@pytest.mark.parametrize("name", KINDS)
def test_pruned_is_masked_also_after_a_round_trip(name: str) -> None:
    model, batch = specimen(name)
    sites = find_sites(model).sites
    plan = uneven(sites)
    whole, expected, size = said(model, batch), masked(model, sites, plan, batch), parameters(model)
    prune(model, sites, plan)
    pruned = said(model, batch)
    assert difference(expected, pruned) <= 1e-9
    assert difference(whole, expected) > 1e-3, "removing these heads does nothing, so this test says nothing"
    assert parameters(model) < size
    again = build(KINDS[name])
    restore(again, model.config.headscope)
    again.config.headscope = model.config.headscope
    again.load_state_dict(model.state_dict())
    assert difference(pruned, said(again, batch)) == 0
    kept = [str(head) for site in sites for head in site.heads if head not in plan.removed]
    assert [str(head) for site in find_sites(again).sites for head in site.heads] == kept


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("name", ["xlnet", "wavlm", "siglip_vision", "longformer"])
def test_a_gate_of_0_is_a_zero_in_the_weights(name: str) -> None:
    model, batch = specimen(name)
    sites = find_sites(model).sites
    plan = plan_of(sites, [site.heads[turn % site.n_heads] for turn, site in enumerate(sites)])
    expected = masked(model, sites, plan, batch)
    assert difference(said(model, batch), expected) > 1e-3
    silence_heads(model, sites, plan)
    assert difference(expected, said(model, batch)) <= 1e-9


@pytest.mark.parametrize("name", ["codegen", "longformer", "xlnet"])
def test_two_steps_are_one(name: str) -> None:
    """Head 0, then the head that was number 3: the second step fills what the first has left."""
    (once, batch), (twice, _) = specimen(name), specimen(name)
    sites = find_sites(once).sites
    heads = [HeadId(sites[0].id, number) for number in (0, 3)]
    prune(once, sites, plan_of(sites, heads))
    prune(twice, sites, plan_of(sites, heads[:1]))
    present = find_sites(twice).sites
    assert [head.index for head in present[0].heads] == [place for place in range(sites[0].n_heads) if place]
    prune(twice, present, plan_of(present, heads[1:]))
    assert once.config.headscope == twice.config.headscope
    assert difference(said(once, batch), said(twice, batch)) == 0


def test_filled_parameters_exist_only_while_the_module_runs() -> None:
    model, batch = specimen("codegen")
    sites = find_sites(model).sites
    prune(model, sites, plan_of(sites, sites[0].heads[:1]))
    projection = model.get_submodule(sites[0].module).qkv_proj
    assert projection.weight is projection._parameters["weight"]
    with pytest.raises(IndexError):
        model(input_ids=torch.full_like(batch["input_ids"], 10**6))  # an error inside the model
    assert projection.weight is projection._parameters["weight"]
    model(**batch)[0].sum().backward()
    assert projection.weight.grad is not None
    assert projection.weight.grad.shape == projection.weight.shape


def test_values_that_serve_all_heads_stay() -> None:
    model, _ = specimen("doge")
    sites = find_sites(model).sites
    before = {piece.path: model.get_parameter(piece.path).shape for piece in sites[0].slices}
    prune(model, sites, plan_of(sites, [HeadId(sites[0].id, number) for number in sites[0].groups[0]]))
    cut = {path for path, shape in before.items() if model.get_parameter(path).shape != shape}
    assert cut == {piece.path for piece in sites[0].slices_of(Role.OUTPUT)}


class Leaky(nn.Module):
    """An attention's output that also hands on what all its heads could write."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = dense.weight, dense.bias

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias) + self.weight.square().sum(dim=1)


def test_what_is_exact_in_no_way_is_refused_by_name_before_anything_changes() -> None:
    model = build(RECIPES["bert"])
    block = model.bert.encoder.layer[1].attention.output
    block.dense = Leaky(block.dense)
    sites, before = find_sites(model).sites, copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidPlan, match=r"encoder\.self\.1: BertSelfAttention does not compute the same"):
        prune(model, sites, plan_of(sites, [site.heads[0] for site in sites]))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not hasattr(model.config, "headscope")
