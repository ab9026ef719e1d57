"""`prune --merge-kv` from end to end: what is written, what is said of it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from checkpoints import Ran, command, refused, save
from pruning_cases import difference, said
from repair_cases import opened
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from zoo_configs import grouped

import headscope
from headscope import emphasis, merging, pruning
from headscope.discovery import find_sites
from headscope.errors import ProofFailed
from headscope.inputs import probe_inputs
from headscope.manifest import changed_files, read_manifest
from headscope.models import LoadOptions
from headscope.output_weights import Patch, swapped
from headscope.repair import applied
from headscope.request import Request
from headscope.study import StudyOptions

pytestmark = pytest.mark.usefixtures("in_process")
Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return command(monkeypatch, capsysbinary)


@pytest.fixture(scope="module")
def source(samples: Path) -> Path:
    return samples / "llama-gqa-web"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with 8 query heads on 4 key/value heads in 2 layers."""
    model = zoo.build(grouped("llama", "LlamaForCausalLM", n_kv_heads=4))
    return save(model, tmp_path_factory.mktemp("llama"))


def data(source: Path) -> tuple[object, ...]:
    return ("--data", source / "dev.jsonl", "--limit", 20, "--max-length", 40)


def test_the_llama_sample(run: Run, source: Path, tmp_path: Path) -> None:
    """Native, half the cache, less lost with the repair than without; plain transformers says what was judged."""
    target = tmp_path / "merged"
    ran = run("prune", source, *data(source), "--merge-kv", 2, "-o", target)
    assert ran.code == 0, ran.err
    assert [row[1:] for row in ran.rows[1:]] == [["8", "8", "4", "2", ""]] * 4
    for words in (
        "key/value heads merged in 4 sites, 2 left in each; all 32 heads stay",
        "this is not exact",
        "KV cache bytes a token: 2,048 -> 1,024 (-50.0%)",
        "repaired: the output projections of",
        "proof: whole and aligned outputs in float64",
        "proof: tied and merged outputs in float64",
        "is native",
    ):
        assert words in ran.err, words
    config = json.loads((target / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 2, 32)

    manifest = read_manifest(target)
    assert manifest is not None and not changed_files(target, manifest)
    merge, quality, proof = manifest["merge"], manifest["quality"], manifest["proof"]
    assert (merge["kv_heads"], merge["exact"], merge["values"]) == (2, False, "orthogonal maps")
    assert merge["sites"][3] == {"site": "decoder.causal.3", "groups": [[0, 1], [2, 3]]}
    assert manifest["plan"]["removed"] == []
    assert 0 < quality["after"]["divergence"] < quality["unrepaired"]["divergence"]
    assert proof["whole and aligned outputs in float64"]["difference"] <= 1e-9
    assert proof["tied and merged outputs in float64"]["difference"] <= 1e-9
    assert proof["pruned and reloaded outputs"]["difference"] == 0
    assert not any("masked" in name for name in proof)
    card = (target / "README.md").read_text()
    assert "This is not exact; all 32 query heads stay" in card
    assert "does not compute what its base model computes" in card
    assert f"divergence {quality['unrepaired']['divergence']:.6g} without" in card

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    prompt = {name: value for name, value in probe_inputs(model).items() if name != "use_cache"}
    cache = model(**prompt, use_cache=True).past_key_values
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 2, 2, 2]
    assert model.generate(**prompt, max_new_tokens=3).shape[1] == prompt["input_ids"].shape[1] + 3


def test_the_checkpoint_is_the_model_that_was_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the tied weights and the repair of the verdict in the whole model."""
    monkeypatch.setattr(emphasis, "EVEN", 1.0)  # a random model on few texts: else no repair is accepted
    case = opened("causal-llama", tmp_path)
    options, target = StudyOptions(load=LoadOptions(dtype="float64")), tmp_path / "merged"
    place, rows = str(tmp_path / "model"), str(tmp_path / "rows.jsonl")
    done = headscope.prune(place, rows, target, merge_kv=1, options=options)
    assert done.merge is not None and done.verdict is not None and done.plan.removed == ()
    whole, sites, inputs = case.model, case.study.sites, probe_inputs(case.model)
    before = said(whole, inputs)
    assert done.verdict.repair is not None
    with swapped(merging.tied(whole, sites, done.merge)), applied(whole, sites, done.verdict.repair):
        expected = said(whole, inputs)
    got = said(headscope.load(target, dtype="float64"), inputs)
    assert difference(expected, got) <= 1e-9 < 1e-2 < difference(before, got)


def test_without_data_by_weights(run: Run, tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    ran = run("prune", tiny, "--merge-kv", 1, "--layout", "portable", "-o", target)
    assert ran.code == 0, ran.err
    assert "is portable" in ran.err and "held-out" not in ran.err
    manifest = read_manifest(target)
    assert manifest is not None and manifest["quality"] is None and manifest["merge"]["kv_heads"] == 1
    assert "What the model scores now was not measured." in (target / "README.md").read_text()
    model = headscope.load(target)
    assert {(site.n_heads, site.n_kv_heads) for site in find_sites(model).sites} == {(8, 1)}


def test_a_merged_checkpoint_goes_on(run: Run, tiny: Path, tmp_path: Path) -> None:
    """It loses heads by their numbers, and merges again."""
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    assert run("prune", tiny, "--merge-kv", 2, "-o", first).code == 0
    ran = run("prune", first, "--heads", "0:4,5,6,7;1:0,1,2,3", "-o", second)
    assert ran.code == 0, ran.err
    assert [row[1:5] for row in ran.rows[1:]] == [["8", "4", "2", "1"]] * 2
    assert "kv_head" in headscope.inspect(str(second))
    again = run("prune", first, "--merge-kv", 1, "-o", third)
    assert again.code == 0, again.err
    entry = json.loads((third / "config.json").read_text())["headscope"]["sites"][0]
    assert (entry["heads"], entry["kv_heads"], entry["kept"], entry["kv_kept"]) == (8, 4, list(range(8)), [0])


def test_a_dry_run_costs_only(run: Run, source: Path, tmp_path: Path) -> None:
    ran = run("prune", source, *data(source), "--merge-kv", 1, "--dry-run")
    assert ran.code == 0, ran.err
    assert "KV cache bytes a token: 2,048 -> 512 (-75.0%)" in ran.err and "it would be native" in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--merge-kv", 3), ("--merge-kv 3", "possible: 1, 2")),
        (("--merge-kv", 4), ("the sites have 4 key/value heads", "possible: 1, 2")),
        (("--merge-kv", 0), ("--merge-kv",)),
        (("--merge-kv", 2, "--ratio", 0.5), ("--ratio and --merge-kv each say what to remove",)),
        (("--merge-kv", 2, "--heads", "0:1"), ("--heads and --merge-kv",)),
        (("--merge-kv", 2, "--layout", "masked"), ("--layout masked keeps all shapes",)),
        (("--merge-kv", 2, "--criterion", "random"), ("--criterion is about heads that are removed",)),
        (("--merge-kv", 2, "--scope", "uniform"), ("--scope is about",)),
        (("--merge-kv", 2, "--unit", "head"), ("--unit is about",)),
        (("--merge-kv", 2, "--min-heads", 2), ("--min-heads is about",)),
    ],
)
def test_what_cannot_be_meant(
    run: Run, tiny: Path, tmp_path: Path, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    assert refused(run("prune", tiny, *options, "-o", tmp_path / "x"), 2, *words)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("sample", ["vit-digits", "sentiment-minilm", "t5-g2p"])
def test_models_without_a_count_are_refused(run: Run, samples: Path, tmp_path: Path, sample: str) -> None:
    ran = run("prune", samples / sample, "--merge-kv", 1, "-o", tmp_path / "x")
    assert refused(ran, 2, "its configuration has no key/value head count of its own")


def test_groups_are_what_merging_is_about(source: Path) -> None:
    assert Request(merge_kv=2, unit="group").merge_kv == 2


def test_a_map_that_changes_the_model_is_no_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = pruning.aligned

    def wrong(*given) -> list[Patch]:  # type: ignore[no-untyped-def]
        first, *rest = true(*given)
        return [Patch(first.parameter, first.values * 1.0001), *rest]

    monkeypatch.setattr(pruning, "aligned", wrong)
    with pytest.raises(ProofFailed, match="whole and aligned outputs in float64 differ by"):
        headscope.prune(str(tiny), None, tmp_path / "x", merge_kv=2)
    assert list(tmp_path.iterdir()) == []


def test_a_merge_that_is_not_the_tied_model_is_no_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model, sites, merge) -> None:  # type: ignore[no-untyped-def]
        merging.keep_kv_heads(model, sites, {one.site: [0, 2] for one in merge.sites})

    monkeypatch.setattr(pruning, "merge_heads", wrong)
    with pytest.raises(ProofFailed, match="tied and merged outputs in float64 differ by"):
        headscope.prune(str(tiny), None, tmp_path / "x", merge_kv=2)
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_attention_changes(run: Run, tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    assert run("prune", tiny, "--merge-kv", 2, "-o", target).code == 0
    before, after = load_file(tiny / "model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name.rpartition("self_attn.")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{part}_proj.weight" for part in "qkvo"}
