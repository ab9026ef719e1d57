"""Bugs that pruning tools had in the field, each as a test of the right behaviour; more stand in other tests."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import bert, configure, llama, pickled, rewrite
from pruning_cases import difference, masked, plan_of, said
from safetensors.torch import load_file
from transformers import PreTrainedModel
from zoo import SPECIMENS

import headscope
from headscope.cost import site_macs
from headscope.discovery import find_sites
from headscope.heads import HeadId
from headscope.inputs import probe_inputs
from headscope.layouts import save_native, save_portable
from headscope.matrices import site_shape
from headscope.models import LoadOptions, load
from headscope.native import _owning, native_config, native_counts
from headscope.plan import Plan
from headscope.pruning import PruneOptions
from headscope.pruning import prune as run
from headscope.request import Request
from headscope.selection import select
from headscope.study import Study, StudyOptions
from headscope.surgery import prune
from headscope.verify import computes_in_single

pytestmark = pytest.mark.usefixtures("in_process")
ENTRY = {"id": "encoder.self.0", "module": "bert", "call": 0, "heads": 2, "kv_heads": 2}


def cut(model: PreTrainedModel, spec: str, **options: int) -> Plan:
    """Take the named heads out of a model."""
    from headscope.location import Location
    from headscope.models import LoadedModel
    from headscope.tasks import embedding

    loaded = LoadedModel(model, "embedding", embedding.TASK, Location("model", Path()))
    study = Study(loaded, None, StudyOptions())
    plan = select(study, Request(heads=spec, **options), None).plan
    prune(model, study.sites, plan)
    return plan


def test_the_bias_table_stays_whole_and_each_layer_selects_its_heads() -> None:
    """T5, only the second layer of each stack: the first layer's table serves all, and generation works."""
    config = transformers.T5Config(
        d_model=12, d_kv=5, num_heads=3, num_layers=2, num_decoder_layers=2, d_ff=8, vocab_size=30,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    inputs, sites = probe_inputs(model), find_sites(model).sites
    second = [HeadId(site.id, 1) for site in sites if site.id.layer == 1]
    assert {str(head.site.kind) for head in second} == {"self", "causal", "cross"}
    plan = plan_of(sites, second)
    expected = masked(model, sites, plan, inputs)
    prune(model, sites, plan)
    tables = {name: tuple(p.shape) for name, p in model.named_parameters() if "relative_attention_bias" in name}
    assert set(tables.values()) == {(32, 3)}
    assert difference(expected, said(model, inputs)) <= 1e-9
    prompt = {name: value for name, value in inputs.items() if name in ("input_ids", "attention_mask")}
    limits = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**prompt, **limits), model.generate(**prompt, **limits, use_cache=False))


def test_pruning_one_depth_of_a_shared_layer_prunes_all_and_says_so() -> None:
    model = SPECIMENS["albert"].build()
    inputs, sites = SPECIMENS["albert"].inputs(model), find_sites(model).sites
    assert len(sites) > 2 and sites[0].shared_with
    heads = [HeadId(site.id, 0) for site in sites]
    expected = masked(model, sites, plan_of(sites, heads), inputs)
    plan = cut(model, "2:0")
    assert list(plan.removed) == heads
    assert difference(expected, said(model, inputs)) <= 1e-9


def test_a_share_of_28_heads(tmp_path: Path) -> None:
    """10 % of 28 heads: 25 do not divide the width, so Llama's configuration cannot say it; a portable one can."""
    folder = llama(tmp_path / "whole", hidden_size=56, num_attention_heads=28, num_key_value_heads=28, head_dim=2)
    done = headscope.prune(
        str(folder), output=tmp_path / "pruned", ratio=0.1, criterion="random", scope="layer", rounds=1
    )
    assert [len(done.plan.kept(site.id)) for site in done.plan.sites] == [25, 25]
    assert done.layout == "portable"
    assert any("does not accept these counts" in note for note in done.notes)
    weights = headscope.load(tmp_path / "pruned").state_dict()
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (50, 56)
    assert weights["model.layers.0.self_attn.o_proj.weight"].shape == (56, 50)


def test_native_only_lists_the_counts_that_are_possible(tmp_path: Path) -> None:
    folder = llama(tmp_path / "whole", hidden_size=24, num_attention_heads=6, num_key_value_heads=6, head_dim=4)
    with pytest.raises(headscope.errors.InvalidPlan, match="no native") as caught:
        run(str(folder), None, None, PruneOptions(Request(heads="0:0"), layout="native"))
    assert caught.value.hint is not None
    assert re.search(r"same 1, 2, 3, 4 heads", caught.value.hint)  # 5 does not divide 24
    model = headscope.load(folder)
    assert native_counts(model, find_sites(model).sites[0], 6, 6) == [1, 2, 3, 4]
    other = headscope.load(bert(tmp_path / "bert"))
    assert native_counts(other, find_sites(other).sites[0], 5, 5) == []


def test_a_head_size_apart_from_the_width_is_written_out(tmp_path: Path) -> None:
    """Hidden size 48 with 6 heads of 8, grouped; 4 are left: head_dim stays 8, and q is [32, 48]."""
    folder = llama(tmp_path / "whole", hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=8)
    model = headscope.load(folder, dtype="float64")
    cut(model, "0:0,1;1:2,3")
    config = native_config(model, find_sites(model).sites)
    assert not isinstance(config, str)
    save_native(model, config, tmp_path / "native")
    written = json.loads((tmp_path / "native" / "config.json").read_text())
    names = ("head_dim", "num_attention_heads", "num_key_value_heads", "hidden_size")
    assert [written[name] for name in names] == [8, 4, 2, 48]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "native", dtype=torch.float64)
    assert plain.model.layers[0].self_attn.q_proj.weight.shape == (32, 48)
    assert plain.model.layers[0].self_attn.o_proj.weight.shape == (48, 32)


@pytest.mark.parametrize("rounds", [1, 3, 5, 7])
def test_rounds_are_a_plan_of_whole_heads(samples: Path, rounds: int) -> None:
    """However many rounds, the last ends at the number asked for, and counts are read from the live model."""
    model = str(samples / "vit-digits")
    done = headscope.prune(model, ratio=0.4, rounds=rounds, criterion="random")
    total = sum(len(site.heads) for site in done.plan.sites)
    assert len(done.plan.removed) == int(0.4 * total + 0.5)
    taken = [head for entry in done.history for head in entry["taken"]]
    assert sorted(taken) == sorted(map(str, done.plan.removed))


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "bert"])
def test_only_whole_heads_leave_each_projection(name: str) -> None:
    """Query, key and value lose the same heads' rows, the output projection the same heads' inputs."""
    model = SPECIMENS[name].build()
    site = find_sites(model).sites[0]
    before = {piece.path: getattr(model.get_submodule(piece.module), piece.name).clone() for piece in site.slices}
    cut(model, "0:1")
    after = {piece.path: getattr(model.get_submodule(piece.module), piece.name) for piece in site.slices}
    for piece in site.slices:
        others = [index for piece_ in site.slices if piece_.path == piece.path for index in piece_.indices(1)]
        left = torch.tensor([index for index in range(len(piece.owner)) if index not in others])
        assert torch.equal(after[piece.path], before[piece.path].index_select(piece.axis, left))


def test_costs_after_pruning_follow_the_formula() -> None:
    """4·D·d·H for the projections and 2·T·d·H for scores and mixing, a token, with the heads that are left."""
    model = SPECIMENS["bert"].build()
    cut(model, "0:1,3")
    first = find_sites(model).sites[0]
    assert first.n_heads == 3
    tokens = 17
    macs = 4 * first.d_model * first.d_head * 3 + 2 * tokens * first.d_head * 3
    assert site_macs(site_shape(model, first), tokens) == macs


def test_a_pruned_checkpoint_never_loads_with_random_weights(tmp_path: Path) -> None:
    """Neither as its plain class nor under another task, whose head it lacks."""
    whole = headscope.load(bert(tmp_path / "whole"))
    cut(whole, "0:1;1:0,2")
    save_portable(whole, tmp_path / "pruned")
    for loader in (transformers.BertForSequenceClassification, transformers.AutoModelForSequenceClassification):
        with pytest.raises((RuntimeError, ValueError)):
            loader.from_pretrained(tmp_path / "pruned")
    with pytest.raises(headscope.errors.ModelError, match="task head"):
        headscope.inspect(
            str(tmp_path / "pruned"), options=StudyOptions(load=headscope.models.LoadOptions(task="question-answering"))
        )


GAP = {"module": "", "name": "weight", "axis": 0, "size": 8, "kept": [[0, 2], [4, 8]]}


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("parameters", {"bert.encoder.layer.0.attention.self.query.weight": [2**30, 2**30]}),
        ("parameters", {"bert.encoder.layer.0.attention.self.query.weight": "big"}),
        ("attributes", {"bert.encoder.layer.0.attention.self": {"__class__": 3}}),
        ("attributes", {"bert": 3}),
        ("settings", {"bert": {"hidden_size": "x"}}),
        ("arguments", {"bert": [{"where": "nowhere"}]}),
        ("arguments", {"bert": [{"where": "forward", "name": "x", "axis": 0, "heads": 2, "kept": [5]}]}),
        ("silent", {"bert": {"items": 4}}),
        ("sites", [{"id": "encoder.self.0"}]),
        ("sites", "none"),
        ("sites", [{"id": "encoder.self.0", "module": "bert", "call": 0, "heads": 5, "kv_heads": 5, "kept": [1]}]),
        ("sites", [{"id": "encoder.self.0", "module": "bert", "call": 0, "heads": 2**40, "kv_heads": 5}] * 2),
        (
            "sites",
            [{"id": "a.self.0", "module": "b", "call": 0, "heads": 2, "kv_heads": 2, "kept": [1, 1], "kv_kept": []}],
        ),
        (
            "sites",
            [{"id": "a.self.0", "module": "b", "call": 0, "heads": 2, "kv_heads": 2, "kept": [2], "kv_kept": [1]}],
        ),
        ("arguments", {"bert": [{"where": "forward", "name": "x", "axis": 0, "heads": 0, "kept": []}]}),
        ("silent", {"bert": {"items": [], "projection": None, "width": 2**30, "cache": False}}),
        ("filled", {"bert": {"gaps": []}}),
        ("filled", {"bert": {"gaps": [GAP | {"size": 2**30}], "left": {}}}),
        ("filled", {"bert": {"gaps": [GAP | {"kept": [[3, 4], [4, 5]]}], "left": {}}}),
        ("filled", {"bert": {"gaps": [GAP | {"kept": [[0, 9]]}], "left": {}}}),
        ("filled", {"bert": {"gaps": [GAP | {"name": "__class__"}], "left": {}}}),
        ("filled", {"bert": {"gaps": [], "left": {"x": {"axis": 0, "heads": 2, "kv_heads": 2, "kept": [0]}}}}),
        ("version", -5),
        ("version", 99),
        ("version", "one"),
    ],
)
def test_recipes_from_strangers_are_refused_in_one_line(tmp_path: Path, entry: str, value: object) -> None:
    model = headscope.load(bert(tmp_path / "whole"))
    cut(model, "0:1")
    save_portable(model, tmp_path / "pruned")
    path = tmp_path / "pruned" / "config.json"
    config = json.loads(path.read_text())
    config["headscope"][entry] = value
    path.write_text(json.dumps(config))
    with pytest.raises(headscope.errors.ModelError, match="config.json"):
        headscope.load(tmp_path / "pruned")


def test_strange_but_well_formed_recipes_fail_as_errors(tmp_path: Path) -> None:
    """A recipe that names other modules, or sets what is no count, ends in an error about the checkpoint."""
    model = headscope.load(bert(tmp_path / "whole"))
    cut(model, "0:1")
    save_portable(model, tmp_path / "pruned")
    path = tmp_path / "pruned" / "config.json"
    config = json.loads(path.read_text())
    config["headscope"]["attributes"] = {"bert": {"forward": 5}, "nowhere": {"n": 1}}
    config["headscope"]["silent"] = {"classifier": {"items": [], "projection": "gone", "width": 3, "cache": True}}
    path.write_text(json.dumps(config))
    with pytest.raises(headscope.errors.HeadscopeError):
        headscope.inspect(str(tmp_path / "pruned"))


def test_pickled_checkpoints_are_checked_too(tmp_path: Path) -> None:
    folder = pickled(bert(tmp_path / "whole"))
    configure(folder, headscope={"version": 1, "sites": "none"})
    with pytest.raises(headscope.errors.ModelError, match="headscope.sites"):
        load(str(folder), LoadOptions(allow_pickle=True))


def test_towers_that_no_input_reaches_keep_their_counts() -> None:
    """A native configuration changes the part that the pruned sites read, and no other of equal counts."""
    model = SPECIMENS["clip"].build()
    sites = [site for site in find_sites(model).sites if site.id.stack != "vision"]
    config = copy.deepcopy(model.config)
    owning = _owning(model, sites, config)
    assert owning and all(part is config.text_config for part in owning)


def test_float32_is_told_only_where_numbers_are_narrowed() -> None:
    for name, expected in (("vit", False), ("bart", False), ("bert", False), ("llama", True), ("gemma2", True)):
        assert computes_in_single(SPECIMENS[name].build()) is expected, name


def test_masked_after_pruned_keeps_the_recipe(tmp_path: Path) -> None:
    whole = bert(tmp_path / "whole")
    headscope.prune(str(whole), output=tmp_path / "pruned", heads="0:1")
    headscope.prune(str(tmp_path / "pruned"), output=tmp_path / "masked", heads="0:2;1:0", layout="masked")
    frame = headscope.inspect(str(tmp_path / "masked"))
    assert [head for head, flag in frame["flags"].items() if "dead" in flag] == ["encoder.self.0.2", "encoder.self.1.0"]
    assert "encoder.self.0.1" not in frame.index
    again = headscope.prune(str(tmp_path / "masked"), output=tmp_path / "again", heads="0:1,2;1:0")
    assert len(again.plan.removed) == 2
    at_once = headscope.prune(str(whole), output=tmp_path / "once", heads="0:1,2;1:0")
    assert at_once.verification.passed
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "once"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_attention_switch_of_the_run_is_that_of_its_proof(tmp_path: Path) -> None:
    options = StudyOptions(load=LoadOptions(attention="eager"))
    done = headscope.prune(str(bert(tmp_path / "whole")), output=tmp_path / "pruned", heads="0:1", options=options)
    assert done.verification.passed
    assert json.loads((tmp_path / "pruned" / "headscope.json").read_text())["proof"]


def test_pickles_keep_their_number_format(tmp_path: Path) -> None:
    folder = pickled(bert(tmp_path / "whole"))
    options = StudyOptions(load=LoadOptions(allow_pickle=True, dtype="bfloat16"))
    headscope.prune(str(folder), output=tmp_path / "pruned", heads="0:1", options=options)
    assert {tensor.dtype for tensor in load_file(tmp_path / "pruned" / "model.safetensors").values()} == {torch.float32}


def test_a_changed_checkpoint_is_noticed(samples: Path, tmp_path: Path) -> None:
    headscope.prune(str(samples / "vit-digits"), output=tmp_path / "pruned", heads="0:1")
    assert not [note for note in load(str(tmp_path / "pruned"), LoadOptions()).notes if "changed" in note]
    rewrite(tmp_path / "pruned", lambda tensors: tensors.update(next(iter({n: t * 2} for n, t in tensors.items()))))
    assert [note for note in load(str(tmp_path / "pruned"), LoadOptions()).notes if "changed since" in note]


def test_heads_of_an_emptied_layer_are_passed_over() -> None:
    model = SPECIMENS["llama"].build()
    count = find_sites(model).sites[0].n_heads
    cut(model, "0:" + ",".join(map(str, range(count))), min_heads=0)
    plan = cut(model, "0:0;1:" + ",".join(map(str, find_sites(model).sites[0].groups[0])))
    assert {str(head.site) for head in plan.removed} == {"decoder.causal.1"}
