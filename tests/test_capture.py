"""Watching changes nothing, gates remove heads exactly, and gate gradients are those of autograd on real gates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import GateTensors
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from zoo import SPECIMENS

from headscope.capture import Layout, gate, watch
from headscope.discovery import find_sites
from headscope.heads import Site

EVERY = sorted(SPECIMENS)
MIXING = {"bitnet"}  # gates act on the context, in front of a norm over all heads
SHARED = {"albert", "albert-groups"}  # zeroed columns remove a head from every layer that shares it


def output(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """A model's main floating output."""
    result = model(**inputs)
    for name in ("logits", "last_hidden_state", "logits_per_image", "start_logits"):
        value = getattr(result, name, None)
        if isinstance(value, Tensor):
            return value
    return next(value for value in result.values() if isinstance(value, Tensor) and value.is_floating_point())


def batch_of(inputs: dict[str, Any]) -> int:
    return next(len(value) for value in inputs.values() if isinstance(value, Tensor))


def zero_columns(model: nn.Module, site: Site, head: int) -> None:
    """Zero the output projection's weights that read a head."""
    module = model.get_submodule(site.output)
    columns = [channel for channel, owner in enumerate(site.channels) if owner == head]
    with torch.no_grad():
        if isinstance(module, Conv1D):
            module.weight[columns] = 0
        else:
            module.weight[:, columns] = 0


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_gate_zero_is_zeroed_columns(name: str) -> None:
    model = SPECIMENS[name].build()
    inputs = SPECIMENS[name].inputs(model)
    sites = find_sites(model).sites
    plain = output(model, inputs)
    for site in (sites[0], sites[-1]):
        head = site.n_heads - 1
        gates = {site.id: torch.ones(site.n_heads, dtype=torch.float64)}
        with gate(model, gates, sites):
            assert torch.equal(output(model, inputs), plain), "a gate of one changes nothing"
        gates[site.id][head] = 0
        if name in SHARED:
            gates |= {twin: gates[site.id] for twin in site.shared_with}
        with gate(model, gates, sites):
            gated = output(model, inputs)
        assert not torch.allclose(gated, plain, rtol=1e-6), "the gate did nothing"
        if name in MIXING:
            continue
        zeroed = copy.deepcopy(model)
        zero_columns(zeroed, site, head)
        torch.testing.assert_close(gated, output(zeroed, inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", EVERY)
def test_gate_gradient_is_autograd_on_a_real_gate(name: str) -> None:
    model = SPECIMENS[name].build().requires_grad_(False)
    inputs = SPECIMENS[name].inputs(model)
    sites = find_sites(model).sites
    with torch.no_grad():
        plain = output(model, inputs)
    direction = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1), dtype=plain.dtype)
    with watch(model, sites) as seen:
        seen.batch = batch_of(inputs)
        watched = output(model, inputs)
        assert torch.equal(watched, plain), "watching changes nothing"
        (watched * direction).sum().backward()
        found = {site.id: seen.records[site.id].gate_gradient for site in sites}
    assert all(value is not None and value.shape[0] == seen.batch for value in found.values())
    leaves = {site.id: torch.ones(site.n_heads, dtype=torch.float64, requires_grad=True) for site in sites}
    with gate(model, leaves, sites):
        wanted = torch.autograd.grad((output(model, inputs) * direction).sum(), list(leaves.values()))
    for site, expected in zip(sites, wanted, strict=True):
        got = found[site.id]
        assert got is not None
        torch.testing.assert_close(got.sum(dim=(0, 1)), expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit", "gpt_neox", "deepseek_v3", "opt"])
def test_gate_gradient_against_independent_hooks(name: str) -> None:
    model = SPECIMENS[name].build().requires_grad_(False)
    inputs = SPECIMENS[name].inputs(model)
    sites = find_sites(model).sites
    with watch(model, sites) as seen:
        seen.batch = batch_of(inputs)
        output(model, inputs).square().sum().backward()
        found = {site.id: seen.records[site.id].gate_gradient for site in sites}
    places = {site.id: (model.get_submodule(site.output), site.channels) for site in sites}
    with GateTensors(places, torch.float64) as gates:
        wanted = gates.gradients(output(model, inputs).square().sum())
    for site in sites:
        got = found[site.id]
        assert got is not None
        torch.testing.assert_close(got.sum(dim=(0, 1)), wanted[site.id], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "swin", "speech_to_text"])
def test_gates_of_each_example_act_on_it_alone(name: str) -> None:
    model = SPECIMENS[name].build().requires_grad_(False)
    inputs = SPECIMENS[name].inputs(model)
    sites = find_sites(model).sites
    site, batch = sites[-1], batch_of(inputs)
    gates = torch.ones(batch, 1, site.n_heads, 1, dtype=torch.float64)
    gates[1, 0, 0] = 0
    with torch.no_grad():
        plain = output(model, inputs)
        with gate(model, {site.id: gates}, sites):
            mixed = output(model, inputs)
        with gate(model, {site.id: gates[1, 0, :, 0]}, sites):
            whole = output(model, inputs)
    torch.testing.assert_close(mixed[0], plain[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mixed[1], whole[1], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(mixed[1], plain[1])


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama", "gpt_neox"])
@torch.no_grad()
def test_projection_is_the_sum_over_heads(name: str) -> None:
    model = SPECIMENS[name].build()
    sites = find_sites(model).sites
    inputs = SPECIMENS[name].inputs(model)
    written: dict[str, Tensor] = {}
    for site in sites:
        model.get_submodule(site.output).register_forward_hook(
            lambda module, args, result, key=site.output: written.__setitem__(key, result)
        )
    with watch(model, sites, gradients=False) as seen:
        seen.batch = batch_of(inputs)
        output(model, inputs)
    for site in sites:
        module, z = model.get_submodule(site.output), seen.records[site.id].output
        assert z is not None
        weight = module.weight if isinstance(module, Conv1D) else module.weight.T
        bias = 0 if module.bias is None else module.bias
        total = torch.zeros_like(written[site.output]) + bias
        for head in range(site.n_heads):
            channels = [channel for channel, owner in enumerate(site.channels) if owner == head]
            total = total + z[:, :, head] @ weight[channels]
        torch.testing.assert_close(total, written[site.output], rtol=1e-9, atol=1e-9)


def test_hooks_are_gone_after_an_exception() -> None:
    model = SPECIMENS["bitnet"].build()
    sites = find_sites(model).sites
    with pytest.raises(ZeroDivisionError), watch(model, sites):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), gate(model, {sites[0].id: torch.ones(8)}, sites):
        raise ZeroDivisionError
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_no_graph_below_the_first_site() -> None:
    model = SPECIMENS["bert"].build().requires_grad_(False)
    inputs = SPECIMENS["bert"].inputs(model)
    embedded: list[Tensor] = []
    model.bert.embeddings.register_forward_hook(lambda module, args, result: embedded.append(result))
    with watch(model, find_sites(model).sites) as seen:
        seen.batch = 3
        result = output(model, inputs)
    assert result.requires_grad
    assert not embedded[-1].requires_grad


def test_attention_backend_does_not_matter() -> None:
    model = SPECIMENS["bert"].build()
    inputs = SPECIMENS["bert"].inputs(model)
    sites = find_sites(model).sites
    gates = {sites[0].id: torch.tensor([1.0, 0, 1, 1, 1], dtype=torch.float64)}
    outputs = []
    with torch.no_grad(), gate(model, gates, sites):
        for backend in ("sdpa", "eager"):
            model.set_attn_implementation(backend)
            outputs.append(output(model, inputs))
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)  # eager's softmax is float32


def test_layout_orders_interleaved_channels() -> None:
    site = find_sites(SPECIMENS["bert"].build()).sites[0]
    channels = tuple(channel % site.n_heads for channel in range(len(site.channels)))
    interleaved = Site(**{**vars(site), "channels": channels})
    raw = torch.arange(2 * 3 * len(channels), dtype=torch.float64).view(2, 3, -1)
    found = Layout(interleaved).heads(raw, 2)
    for head in range(site.n_heads):
        assert torch.equal(found[:, :, head], raw[..., head :: site.n_heads])
