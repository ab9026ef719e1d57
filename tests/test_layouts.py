"""Layouts: what is written loads again, bit for bit, and never by accident with other weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from pruning_cases import difference, masked, plan_of, said, uneven
from safetensors import safe_open
from test_surgery import SEPARABLE
from torch import Tensor
from transformers import PreTrainedModel
from zoo import SPECIMENS, Specimen, specimens

from headscope.discovery import find_sites
from headscope.layouts import auto_classes, save_masked, save_native, save_portable
from headscope.native import native_config
from headscope.plan import Plan
from headscope.portable import CODE_FILE, pruned_class
from headscope.reload import own_memory
from headscope.surgery import prune, silence_heads

UNIFORM = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "phi3", "cohere", "starcoder2", "gpt_oss", "vit")
REBUILT = ("marian",)
"""Their position tables are computed when they load, and the zoo draws them at random."""


@pytest.fixture(autouse=True)
def silent() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def loaded(kind: type, folder: Path) -> PreTrainedModel:
    """A checkpoint in float64, with eager experts as the zoo has them."""
    model, info = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return own_memory(model.eval())


def as_loaded(specimen: Specimen, folder: Path) -> PreTrainedModel:
    """The specimen after a first round trip: what a loader makes of its number formats and scales."""
    whole = specimen.build()
    whole.save_pretrained(folder)
    return loaded(type(whole), folder)


@pytest.mark.parametrize("specimen", specimens([name for name in SEPARABLE if name not in REBUILT]))
def test_portable_survives_two_round_trips_and_fails_loudly_without_its_code(
    specimen: Specimen, tmp_path: Path
) -> None:
    model = as_loaded(specimen, tmp_path / "whole")
    original = type(model)
    inputs, sites = specimen.inputs(model), find_sites(model).sites
    prune(model, sites, uneven(sites))
    expected = said(model, inputs)
    save_portable(model, tmp_path / "first")
    again = loaded(pruned_class(original), tmp_path / "first")
    assert difference(expected, said(again, inputs)) == 0
    again.save_pretrained(tmp_path / "second")
    assert (tmp_path / "second" / CODE_FILE).read_text() == (tmp_path / "first" / CODE_FILE).read_text()
    assert difference(expected, said(loaded(pruned_class(original), tmp_path / "second"), inputs)) == 0
    assert [site.heads for site in find_sites(again).sites] == [site.heads for site in find_sites(model).sites]
    assert len(json.dumps(model.config.headscope)) < 1500 * len(sites)
    with pytest.raises(RuntimeError, match="size mismatch|mismatched"):
        original.from_pretrained(tmp_path / "first", dtype=torch.float64)


def test_ignoring_mismatched_sizes_is_nowhere() -> None:
    for path in Path(__file__).parents[1].glob("headscope/**/*.py"):
        assert "ignore_mismatched_sizes=" not in path.read_text()


def kept_two_thirds(model: PreTrainedModel) -> Plan:
    """As many heads less in every site, other ones in each: one group, or under MHA two heads."""
    removed = []
    for turn, site in enumerate(find_sites(model).sites):
        groups = [site.groups[(turn + step) % site.n_kv_heads] for step in range(1 if site.group_size > 1 else 2)]
        removed += [head for head in site.heads if any(head.index in group for group in groups)]
    return plan_of(find_sites(model).sites, removed)


@pytest.mark.parametrize("name", UNIFORM)
def test_native_is_read_by_the_original_class(name: str, tmp_path: Path) -> None:
    model = as_loaded(SPECIMENS[name], tmp_path / "whole")
    inputs, sites = SPECIMENS[name].inputs(model), find_sites(model).sites
    prune(model, sites, kept_two_thirds(model))
    config = native_config(model, find_sites(model).sites)
    assert not isinstance(config, str), config
    expected = said(model, inputs)
    save_native(model, config, tmp_path / "native")
    again = loaded(type(model), tmp_path / "native")
    assert difference(expected, said(again, inputs)) == 0
    written = json.loads((tmp_path / "native" / "config.json").read_text())
    assert "auto_map" not in written
    assert written["head_dim"] == sites[0].d_head
    assert written["num_attention_heads"] == find_sites(model).sites[0].n_heads
    assert [site.heads for site in find_sites(again).sites] == [site.heads for site in find_sites(model).sites]


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bart"])
def test_architectures_without_a_head_size_have_no_native_form(name: str) -> None:
    model = SPECIMENS[name].build()
    prune(model, find_sites(model).sites, kept_two_thirds(model))
    assert isinstance(native_config(model, find_sites(model).sites), str)


def test_a_count_that_the_configuration_refuses_is_told_in_its_words() -> None:
    model = SPECIMENS["llama"].build()
    sites = find_sites(model).sites
    prune(model, sites, uneven(sites))
    reason = native_config(model, find_sites(model).sites)
    assert isinstance(reason, str)
    assert "different numbers of heads" in reason


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_masked_keeps_every_shape(name: str, tmp_path: Path) -> None:
    model = as_loaded(SPECIMENS[name], tmp_path / "whole")
    inputs, sites = SPECIMENS[name].inputs(model), find_sites(model).sites
    plan = uneven(sites)
    expected = masked(model, sites, plan, inputs)
    silence_heads(model, sites, plan)
    save_masked(model, tmp_path / "masked")
    assert shapes(tmp_path / "masked") == shapes(tmp_path / "whole")
    assert difference(expected, said(loaded(type(model), tmp_path / "masked"), inputs)) <= 1e-9


def shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def test_shards(tmp_path: Path) -> None:
    model = as_loaded(SPECIMENS["llama"], tmp_path / "whole")
    inputs, sites = SPECIMENS["llama"].inputs(model), find_sites(model).sites
    prune(model, sites, uneven(sites))
    expected = said(model, inputs)
    save_portable(model, tmp_path / "sharded", max_shard_size="30KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert difference(expected, said(loaded(pruned_class(type(model)), tmp_path / "sharded"), inputs)) == 0


def test_every_auto_class_of_the_type_is_served() -> None:
    found = auto_classes(SPECIMENS["bert"].build())
    for name in (
        "AutoModel",
        "AutoModelForMaskedLM",
        "AutoModelForSequenceClassification",
        "AutoModelForQuestionAnswering",
    ):
        assert found[name].startswith("modeling_headscope.Bert")


def test_the_bare_model_reads_a_checkpoint_with_a_head(tmp_path: Path) -> None:
    model = as_loaded(SPECIMENS["bert"], tmp_path / "whole")
    inputs, sites = SPECIMENS["bert"].inputs(model), find_sites(model).sites
    prune(model, sites, uneven(sites))
    save_portable(model, tmp_path / "pruned")
    bare = pruned_class(transformers.BertModel).from_pretrained(tmp_path / "pruned", dtype=torch.float64)
    with torch.no_grad():
        states: Tensor = own_memory(bare.eval())(**inputs).last_hidden_state
        expected = model(**inputs, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(states, expected)
    assert [site.heads for site in find_sites(bare).sites] == [site.heads for site in find_sites(model).sites]
