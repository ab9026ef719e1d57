"""A model that is spread over CPU and disk gives what it gives in memory, and holds one layer at a time."""

from __future__ import annotations

import filecmp
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from checkpoints import LLAMA_QUERY, command, llama, pickled, refused, rewrite
from pandas.testing import assert_frame_equal
from safetensors.torch import load_file
from task_cases import BERT, CASES, Case, recipe
from tiny_tokenizers import save, texts, tokenizer, write
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

import headscope
from headscope.capture import watch
from headscope.checkpointed import again, offloaded_layers
from headscope.errors import ModelError, UsageError
from headscope.models import LoadOptions, load
from headscope.objective import Objective, Wanted
from headscope.offload import VARIABLE, home, is_offloaded, max_memory, spread, stored
from headscope.study import Study, StudyOptions, batches

LAST = "model.layers.1.mlp.down_proj.weight"
ALBERT = Case(
    "text-classification",
    recipe("albert", "AlbertForSequenceClassification", num_labels=3),
    BERT,
    CASES["single"].rows,
    CASES["single"].ask,
)
SPREAD = {
    "single": ("weights", "importance", "sensitivity", "effect", "attention", "only", "ablation"),
    "causal-llama": ("weights", "importance", "sensitivity", "effect", "attention"),
    "seq2seq-t5": ("importance", "attention"),
    "image-classification": ("importance", "sensitivity"),
}
"""Cases that find no room in the budget, and what is measured on them."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders for weights that find no room are made in a folder of the test."""
    place = tmp_path / "offloaded"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def opened(case: Case, folder: Path, device: str) -> Study:
    """A study of a case in float64, written to disk before where it is not yet there."""
    place, rows = folder / "model", folder / "rows.jsonl"
    if not place.exists():
        save(place, case.build(), case.companion())
        write(rows, case.rows)
    return Study.open(str(place), str(rows), StudyOptions(load=LoadOptions(dtype="float64", device=device)))


@pytest.mark.parametrize("name", SPREAD)
def test_scores_are_those_of_the_model_in_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cpu=12KB")
    whole, spread = (opened(CASES[name], tmp_path, device) for device in ("cpu", "balanced"))
    assert is_offloaded(spread.loaded.model) and not is_offloaded(whole.loaded.model)
    assert "disk" in spread.loaded.model.hf_device_map.values()
    assert spread.sites == whole.sites
    assert spread.provenance() == whole.provenance()
    found, wanted = spread.scores(SPREAD[name]), whole.scores(SPREAD[name])
    assert found.loss == pytest.approx(wanted.loss, rel=1e-12) and found.notes == wanted.notes
    for column, values in wanted.values.items():
        for site, value in values.items():
            assert_close(found.values[column][site], value, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_gates_of_each_example_get_their_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cpu=12KB")
    found = []
    for device in ("cpu", "balanced"):
        study = opened(CASES["causal-llama"], tmp_path, device)
        objective, batch = Objective(study.loaded.model, study.loaded.task, study.sites), batches(study)[0]
        gates = {site.id: torch.full((len(batch), site.n_heads), 0.7) for site in study.sites}
        found.append(objective.apart(batch, gates, lambda a, b: (a.double() - b.double()).square().sum(dim=-1)))
    assert_close(found[1].distance, found[0].distance, rtol=1e-6, atol=0)
    for site, pulls in found[0].pulls.items():
        assert pulls.abs().max() > 0
        assert_close(found[1].pulls[site], pulls, rtol=1e-6, atol=1e-9)


def test_the_backward_pass_keeps_no_weight_of_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cpu=12KB")
    study = opened(CASES["causal-llama"], tmp_path, "balanced")
    model, batch = study.loaded.model, batches(study)[0]
    layers = list(model.model.layers)
    weights = {tuple(layers[0].mlp.up_proj.weight.shape), tuple(layers[0].mlp.up_proj.weight.T.shape)}
    assert offloaded_layers(model, study.sites) == layers
    runs: list[tuple[int, bool]] = []
    for place, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(lambda *_, place=place: runs.append((place, again())))
    for layerwise in (True, False):
        objective, kept, _ = Objective(model, study.loaded.task, study.sites), [], runs.clear()
        objective._layers = layers if layerwise else []

        def pack(tensor: torch.Tensor, kept: list[tuple[int, ...]] = kept) -> torch.Tensor:
            kept.append(tuple(tensor.shape))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), watch(model, study.sites) as seen:
            objective.run(batch, seen, Wanted(gradient=True, draws=2))
        forth = [(place, False) for place in range(len(layers))]
        back = [(place, True) for place in reversed(range(len(layers)))]
        assert bool(weights & set(kept)) is not layerwise
        assert runs == (forth + 3 * back if layerwise else forth)
    assert not [module for module in model.modules() if "forward" in vars(module) and not hasattr(module, "_hf_hook")]


def test_layers_that_several_share_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cpu=1KB")
    study = opened(ALBERT, tmp_path, "balanced")
    assert is_offloaded(study.loaded.model) and study.sites[0].shared_with
    assert offloaded_layers(study.loaded.model, study.sites) == []
    whole = opened(ALBERT, tmp_path, "cpu")
    for site, value in whole.scores(["importance"]).values["importance"].items():
        assert_close(study.scores(["importance"]).values["importance"][site], value, rtol=1e-9, atol=1e-12)


def test_pairs_of_heads_are_those_of_the_model_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cpu=12KB")
    study = opened(CASES["causal-llama"], tmp_path, "cpu")
    name, data = study.loaded.location.name, str(tmp_path / "rows.jsonl")
    measures = ["attention", "hellinger", "output", "cosine", "qk", "ov"]
    loads = [LoadOptions(dtype="float64", device=device) for device in ("cpu", "balanced")]
    whole, spread = (
        headscope.similarity(name, data, measures=measures, importance=True, options=StudyOptions(load=one))
        for one in loads
    )
    assert_frame_equal(spread, whole, rtol=1e-9, atol=1e-12)
    assert len(whole) > 10


def test_every_weight_is_read_for_values_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cpu=2KB")
    folder = rewrite(llama(tmp_path / "model"), lambda tensors: tensors[LAST].fill_(torch.inf))
    with pytest.raises(ModelError, match=f"values of {LAST} are NaN or infinite"):
        load(str(folder), LoadOptions(device="balanced"))


def test_inputs_go_where_the_model_runs_though_no_weight_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "cpu=1KB")
    model = load(str(llama(tmp_path / "model")), LoadOptions(device="balanced")).model
    assert set(model.hf_device_map.values()) == {"disk"}
    assert model.device.type == "meta" and home(model) == torch.device("cpu")
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.device.type == "meta"
    kept = load_file(tmp_path / "model" / "model.safetensors")[LLAMA_QUERY]
    assert torch.equal(stored(attention.q_proj, "weight"), kept)


@pytest.mark.parametrize("form", ["safetensors", "pickle"])
def test_the_folder_of_weights_goes_with_the_model(
    form: str, tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "cpu=2KB")
    folder = llama(tmp_path / "model")
    if form == "pickle":
        pickled(folder)
    loaded = load(str(folder), LoadOptions(device="balanced", allow_pickle=True))
    (place,) = own_folder.iterdir()
    assert bool(list(place.iterdir())) is (form == "pickle")
    ids = torch.tensor([[1, 2, 3]])
    whole = load(str(folder), LoadOptions(device="cpu", allow_pickle=True)).model(ids).logits
    assert_close(loaded.model(ids).logits, whole, rtol=1e-6, atol=1e-6)
    del loaded
    gc.collect()
    assert list(own_folder.iterdir()) == []


def test_a_model_that_does_not_load_leaves_no_folder(
    tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def fail(**arguments: Any) -> Any:
        made.append(Path(arguments["offload_folder"]).is_dir())
        raise MemoryError

    with pytest.raises(MemoryError):
        spread(fail, None)
    assert made == [True] and list(own_folder.iterdir()) == []


def test_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert max_memory() is None and max_memory(" ") is None
    assert max_memory("0=20GB, cpu = 1.5 GiB,1=5kb,2=2TB") == {0: 20 * 10**9, "cpu": 3 * 2**29, 1: 5000, 2: 2 * 10**12}
    for wrong in ("120MB", "cpu", "cpu=", "cpu=120", "disk=1GB", "cpu=1GB,", "-1=1GB", "cpu=xMB"):
        with pytest.raises(UsageError, match=VARIABLE):
            max_memory(wrong)


def test_what_needs_all_weights_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run, place = command(monkeypatch, capsysbinary), save(tmp_path / "model", CASES["single"].build(), tokenizer())
    data = write(tmp_path / "rows.jsonl", CASES["single"].rows)
    out, curve = ["-o", tmp_path / "out"], ["--curve", tmp_path / "curve.csv"]
    commands = (
        ["inspect", place, "--check"],
        ["prune", place, "--merge-kv", 1, *out],
        ["prune", place, "--data", data, *curve],
        ["prune", place, "--ratio", 0.5, "--data", data, "--compensate", *out],
    )
    for words in commands:
        monkeypatch.setenv(VARIABLE, "cpu=12KB")
        assert refused(run(*words, "--device", "balanced"), 1, "takes the whole model in memory", VARIABLE)
        monkeypatch.setenv(VARIABLE, "cpu=1")
        assert refused(run(*words, "--device", "balanced"), 2, f"{VARIABLE}: 'cpu=1' is no budget")
    assert not (tmp_path / "out").exists() and not (tmp_path / "curve.csv").exists()


MEASURED = """
import re, sys
import accelerate, headscope.cli, headscope.pruning
from transformers import LlamaForCausalLM
def peak(): return re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
before, sys.argv = peak(), ["headscope", *sys.argv[1:]]
code = headscope.cli._run()
print(before, peak())
sys.exit(code)
"""
"""Prints kilobytes; not those of getrusage, which begin with what the starting process holds."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 740 MB with a tokenizer."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 1024, "intermediate_size": 2736, "num_hidden_layers": 16, "vocab_size": 300}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64))
    assert sum(parameter.numel() for parameter in model.parameters()) * 4 > 740e6
    model.save_pretrained(folder, max_shard_size="200MB")
    tokenizer("llama").save_pretrained(folder)
    return folder


def measured(*words: object) -> list[int]:
    """The bytes that a process held at most, before and after it ran `headscope` with 120 MB allowed."""
    environment = os.environ | {VARIABLE: "cpu=120MB", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURED, *map(str, words)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [1024 * int(kilobytes) for kilobytes in ran.stdout.splitlines()[-1].split()]


def told(device: str, before: int, peak: int) -> None:
    print(f"{device}: {peak / 1e6:.0f} MB, of that {before / 1e6:.0f} MB before")


@pytest.mark.slow
def test_a_model_of_seven_budgets_stays_within_twice_its_budget(large: Path, tmp_path: Path) -> None:
    """740 MB of weights in 120 MB: importance as in memory, the process below 600 MB with its 390 MB of libraries."""
    data = write(tmp_path / "data.jsonl", [{"text": text} for text in texts([5, 12, 16, 7, 9, 4])])
    words = ["inspect", large, "--data", data, "--batch-size", "2", "--measures", "weights,importance", "--no-progress"]
    peaks = {
        device: measured(*words, "--device", device, "-o", tmp_path / f"{device}.csv") for device in ("cpu", "balanced")
    }
    assert_frame_equal(*(pandas.read_csv(tmp_path / f"{device}.csv") for device in peaks), rtol=1e-6)
    (_, whole), (before, spread) = peaks.values()
    for device, peak in peaks.items():
        told(device, *peak)
    assert whole > before + 700e6
    assert spread < 600 * 2**20 and spread - before < 2 * 120e6


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["native", "masked"])
def test_a_model_of_six_budgets_is_pruned_from_the_disk(layout: str, large: Path, tmp_path: Path) -> None:
    """The files are those of the model in memory; choice, proof and writing hold less than the 120 MB that are allowed,
    beside the 400 MB of Python, PyTorch and transformers.
    """
    words = ["prune", large, "--criterion", "random", "--ratio", "0.5", "--scope", "uniform", "--layout", layout]
    words += ["--no-progress", "--max-shard-size", "100MB"]
    before, peak = measured(*words, "--device", "balanced", "-o", tmp_path / "spread")
    told(f"pruned {layout} from the disk", before, peak)
    _, whole = measured(*words, "--device", "cpu", "-o", tmp_path / "whole")
    told(f"pruned {layout} in memory", before, whole)
    names = sorted(file.name for file in (tmp_path / "whole").iterdir())
    assert len(names) > 9
    for name in names:
        assert filecmp.cmp(tmp_path / "whole" / name, tmp_path / "spread" / name, shallow=False), name
    assert whole > before + 700e6
    assert peak - before < 120e6
