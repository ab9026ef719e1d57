"""Discovery finds every head of every structure, on the field's layouts and number formats, and leaves no trace."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from transformers import BertConfig, BertModel, PreTrainedModel, SegformerConfig, SegformerModel
from transformers.modeling_utils import AttentionInterface
from zoo import SPECIMENS, Specimen, at

from headscope.discovery import find_sites
from headscope.errors import UnsupportedModel
from headscope.heads import Role, Site
from headscope.matrices import parameters_per_head

EVERY = sorted(SPECIMENS)


def owned(model: PreTrainedModel, site: Site, role: Role, head: int) -> set[tuple[str, int]]:
    """Parameter indices of one head in one role."""
    return {(piece.path, index) for piece in site.slices_of(role) for index in piece.indices(head)}


@pytest.mark.parametrize("name", EVERY)
def test_every_structure_shows_its_sites(name: str) -> None:
    specimen: Specimen = SPECIMENS[name]
    sites = find_sites(specimen.build()).sites
    found = Counter(f"{site.id.stack}.{site.id.kind}" for site in sites)
    assert dict(found) == specimen.stacks
    assert len({site.id for site in sites}) == len(sites)
    for site in sites:
        label = f"{site.id.stack}.{site.id.kind}"
        for got, expected in (
            (site.n_heads, specimen.n_heads),
            (site.n_kv_heads, specimen.n_kv_heads),
            (site.d_head, specimen.d_head),
            (site.d_value, specimen.d_value),
        ):
            wanted = at(expected, label)
            assert wanted in (0, got), f"{site.id}: {got}, not {wanted}"


@pytest.mark.parametrize("name", EVERY)
def test_slices_belong_to_single_heads(name: str) -> None:
    model = SPECIMENS[name].build()
    for site in find_sites(model).sites:
        if site.mixes_heads:
            continue
        assert Counter(site.channels)[0] == site.d_value
        assert {Counter(site.channels)[head] for head in range(site.n_heads)} == {site.d_value}
        if site.coupled:
            continue
        for role, heads in ((Role.QUERY, site.n_heads), (Role.KEY, site.n_kv_heads), (Role.VALUE, site.n_kv_heads)):
            pieces = [owned(model, site, role, head) for head in range(heads)]
            assert all(pieces), f"{site.id} has no {role} slice for some head"
            assert sum(map(len, pieces)) == len(set().union(*pieces)), "a slice has two owners"


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neox", "llama", "bloom", "falcon-gqa", "t5", "phi3"])
def test_half_precision_finds_the_same(name: str) -> None:
    exact = SPECIMENS[name].build()
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    assert find_sites(rounded).sites == find_sites(exact).sites


@pytest.mark.parametrize("name", ["bert", "llama", "albert", "t5", "bloom"])
def test_probe_leaves_no_trace(name: str) -> None:
    model = SPECIMENS[name].build()
    next(model.parameters()).requires_grad_(False)
    next(iter(model.children())).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    grads = [parameter.requires_grad for parameter in model.parameters()]
    interface = AttentionInterface.get_interface
    find_sites(model)
    assert AttentionInterface.get_interface is interface
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == grads
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_probe_leaves_no_trace_after_an_error() -> None:
    model = SPECIMENS["bert"].build()
    model.bert.encoder.layer[1].intermediate.forward = None  # type: ignore[method-assign]
    interface = AttentionInterface.get_interface
    with pytest.raises(TypeError):
        find_sites(model)
    assert AttentionInterface.get_interface is interface
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_shared_module_is_one_physical_head_in_several_layers() -> None:
    sites = find_sites(SPECIMENS["albert"].build()).sites
    assert [site.id.layer for site in sites] == [0, 1, 2, 3]
    assert len({site.module for site in sites}) == 1
    assert [site.call for site in sites] == [0, 1, 2, 3]
    assert set(sites[1].shared_with) == {sites[0].id, sites[2].id, sites[3].id}


def test_groups_of_layers_share_only_among_themselves() -> None:
    sites = find_sites(SPECIMENS["albert-groups"].build()).sites
    for site in sites:
        twins = {other.id for other in sites if other.module == site.module} - {site.id}
        assert set(site.shared_with) == twins
    assert len({site.module for site in sites}) == 2


def test_grouped_query_heads_read_their_key_head() -> None:
    site = find_sites(SPECIMENS["llama"].build()).sites[0]
    assert [site.kv_head(head) for head in range(site.n_heads)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert site.attention == "GQA"


def test_norm_over_all_heads_couples_them() -> None:
    site = find_sites(SPECIMENS["olmo2"].build()).sites[0]
    assert {name.rpartition(".self_attn.")[2] for name in site.coupled} == {"q_proj.weight", "k_proj.weight"}
    assert find_sites(SPECIMENS["qwen3"].build()).sites[0].coupled == ()


def test_norm_in_front_of_the_projection_mixes_heads() -> None:
    assert find_sites(SPECIMENS["bitnet"].build()).sites[0].mixes_heads
    assert not find_sites(SPECIMENS["llama"].build()).sites[0].mixes_heads


def test_sinks_and_bias_tables_belong_to_heads() -> None:
    sinks = find_sites(SPECIMENS["gpt_oss"].build()).sites[0].slices_of(Role.EXTRA)
    assert [(piece.name, piece.axis, piece.owner) for piece in sinks] == [("sinks", 0, tuple(range(8)))]
    table = find_sites(SPECIMENS["t5"].build()).sites[0].slices_of(Role.EXTRA)
    assert [(piece.path.rpartition(".SelfAttention.")[2], piece.axis) for piece in table] == [
        ("relative_attention_bias.weight", 1)
    ]


def test_output_gate_rows_are_found_beside_the_query_rows() -> None:
    site = find_sites(SPECIMENS["qwen3_next"].build()).sites[0]
    (gate,) = site.slices_of(Role.GATE)
    (query,) = site.slices_of(Role.QUERY)
    assert gate.path == query.path
    assert all(max(pair) >= 0 > min(pair) for pair in zip(gate.owner, query.owner, strict=True)), "a row is one of them"


def test_hybrid_model_lists_its_other_mixers() -> None:
    found = find_sites(SPECIMENS["qwen3_next"].build())
    assert [site.id.layer for site in found.sites] == [0, 2]
    assert [other.path for other in found.others] == ["model.layers.1.linear_attn"]


def test_pooled_keys_are_no_other_stack() -> None:
    """Segformer's queries see fewer keys than there are queries, all of them from one sequence."""
    widths = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]}
    model = SegformerModel(SegformerConfig(**widths, mlp_ratios=[1, 1, 1, 1]))
    assert {str(site.id.kind) for site in find_sites(model).sites} == {"self"}


def test_parameters_of_heads_add_up() -> None:
    model = SPECIMENS["llama"].build()
    site = find_sites(model).sites[0]
    attention = model.get_submodule(site.module)
    assert sum(parameters_per_head(model, site)) == sum(parameter.numel() for parameter in attention.parameters())
    counts = parameters_per_head(model, site)
    assert counts[0] == counts[4] > counts[1] == counts[5], "k and v are counted at the first head of each group"


def test_a_model_without_attention_is_refused() -> None:
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=0, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(UnsupportedModel, match="no attention head found in BertModel"):
        find_sites(model)


def test_cost_grows_linearly_with_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward passes are counted, not timed: equal modules share a probe, so layers add a constant number each."""
    import headscope.ownership as ownership

    calls = []
    real = torch.autograd.grad
    monkeypatch.setattr(ownership.torch.autograd, "grad", lambda *a, **k: calls.append(1) or real(*a, **k))
    counts = []
    for layers in (2, 4, 8):
        calls.clear()
        find_sites(
            BertModel(BertConfig(hidden_size=12, num_hidden_layers=layers, num_attention_heads=3, intermediate_size=8))
        )
        counts.append(len(calls))
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])
