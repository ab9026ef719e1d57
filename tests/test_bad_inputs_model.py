"""Bad model files from end to end: quantised, spare, zero and tied weights, and a file that changes under the proof."""

import math
import shutil

import pytest
import torch
from bad_inputs import collector, made_room, names, read_json, tiny_models  # noqa: F401
from checkpoints import BERT_QUERY, configure, refused, rewrite
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import headscope
from headscope.headers import read_headers

CASES, case = collector()
OUTPUT = "bert.encoder.layer.0.attention.output.dense.weight"


@case("B041")
def quantised_weights(room):
    """`inspect` works or says why not; `prune` never cuts packed weights."""
    methods = {"gptq": {"bits": 4}, "awq": {"bits": 4}, "bitsandbytes": {"load_in_4bit": True}}
    for method, more in (methods | {"fp8": {}, "unheard-of": {}}).items():
        model = configure(room.model(), quantization_config={"quant_method": method, **more})
        target = room.path / "small"
        ran = room.run("inspect", model)
        works = method == "unheard-of" or (method == "fp8" and ran.code == 0)  # not on every machine
        assert ran.code == 0 if works else refused(ran, 1, "cannot be loaded", "dequantise it first"), method
        for words in (["-o", target], ["--dry-run"]):
            assert refused(room.run("prune", model, "--heads", "0.0", *words), 1, "dequantise it first"), method
        assert not target.exists()
        shutil.rmtree(model)


@case("B048")
def spare_tensors(room):
    """They are counted on stderr and named in the manifest, and stay behind unless --keep-extra takes them along."""
    model = room.model()
    rewrite(
        model, lambda tensors: tensors.update({"z.weight": torch.arange(3.0), "y.b": torch.ones(2, dtype=torch.int8)})
    )
    kept, dropped = room.path / "kept", room.path / "dropped"
    ran = room.run("prune", model, "--heads", "0.0", "-o", dropped)
    assert ran.code == 0 and "note: 2 tensors of the checkpoint are not used" in ran.err
    assert read_json(dropped / "headscope.json")["unused_tensors"] == ["y.b", "z.weight"]
    assert not {"z.weight", "y.b"} & set(read_headers(dropped))
    assert room.run("prune", model, "--heads", "0.0", "-o", kept, "--keep-extra").code == 0
    stored = read_headers(kept)
    assert set(stored) == {"z.weight", "y.b", *read_headers(dropped)}
    with safe_open(kept / stored["z.weight"].file, framework="pt") as tensors:
        assert tensors.get_tensor("z.weight").tolist() == [0, 1, 2]
    again = room.run("inspect", kept)
    assert again.code == 0 and "2 tensors of the checkpoint are not used" in again.err
    assert again.out == room.run("inspect", dropped).out


@case("B051")
def weights_without_a_norm(room):
    """A zero head, a zero layer and denormal numbers are like nothing: empty cells with their reason, no warning."""
    model = rewrite(room.model(), lambda tensors: tensors[OUTPUT].zero_())
    ran = room.run("similarity", model, "--data", room.labelled(), "--format", "json")
    assert ran.code == 0
    assert (
        "note: zero norm: encoder.self.0.0, encoder.self.0.1, encoder.self.0.2 and 2 more, so output, cosine, ov"
        in ran.err
    )
    (room.path / "report.json").write_text(ran.out)
    report = read_json(room.path / "report.json")
    assert {"output", "cosine", "ov"} <= report["empty"].keys() and "qk" not in report["empty"]
    for row in report["rows"]:
        zero = row["a"].startswith("encoder.self.0.") or row["b"].startswith("encoder.self.0.")
        assert all((row[name] is None) is zero for name in ("output", "cosine", "ov")), row
    rewrite(model, lambda tensors: [tensors[name].fill_(1e-42) for name in tensors if "attention" in name])
    for words in (["similarity"], ["inspect"]):
        ran = room.run(*words, model, "--data", room.labelled())
        assert ran.code == 0 and "nan" not in ran.out.lower().replace("redundant", "") and "Warning" not in ran.err


@case("B056")
def tied_weights(room):
    """One matrix for embedding and head stays one, in the file and in the model that is loaded again."""
    target = room.path / "small"
    ran = room.run("prune", room.models("tied"), "--heads", "0:0,1;1:0,1", "-o", target)
    assert ran.code == 0 and "pruned and reloaded weights differ by 0 " in ran.err
    assert "lm_head.weight" not in read_headers(target)
    model = headscope.load(str(target))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@case("B102")
def a_bit_that_flips_on_the_disk(room):
    """The reload notices one bit, and says which tensor of which file; nothing is left under the target."""
    from headscope import publish

    true_save, target = publish.save_portable, room.path / "small"

    def spoilt(model, folder, **options):
        true_save(model, folder, **options)
        tensors = load_file(folder / "model.safetensors")
        tensors[BERT_QUERY].view(torch.int32)[0, 0] ^= 1
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    room.monkeypatch.setattr(publish, "save_portable", spoilt)
    ran = room.run("prune", room.models("classifier"), "--heads", "0.0", "-o", target)
    assert refused(ran, 1, "proof failed", BERT_QUERY, "model.safetensors", "SHA-256")
    assert not target.exists()


@case("B088")
def a_loss_that_is_no_number(room):
    """One batch whose loss overflows in float16 stops the run by name; float32 goes through."""
    model = rewrite(room.model(), lambda tensors: tensors["bert.pooler.dense.bias"].fill_(20))
    rewrite(model, lambda tensors: tensors["classifier.weight"].fill_(6e4))
    words = ["inspect", model, "--data", room.labelled(), "--measures", "importance"]
    assert refused(room.run(*words, "--dtype", "float16"), 1, "is not finite in float16", "--dtype float32 or bfloat16")
    ran = room.run(*words)
    assert ran.code == 0 and all(math.isfinite(float(row[9])) for row in ran.rows[1:])


@case("B092")
def a_layer_without_importance(room):
    """Its normalised scores are zeros, and a note says so; none divides by zero."""
    model = rewrite(room.model(), lambda tensors: tensors[OUTPUT].zero_())
    ran = room.run("inspect", model, "--data", room.labelled(), "--columns", "head,importance,importance_layer_norm")
    assert ran.code == 0 and "note: importance is 0 for every head of encoder.self.0, and" in ran.err
    assert [row[1:] for row in ran.rows[1:6]] == [["0.0", "0.0"]] * 5
    assert all(float(row[2]) > 0 for row in ran.rows[6:])


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("kind", names(CASES))
def test_bad_input(kind, room):
    CASES[kind](room)
