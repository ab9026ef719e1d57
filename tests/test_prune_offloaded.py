"""Pruning a model that is not in memory: every file is, to the byte, the one that is written of the model in memory."""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import LLAMA_SIZES, bert, command, llama, refused, save, t5
from pruning_cases import difference, said
from safetensors.torch import load_file, save_file
from tiny_tokenizers import texts, tokenizer, write
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)
from zoo import build
from zoo_configs import RECIPES

from headscope import layouts
from headscope.discovery import find_sites
from headscope.errors import DeviceError, UnsupportedModel
from headscope.heads import HeadId
from headscope.inputs import probe_inputs
from headscope.manifest import read_manifest
from headscope.matrices import total_parameters
from headscope.models import LoadOptions, load
from headscope.offload import VARIABLE, is_offloaded, stored, value
from headscope.plan import Plan, SiteHeads
from headscope.pruning import PruneOptions, prune
from headscope.publish import Publication
from headscope.reload import own_memory
from headscope.request import Request
from headscope.stand_in import in_memory
from headscope.stored import as_stored, sparing
from headscope.streaming import write_weights
from headscope.study import StudyOptions
from headscope.surgery import prune as take_out
from headscope.surgery import silence_heads
from headscope.tensor_files import write_tensors
from headscope.widening import widened

pytestmark = pytest.mark.usefixtures("in_process")
TINY = "cpu=12KB"


@pytest.fixture(autouse=True)
def budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any memory, and folders for weights that find no room in a folder of the test."""
    (tmp_path / "offloaded").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "offloaded"))
    monkeypatch.setenv(VARIABLE, TINY)


def gpt2(folder: Path) -> Path:
    """Conv1D projections, all heads of q, k and v in one matrix, and an output tied to the embeddings."""
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 32}
    return save(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0)), folder)


def vit(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "num_attention_heads": 5, "num_hidden_layers": 2, "intermediate_size": 12}
    return save(ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1)), folder)


def mixtral(folder: Path) -> Path:
    """Experts that are one tensor in the model, and one each in the files."""
    torch.manual_seed(0)
    return save(MixtralForCausalLM(MixtralConfig(**LLAMA_SIZES, num_local_experts=3)), folder)


def codegen(folder: Path) -> Path:
    """Heads laid out by fixed blocks: it cannot count fewer."""
    torch.manual_seed(0)
    return save(build(RECIPES["codegen"]), folder)


def marian(folder: Path) -> Path:
    """Positions that are computed, and left out of the files."""
    torch.manual_seed(0)
    return save(build(RECIPES["marian"]), folder)


def opened(folder: Path, device: str = "balanced", **options: object) -> PreTrainedModel:
    """The model of a folder; a balanced one wholly on the disk."""
    return load(str(folder), LoadOptions(device=device, on_disk=device == "balanced", **options)).model


def removing(model: PreTrainedModel, labels: str) -> tuple[tuple[object, ...], Plan]:
    """The sites of a model, and a plan that removes heads, such as `0.1 1.0` of its only stack."""
    sites = find_sites(in_memory(model)).sites
    wanted = [tuple(map(int, label.split("."))) for label in labels.split()]
    removed = [HeadId(site.id, head) for site in sites for layer, head in wanted if site.id.layer == layer]
    return sites, Plan(tuple(SiteHeads.of(site) for site in sites), tuple(sorted(removed)))


def pruned(source: Path, target: Path, device: str, heads: str, *, layout: str, shards: str, dtype: str) -> Path:
    """A checkpoint written by `prune`."""
    load = LoadOptions(device=device, dtype=dtype)
    request = Request(heads=heads, masked=layout == "masked", min_heads=0)
    options = PruneOptions(
        request, study=StudyOptions(load=load), layout=layout, publication=Publication(max_shard_size=shards)
    )
    done = prune(str(source), None, target, options)
    assert done.layout == layout and done.verification.passed
    return target


def same_files(first: Path, second: Path) -> list[str]:
    """The names of the files of two folders, which are the same to the byte."""
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    return names


@pytest.mark.parametrize(
    ("make", "heads", "layout", "shards"),
    [
        (llama, "0:0,1;1:2,3", "native", "6KB"),
        pytest.param(
            llama, "0:0,1,2,3,4,5;1:2,3", "portable", "5GB", marks=pytest.mark.slow
        ),  # and a layer without heads
        (bert, "0:1,2;1:0", "masked", "3KB"),
        pytest.param(bert, "0:0,1,2,3,4;1:3", "portable", "5GB", marks=pytest.mark.slow),
        (gpt2, "0:1;1:0,3", "masked", "8KB"),
        (gpt2, "0:1", "portable", "5GB"),
        (t5, "encoder.self.0.1", "masked", "5GB"),
        (t5, "decoder.cross.0.2", "portable", "1KB"),
        pytest.param(vit, "0:1;1:2,4", "masked", "3KB", marks=pytest.mark.slow),
        (mixtral, "0:0,1;1:2,3", "native", "6KB"),
    ],
)
def test_files_are_those_of_the_model_in_memory(
    make: Callable[[Path], Path],
    heads: str,
    layout: str,
    shards: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streamed: list[Path] = []

    def spy(model: PreTrainedModel, folder: Path, *, max_shard_size: str, original: bool) -> None:
        streamed.append(folder)
        write_weights(model, folder, max_shard_size=max_shard_size, original=original)

    monkeypatch.setattr(layouts, "write_weights", spy)
    source = make(tmp_path / "model")
    devices = ("cpu", "balanced")
    targets = [
        pruned(source, tmp_path / device, device, heads, layout=layout, shards=shards, dtype="auto")
        for device in devices
    ]
    names = same_files(*targets)
    assert len(streamed) == 1 and ("model.safetensors.index.json" in names) is (shards != "5GB")


@pytest.mark.parametrize("dtype", ["auto", pytest.param("float64", marks=pytest.mark.slow)])
def test_weights_in_bfloat16_stay_as_they_are(dtype: str, tmp_path: Path) -> None:
    """Whatever format the model was measured in, and with it the note that says so."""
    source = llama(tmp_path / "whole")
    save(load(str(source), LoadOptions(dtype="bfloat16")).model, tmp_path / "model")
    options = {"layout": "native", "shards": "4KB", "dtype": dtype}
    targets = [
        pruned(tmp_path / "model", tmp_path / device, device, "0:0,1;1:2,3", **options)
        for device in ("cpu", "balanced")
    ]
    assert len(same_files(*targets)) > 7
    assert read_manifest(targets[1])["dtype"] == "bfloat16"


def test_a_choice_by_data_runs_in_the_memory_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = tokenizer()
    run, place = command(monkeypatch, capsysbinary), bert(tmp_path / "model", vocab_size=len(words))
    words.save_pretrained(place)
    rows = [{"text": text, "label": number % 2} for number, text in enumerate(texts([5, 9, 3, 12, 7, 4, 8, 6] * 4))]
    data = write(tmp_path / "data.jsonl", rows)
    words = ["prune", place, "--data", data, "--ratio", 0.4, "--layout", "masked", "--seed", 3]
    whole = run(*words, "--no-compensate", "-o", tmp_path / "cpu", "--device", "cpu")
    spread = run(*words, "-o", tmp_path / "balanced", "--device", "balanced")
    assert whole.code == 0 == spread.code, (whole.err, spread.err)
    assert spread.out == whole.out
    assert "no repair was tried: it takes the whole model in memory" in spread.err and "no repair" not in whole.err
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "balanced" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes()
    manifests = [read_manifest(tmp_path / device) for device in ("cpu", "balanced")]
    losses = [manifest["quality"]["after"]["loss"] for manifest in manifests]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert manifests[0]["proof"].keys() == manifests[1]["proof"].keys()
    ran = run(*words, "--compensate", "-o", tmp_path / "other", "--device", "balanced")
    assert refused(ran, 1, "--compensate takes the whole model in memory", VARIABLE)
    assert not (tmp_path / "other").exists()


def test_a_cut_after_a_cut_is_read_through_both(tmp_path: Path) -> None:
    models = [opened(llama(tmp_path / device), device) for device in ("cpu", "balanced")]
    for labels in ("0.0 0.1 1.2 1.3", "0.2 0.4"):
        for model in models:
            take_out(model, *removing(model, labels))
    for model in models:
        silence_heads(model, *removing(model, "1.0"))
    whole, spread = models
    assert is_offloaded(spread) and spread.config.headscope == whole.config.headscope
    for name, tensor in whole.state_dict().items():
        assert torch.equal(value(spread, name), tensor), name
    attention, kept = spread.model.layers[0].self_attn, whole.model.layers[0].self_attn
    assert attention.o_proj.in_features == kept.o_proj.in_features == 8
    assert attention.o_proj.weight.device.type == "meta"
    assert stored(attention.o_proj, "weight").is_contiguous()
    inputs = probe_inputs(whole)
    assert difference(said(own_memory(whole), inputs), said(own_memory(spread), inputs)) == 0


def test_what_runs_on_filled_parameters_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    model = opened(codegen(tmp_path / "model"), task="embedding")
    before = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    with pytest.raises(UnsupportedModel, match="cannot lose these heads while its weights are offloaded"):
        take_out(model, *removing(model, "0.0"))
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == before


def test_a_layer_without_heads_whose_bias_would_not_be_loaded_is_refused(tmp_path: Path) -> None:
    model = opened(gpt2(tmp_path / "model"))
    sites, plan = removing(model, "0.0 0.1 0.2 0.3")
    with pytest.raises(UnsupportedModel, match="GPT2Attention cannot lose these heads"):
        take_out(model, sites, plan)


def test_the_proof_widens_what_it_reads(tmp_path: Path) -> None:
    """Outputs are those of the copy in float64 in memory; the model itself stays as it is."""
    outputs = []
    for device in ("cpu", "balanced"):
        model = opened(gpt2(tmp_path / device), device)
        copied = widened(model)
        wide = copied.model
        assert copied.note == "" and wide is not None
        assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        found = said(wide, probe_inputs(wide))
        assert {tensor.dtype for tensor in found} == {torch.float64}
        outputs.append(found)
        single = said(model, probe_inputs(model))
        assert 1e-9 < difference(found, [tensor.double() for tensor in single]) < 1e-5
    assert difference(*outputs) < 1e-15


def test_tied_weights_count_once_after_a_run(tmp_path: Path) -> None:
    whole, spread = (opened(gpt2(tmp_path / device), device) for device in ("cpu", "balanced"))
    said(spread, probe_inputs(spread))
    assert (
        total_parameters(spread)
        == total_parameters(whole)
        < sum(parameter.numel() for _, parameter in whole.named_parameters(remove_duplicate=False))
    )


@pytest.mark.parametrize("ignored", [None, ["transformer.ln_f.bias"]])
def test_weights_are_written_as_the_library_writes_them_after_a_run(ignored: list[str] | None, tmp_path: Path) -> None:
    whole, spread = (opened(gpt2(tmp_path / device), device) for device in ("cpu", "balanced"))
    whole._keys_to_ignore_on_save = spread._keys_to_ignore_on_save = ignored
    said(spread, probe_inputs(spread))  # accelerate leaves tied weights apart
    (tmp_path / "own").mkdir()
    write_weights(spread, tmp_path / "own", max_shard_size="8KB", original=True)
    whole.save_pretrained(tmp_path / "library", max_shard_size="8KB")
    for file in tmp_path.glob("library/*config.json"):
        file.unlink()
    assert "model.safetensors.index.json" in same_files(tmp_path / "library", tmp_path / "own")
    index = json.loads((tmp_path / "own" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert ("transformer.ln_f.bias" in index["weight_map"]) is (ignored is None)


def test_a_weight_that_is_in_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DeviceError, match="the weight of a MarianSinusoidalPositionalEmbedding is in no file"
    ) as caught:
        opened(marian(tmp_path / "model"))
    assert VARIABLE in str(caught.value.hint)


def test_what_was_partly_in_memory_is_cut_from_the_disk_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(llama(tmp_path / "model"))
    for dtype, room in (("float32", "cpu=30KB"), ("float64", "cpu=60KB")):
        monkeypatch.setenv(VARIABLE, room)
        options = LoadOptions(device="balanced", dtype=dtype)
        loaded = load(place, options)
        assert set(loaded.model.hf_device_map.values()) == {"cpu", "disk"}
        found = as_stored(place, loaded, options).model
        assert set(found.hf_device_map.values()) == {"disk"} and found.dtype == torch.float32
    whole = load(place, LoadOptions(device="cpu"))
    assert as_stored(place, whole, LoadOptions(device="cpu")) is whole


def test_a_stand_in_runs_experts_as_a_cpu_can(tmp_path: Path) -> None:
    """The kernels that a GPU runs experts by know neither all widths nor float64 there."""
    model = opened(mixtral(tmp_path / "model"))
    model.set_experts_implementation("grouped_mm")
    assert in_memory(model).config._experts_implementation == "eager"
    assert model.config._experts_implementation == "grouped_mm"


def test_a_stand_in_has_numbers_like_those_of_a_model(tmp_path: Path) -> None:
    """Small ones in matrices, in which no row or parameter is another's copy, and norms about 1."""
    found = in_memory(opened(llama(tmp_path / "model")))
    assert not found.training and not is_offloaded(found)
    rows = [row[:8] for parameter in found.parameters() if parameter.dim() == 2 for row in parameter]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows) > 100
    assert 0.01 < torch.stack(rows).std() < 0.03 and abs(torch.stack(rows).mean()) < 0.01
    norms = torch.cat([parameter for parameter in found.parameters() if parameter.dim() == 1])
    assert norms.mean() == pytest.approx(1, abs=0.02) and 0 < norms.std() < 0.1
    held = {parameter.untyped_storage().data_ptr() for parameter in found.parameters() if parameter.dim() == 2}
    assert len(held) == 1, "all are views of the same numbers"


def test_values_read_lie_where_torch_puts_them(tmp_path: Path) -> None:
    """Sums round by alignment, and in another file a tensor has another one."""
    model = opened(bert(tmp_path / "model"))
    places = {name: value(model, name).data_ptr() % 64 for name, _ in model.named_parameters()}
    assert any(places.values())  # in the file
    own_memory(model)
    assert not any(value(model, name).data_ptr() % 64 for name in places)


def test_nothing_is_held_of_a_model_that_is_not_to_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(llama(tmp_path / "model"))
    wanted = LoadOptions(device="balanced")
    assert sparing(place, wanted).on_disk
    assert not sparing(place, LoadOptions(device="cpu")).on_disk
    for room, on_disk in (("cpu=33KB", True), ("cpu=34KB", False), ("0=20KB,cpu=14KB", False)):  # 8376 float32
        monkeypatch.setenv(VARIABLE, room)
        assert sparing(place, wanted).on_disk is on_disk
    for dtype, room in (("bfloat16", 16), ("float64", 67)):  # 16,752 and 67,008 bytes
        for more in (0, 1):
            monkeypatch.setenv(VARIABLE, f"cpu={room + more}KB")
            assert sparing(place, replace(wanted, dtype=dtype)).on_disk is (more == 0)
    monkeypatch.delenv(VARIABLE)
    assert not sparing(place, wanted).on_disk


def test_a_file_is_written_as_the_library_writes_it(tmp_path: Path) -> None:
    kinds = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16]
    kinds += [torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64, torch.int64, torch.uint64]
    kinds += [torch.float8_e5m2, torch.float8_e4m3fn]
    tensors = {f"{number % 3}.{kind}": torch.arange(6).view(2, 3).to(kind) for number, kind in enumerate(kinds)}
    tensors |= {
        "b": torch.ones(3),
        'a\u00e9\u4e00\U0001f600\n"': torch.ones(2),
        "": torch.zeros(()),
        "B": torch.ones(0, 4),
    }
    save_file(tensors, tmp_path / "library", {"format": "pt"})
    write_tensors(tmp_path / "own", {name: one.to("meta") for name, one in tensors.items()}, tensors.__getitem__)
    assert (tmp_path / "own").read_bytes() == (tmp_path / "library").read_bytes()


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    """What is read for one is let go before the next is read."""
    known: list[weakref.ref[Tensor]] = []

    def read(name: str) -> Tensor:
        assert not [one for one in known if one() is not None]
        found = torch.full((3,), float(name))
        known.append(weakref.ref(found))
        return found

    write_tensors(tmp_path / "file", {str(number): torch.empty(3, device="meta") for number in range(4)}, read)
    assert len(known) == 4 and load_file(tmp_path / "file")["2"].tolist() == [2.0] * 3
