"""Companions of a checkpoint: byte for byte what its user needs, and never weights, pickles, programs or strangers."""

from __future__ import annotations

import ast
import json
import os
import pickle
import stat
from pathlib import Path

import pytest
import transformers

from headscope.companions import companions, copy_companions
from headscope.errors import ModelError

SAMPLES = {
    "llama-gqa-web": ("LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    "sentiment-minilm": ("LICENSE", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
    "t5-g2p": ("LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    "vit-digits": ("LICENSE", "preprocessor_config.json"),
}
EXTRA = {
    "llama-gqa-web": ("dev.jsonl", "metrics.json", "test.jsonl"),
    "sentiment-minilm": ("dev.jsonl", "importance.png", "metrics.json", "test.jsonl"),
    "t5-g2p": ("dev.jsonl", "metrics.json", "test.jsonl"),
    "vit-digits": ("dev.csv", "metrics.json", "test.csv"),
}
NEVER = [
    "config.json", "README.md", "readme.md", "headscope.json",
    "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.onnx", "model.gguf",
    "training_args.bin", "optimizer.pt", "rng_state.pth", "vocab.pkl", "tokenizer.pickle", "tokenizer.joblib", "x.ckpt",
    "tokenizer.pyc", "tokenizer.so", ".gitattributes", ".tokenizer.json", "Model.SafeTensors", "VOCAB.PKL",
]  # fmt: skip
"""What no option carries over."""


def make(folder: Path, *names: str) -> Path:
    """A folder with these files, each with bytes of its own."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"bytes of {name}\r\n\0".encode())
    return folder


def modules(folder: Path, *listed: tuple[str, str]) -> None:
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(listed)]
    (folder / "modules.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("keep_extra", [False, True])
def test_samples(samples, tmp_path, sample, keep_extra):
    names = copy_companions(samples / sample, tmp_path, keep_extra=keep_extra, code=False)
    assert names == tuple(sorted(SAMPLES[sample] + (EXTRA[sample] if keep_extra else ())))
    assert sorted(path.name for path in tmp_path.iterdir()) == list(names)
    for name in names:
        assert (tmp_path / name).read_bytes() == (samples / sample / name).read_bytes()


def test_code_is_carried_only_if_asked(tmp_path):
    source = make(tmp_path / "source", "modeling_x.py", "tokenization_x.py", "tokenizer.json", "sub/inner.py")
    assert companions(source, keep_extra=True, code=False) == ("tokenizer.json",)
    for keep_extra in (False, True):
        found = companions(source, keep_extra=keep_extra, code=True)
        assert found == ("modeling_x.py", "tokenization_x.py", "tokenizer.json")


def test_what_is_never_carried(tmp_path):
    source = make(tmp_path / "source", *NEVER, "tokenizer.json", ".cache/tokenizer.json", "onnx/model.onnx")
    for name in ("tokenizer.model", "vocab.txt", "notes.txt"):
        (source / name).write_bytes(pickle.dumps({"a": 1}))
    os.mkfifo(source / "merges.txt")
    (source / "vocab.json").mkdir()
    for keep_extra in (False, True):
        for code in (False, True):
            assert companions(source, keep_extra=keep_extra, code=code) == ("tokenizer.json",)


def test_extra_files_below(tmp_path):
    source = make(
        tmp_path / "source", "a.txt", "sub/b.txt", "sub/config.json", "sub/model.safetensors", "sub/.hidden/c"
    )
    assert companions(source, keep_extra=True, code=False) == ("a.txt", "sub/b.txt", "sub/config.json")
    assert companions(source, keep_extra=False, code=False) == ()


def test_the_vocabulary_files_of_all_tokenizers_are_known(tmp_path):
    """Read off the sources of transformers, which name their files in one dictionary each."""
    names = set()
    for path in sorted(Path(transformers.__file__).parent.rglob("tokenization_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VOCAB_FILES_NAMES":
                names |= {value.value for value in node.value.values if isinstance(value, ast.Constant)}
    assert len(names) > 15
    source = make(tmp_path / "source", *names)
    assert companions(source, keep_extra=False, code=False) == tuple(sorted(names))


def test_sentence_transformers_modules(tmp_path):
    files = [
        "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json",
        "2_Dense/config.json", "2_Dense/model.safetensors", "3_Words/deep/words.txt",
    ]  # fmt: skip
    left = ["2_Dense/pytorch_model.bin", "2_Dense/run.py", "9_Other/config.json", "0_Transformer/model.safetensors"]
    source = make(tmp_path / "source", *files, *left)
    modules(
        source,
        ("", "sentence_transformers.models.Transformer"),
        ("0_Transformer", "sentence_transformers.models.Transformer"),
        ("1_Pooling", "sentence_transformers.models.Pooling"),
        ("2_Dense/", "sentence_transformers.models.Dense"),
        ("3_Words", "sentence_transformers.models.BoW"),
        ("4_Normalize", "sentence_transformers.models.Normalize"),
    )
    target = tmp_path / "target"
    target.mkdir()
    assert copy_companions(source, target, keep_extra=False, code=False) == tuple(sorted([*files, "modules.json"]))
    for name in files:
        assert (target / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("path", ["../other", "/etc", "a/../../other", "a\\b", "C:x", ".git", "a//b", "x\0y"])
def test_modules_outside_the_folder(tmp_path, path):
    source = make(tmp_path / "source", "tokenizer.json")
    make(tmp_path / "other", "config.json")
    modules(source, (path, "Pooling"))
    with pytest.raises(ModelError, match="no folder inside the model folder"):
        companions(source, keep_extra=False, code=False)


@pytest.mark.parametrize(
    "text", ['{"path": "1_Pooling"}', '["1_Pooling"]', '[{"name": "x"}]', "null", "[" * 10**6, '[], "a": []']
)
def test_modules_that_are_no_list(tmp_path, text):
    source = make(tmp_path / "source", "tokenizer.json")
    (source / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json: not "):
        companions(source, keep_extra=False, code=False)


def test_links(tmp_path):
    outside = make(tmp_path / "outside", "tokenizer.json", "notes.txt", "config.json")
    source = make(tmp_path / "source", "real.json")
    (source / "vocab.json").symlink_to("real.json")
    (source / "notes.txt").symlink_to(outside / "notes.txt")
    (source / "gone.txt").symlink_to("nowhere")
    (source / "sub").symlink_to(outside)
    target = tmp_path / "target"
    target.mkdir()
    assert copy_companions(source, target, keep_extra=True, code=False) == ("real.json", "vocab.json")
    assert (target / "vocab.json").read_bytes() == b"bytes of real.json\r\n\0"
    assert not (target / "vocab.json").is_symlink()
    (source / "tokenizer.json").symlink_to(outside / "tokenizer.json")
    with pytest.raises(ModelError, match="'tokenizer.json' is a link that leaves the folder"):
        companions(source, keep_extra=False, code=False)
    (source / "tokenizer.json").unlink()
    (source / "merges.txt").symlink_to("nowhere")
    with pytest.raises(ModelError, match="'merges.txt' is missing or a broken link"):
        companions(source, keep_extra=False, code=False)
    (source / "merges.txt").unlink()
    (source / "1_Pooling").symlink_to(outside)
    modules(source, ("1_Pooling", "Pooling"))
    with pytest.raises(ModelError, match="'1_Pooling/config.json' is a link that leaves the folder"):
        companions(source, keep_extra=False, code=False)


def test_files_of_the_hub_cache(tmp_path):
    """A snapshot of the cache holds links to blobs, which are read-only."""
    cache = tmp_path / "models--a--b"
    blobs = make(cache / "blobs", "0123")
    (blobs / "0123").chmod(0o444)
    snapshot = cache / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0123")
    target = tmp_path / "target"
    target.mkdir()
    assert copy_companions(snapshot, target, keep_extra=False, code=False) == ("tokenizer.json",)
    copied = target / "tokenizer.json"
    assert copied.read_bytes() == b"bytes of 0123\r\n\0" and not copied.is_symlink()
    assert stat.S_IMODE(copied.stat().st_mode) & stat.S_IWUSR


def test_files_that_stand_there(tmp_path):
    source = make(tmp_path / "source", "generation_config.json", "config.json")
    target = tmp_path / "target"
    target.mkdir()
    for name in ("generation_config.json", "config.json", "other"):
        (target / name).write_bytes(b"new")
    copy_companions(source, target, keep_extra=True, code=True)
    assert (target / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert (target / "config.json").read_bytes() == (target / "other").read_bytes() == b"new"


def test_a_source_that_cannot_be_read(tmp_path, monkeypatch):
    source = make(tmp_path / "source", "tokenizer.json")
    target = tmp_path / "target"
    target.mkdir()
    monkeypatch.setattr("headscope.companions._is_pickle", lambda path: False)
    monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read: Permission denied"):
        copy_companions(source, target, keep_extra=False, code=False)
