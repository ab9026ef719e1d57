"""Every fault of a checkpoint is one line with its reason and exit code; nothing of it is run or made up."""

import json
import os
import resource
import time
import warnings

import pytest
import torch
from checkpoints import (
    BERT_QUERY,
    LLAMA_QUERY,
    bert,
    command,
    configure,
    gguf_llama,
    llama,
    pickled,
    point,
    refused,
    rewrite,
    sharded,
    t5,
)
from tiny_tokenizers import SIZE, tokenizer
from transformers import BertModel

from headscope.errors import DeviceError, ModelError, UsageError
from headscope.headers import read_headers
from headscope.models import LoadOptions, load
from headscope.weights import non_finite


@pytest.fixture
def run(monkeypatch, capsysbinary):
    return command(monkeypatch, capsysbinary)


def set_nan(tensors):
    tensors[BERT_QUERY][0, :3] = float("nan")
    tensors[BERT_QUERY][1, 0] = float("inf")


class Canary:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def test_a_healthy_model_is_ready_to_be_measured(tmp_path):
    loaded = load(str(bert(tmp_path, attention_probs_dropout_prob=0.5)), LoadOptions())
    assert loaded.task_name == "text-classification"
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.notes, loaded.non_finite, loaded.value_bytes) == ((), {}, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["no config.json", "a model folder needs"]),
        ("", ["config.json: empty"]),
        ("[1]", ["config.json: a JSON object is needed, not an array"]),
        ('{"model_type":', ["config.json: cut short at line 1 column 15"]),
        ("hello", ["config.json: not JSON at line 1 column 1"]),
        ("{}", ["config.json has no model_type", "such as bert"]),
        ('{"model_type": "brt"}', ["unknown model_type 'brt'", "bert", "known: "]),
        ('{"model_type": ["bert"]}', ["unknown model_type ['bert']"]),
        ('{"model_type": "bert", "architectures": [5]}', ["architectures is [5], expected a list"]),
    ],
)
@pytest.mark.parametrize("more", [[], ["--check"], ["--by", "model"]], ids=["head", "check", "model"])
def test_config_that_cannot_be_read(run, tmp_path, text, words, more):
    bert(tmp_path)
    if text is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_text(text)
    assert refused(run("inspect", tmp_path, *more), 1, *words)


@pytest.mark.parametrize("value", [0, -4, 3.5, "4", None, 10**9, True])
def test_impossible_head_counts(run, tmp_path, value):
    configure(bert(tmp_path), num_attention_heads=value)
    shown = repr(value)
    for more in ([], ["--check"], ["--by", "layer"]):
        assert refused(run("inspect", tmp_path, *more), 1, f"num_attention_heads is {shown}")


def test_key_value_heads_must_divide(run, tmp_path):
    configure(llama(tmp_path), num_key_value_heads=4)
    assert refused(run("inspect", tmp_path), 1, "num_key_value_heads 4 does not divide num_attention_heads 6")


@pytest.mark.parametrize("size", [10**9, 10**12])
@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size"])
def test_absurd_sizes_are_refused_quickly_and_in_little_memory(run, tmp_path, field, size):
    configure(bert(tmp_path), **{field: size})
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    assert run("inspect", tmp_path).code == 1
    checked = run("inspect", tmp_path, "--check")
    assert checked.code == 1
    assert str(size) in checked.out + checked.err
    assert time.monotonic() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # kB: 1 GB


def test_missing_weights(run, tmp_path):
    rewrite(bert(tmp_path / "bert"), lambda tensors: tensors.pop(BERT_QUERY))
    for more in ([], ["--check"], ["--by", "model"]):
        assert refused(run("inspect", tmp_path / "bert", *more), 1, f"{BERT_QUERY} is missing")
    query = "decoder.block.0.layer.1.EncDecAttention.q.weight"
    rewrite(t5(tmp_path / "t5"), lambda tensors: tensors.pop(query))
    ran = run("inspect", tmp_path / "t5")
    assert refused(ran, 1, f"{query} is missing")
    assert "task head" not in ran.err


def test_missing_task_head(run, tmp_path):
    bert(tmp_path, BertModel)
    words = ("the task head is not in this checkpoint", "classifier", "--task embedding")
    assert refused(run("inspect", tmp_path, "--task", "text-classification"), 1, *words)
    configure(tmp_path, architectures=["BertForSequenceClassification"])
    assert refused(run("inspect", tmp_path), 1, *words)
    assert run("inspect", tmp_path, "--task", "embedding").code == 0


def test_non_finite_weights(run, tmp_path):
    rewrite(bert(tmp_path), set_nan)
    assert refused(run("inspect", tmp_path), 1, f"4 values of {BERT_QUERY} are NaN or infinite", "--check")
    tolerant = load(str(tmp_path), LoadOptions(tolerate_non_finite=True))
    assert tolerant.non_finite == {BERT_QUERY: 4} == non_finite(tolerant.model)


def test_shapes_that_contradict_the_config(run, tmp_path):
    configure(llama(tmp_path), num_attention_heads=12)
    assert refused(run("inspect", tmp_path), 1, "other shapes than config.json says", "--check")
    assert refused(run("inspect", tmp_path, "--by", "model"), 1, "other shapes than config.json says")


@pytest.mark.parametrize("name", ["../outside.safetensors", "{folder}/outside.safetensors", "link.safetensors"])
def test_weights_outside_the_folder_are_not_opened(run, tmp_path, name):
    folder = sharded(tmp_path / "model")
    (tmp_path / "outside.safetensors").write_bytes(b"not to be opened")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    point(folder, LLAMA_QUERY, name.format(folder=tmp_path))
    for more in ([], ["--check"], ["--by", "model"]):
        assert refused(run("inspect", folder, *more), 1, "outside" if "link" not in name else "leaves the folder")


def test_other_ways_out_of_the_folder(run, tmp_path):
    folder = configure(bert(tmp_path / "model"), transformers_weights="../other.safetensors")
    assert refused(run("inspect", folder), 1, "'../other.safetensors'")
    folder = pickled(bert(tmp_path / "pickle"))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {BERT_QUERY: "../x.bin"}}))
    assert refused(run("inspect", folder, "--allow-pickle"), 1, "'../x.bin'")


def test_pickles_are_refused_unless_allowed(run, tmp_path):
    plain = run("inspect", bert(tmp_path))
    pickled(tmp_path)
    for more in ([], ["--check"], ["--by", "model"]):
        assert refused(run("inspect", tmp_path, *more), 1, "only pickled weights", "--allow-pickle")
    assert run("inspect", tmp_path, "--allow-pickle").out == plain.out


def test_a_malicious_pickle_is_never_run(run, tmp_path):
    canary = tmp_path / "canary"
    pickled(bert(tmp_path / "model"), evil=Canary(canary))
    assert refused(run("inspect", tmp_path / "model"), 1, "only pickled weights")
    for more in ([], ["--check"]):
        ran = run("inspect", tmp_path / "model", "--allow-pickle", *more)
        assert refused(ran, 1, "its pickle is refused", "system")
    assert not canary.exists()


def test_safetensors_go_before_a_pickle(run, tmp_path):
    plain = run("inspect", bert(tmp_path))
    pickled(tmp_path, keep=True, **{BERT_QUERY: torch.zeros(20, 20)})
    for more in (["--draws", "1"], ["--allow-pickle"], ["--by", "layer"], ["--check"]):
        ran = run("inspect", tmp_path, *more)
        assert ran.code == 0
        assert "note: pytorch_model.bin is ignored" in ran.err
        assert ran.out == plain.out or more[0] in ("--by", "--check")


def test_extra_tensors_are_a_note(run, tmp_path):
    rewrite(bert(tmp_path), lambda tensors: tensors.update({"z.weight": torch.ones(3), "a\x1b[31m": torch.ones(2)}))
    ran = run("inspect", tmp_path)
    assert ran.code == 0
    assert "note: 2 tensors of the checkpoint are not used by this task, such as a\\x1b[31m" in ran.err
    assert "\x1b" not in ran.err + ran.out


def test_pruned_and_quantised_checkpoints(run, tmp_path):
    configure(bert(tmp_path), pruned_heads={"0": [1]})
    assert refused(run("inspect", tmp_path, "--by", "model"), 1, "pruned_heads")
    configure(tmp_path, "pruned_heads", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert refused(run("inspect", tmp_path), 1, "requires bitsandbytes")  # which is no dependency


def test_code_that_comes_with_the_model(run, tmp_path):
    canary = tmp_path / "canary"
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    source = f"open({str(canary)!r}, 'w').close()\nfrom transformers import BertConfig\n"
    source += "from transformers import BertForSequenceClassification as OwnModel\n"
    source += "class OwnConfig(BertConfig):\n    model_type = 'own'\nOwnModel.config_class = OwnConfig\n"
    folder = configure(bert(tmp_path / "model"), model_type="own", auto_map=code)
    (folder / "own.py").write_text(source)
    for more in ([], ["--check"], ["--by", "model"]):
        words = ("needs code that comes with it", "--trust-remote-code")
        assert refused(run("inspect", folder, *more), 1, *words)
    configure(folder, model_type="bert")
    known = run("inspect", folder)
    assert known.code == 0
    assert "the code that comes with the model is not run" in known.err
    assert not canary.exists()


def test_gguf(run, tmp_path):
    stored = gguf_llama(tmp_path / "tiny.gguf")
    loaded = load(str(tmp_path / "tiny.gguf"), LoadOptions())
    weight = loaded.model.get_parameter("model.layers.1.self_attn.v_proj.weight")
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, torch.from_numpy(stored["blk.1.attn_v"]), rtol=0, atol=0)
    assert not hasattr(loaded.model.config, "quantization_config")
    ran = run("inspect", tmp_path / "tiny.gguf", "--columns", "head,kv_head,parameters")
    assert (ran.code, len(ran.rows)) == (0, 13)
    assert ran.rows[4] == ["decoder.causal.0.3", "1", "192"]
    (tmp_path / "texts.txt").write_text("a b c d\nabc d e f\nb c a\n")
    measured = run("inspect", tmp_path / "tiny.gguf", "--data", tmp_path / "texts.txt", "--measures", "importance")
    assert (measured.code, len(measured.rows)) == (0, 13)
    assert "3 examples" in measured.err


@pytest.mark.parametrize("data", [b"hello", b"GGUF" + bytes(50), b""])
def test_broken_gguf(run, tmp_path, data):
    (tmp_path / "x.gguf").write_bytes(data)
    assert refused(run("inspect", tmp_path / "x.gguf"), 1, "x.gguf")


def test_devices_and_number_formats(run, tmp_path):
    bert(tmp_path)
    if not torch.cuda.is_available():
        for more in ([], ["--by", "model"]):
            assert refused(run("inspect", tmp_path, "--device", "cuda", *more), 1, "no CUDA device", "--device cpu")
        with pytest.raises(DeviceError):
            load(str(tmp_path), LoadOptions(device="cuda:0"))
    assert refused(run("inspect", tmp_path, "--device", "cdua"), 2, "did you mean 'cuda'?")
    assert refused(run("inspect", tmp_path, "--device", "meta"), 2, "not supported")
    with pytest.raises(UsageError, match="float17"):
        load(str(tmp_path), LoadOptions(dtype="float17"))
    for name in ("float32", "bfloat16", "float16", "float64"):
        assert load(str(tmp_path), LoadOptions(dtype=name)).model.dtype == getattr(torch, name)


def test_tied_and_sharded_checkpoints(run, tmp_path):
    tied = load(str(llama(tmp_path / "tied", tie_word_embeddings=True)), LoadOptions())
    assert "lm_head.weight" not in read_headers(tmp_path / "tied")
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    plain = run("inspect", llama(tmp_path / "plain"))
    assert run("inspect", sharded(tmp_path / "sharded")).out == plain.out


def test_tokenizer_faults_are_named(tmp_path):
    loaded = load(str(bert(tmp_path)), LoadOptions())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"), warnings.catch_warnings():
        loaded.tokenizer()


NO_UNKNOWN = {"type": "WordLevel", "vocab": {"w1": 5, "w2": 6}, "unk_token": "?"}


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("tokenizer.json", {"version": None}, "tokenizer cannot be loaded: invalid type: null"),
        ("tokenizer.json", {"model": {"type": "Nothing"}}, "tokenizer cannot be loaded"),
        ("tokenizer_config.json", {"tokenizer_class": "BertModel"}, "tokenizer is none but a BertModel"),
        ("tokenizer_config.json", {"model_max_length": "long"}, "tokenizer fails on a text: "),
        ("tokenizer.json", {"model": NO_UNKNOWN}, "fails on a text"),
    ],
)  # fmt: skip
def test_broken_tokenizers_are_told(run, tmp_path, file, change, words):
    """What the compiled tokenizers raise is no kind of its own, and some faults show only when a text is read."""
    model = bert(tmp_path / "model", vocab_size=SIZE)
    tokenizer("bert").save_pretrained(model)
    (tmp_path / "data.txt").write_text("w1 w2\nw3 zebra\n")
    assert run("inspect", model, "--data", tmp_path / "data.txt", "--dry-run").code == 0
    (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | change))
    assert refused(run("inspect", model, "--data", tmp_path / "data.txt", "--dry-run"), 1, words)
