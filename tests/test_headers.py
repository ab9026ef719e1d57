"""Broken, hostile and sound model folders: config.json and safetensors headers."""

import json
import os
import struct
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headscope import headers, jsonfiles
from headscope.errors import ModelError
from headscope.headers import TensorInfo, check_config, check_sizes, has_safetensors, read_config, read_headers

SAMPLES = Path(__file__).parents[1] / "sample_inputs"
ONE = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def packed(header, data=24, *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(**changes):
    return {"a": ONE["a"] | changes}


def failure(call, *arguments):
    with pytest.raises(ModelError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def indexed(folder, where, **shards):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for name, header in shards.items():
        (folder / f"{name}.safetensors").write_bytes(packed(header, 24 * len(header)))


def named(*names):
    return {name: {"dtype": "F32", "shape": [6], "data_offsets": [24 * i, 24 * i + 24]} for i, name in enumerate(names)}


@pytest.mark.parametrize("name", ["llama-gqa-web", "sentiment-minilm", "t5-g2p", "vit-digits"])
def test_headers_are_what_the_safetensors_library_reads(name):
    found = read_headers(SAMPLES / name)
    loaded = load_file(SAMPLES / name / "model.safetensors")
    assert {key: info.shape for key, info in found.items()} == {
        key: tuple(value.shape) for key, value in loaded.items()
    }
    assert {info.file for info in found.values()} == {"model.safetensors"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "config.json: empty"),
        (b"  \n", "config.json: empty"),
        (b'{"a": 1', "config.json: cut short at line 1 column 8"),
        (b'{"a": "b', "config.json: cut short at line 1 column 7"),
        (b'{\n"a": x}', "config.json: not JSON at line 2 column 6"),
        (b"[1, 2]", "config.json: a JSON object is needed, not an array"),
        (b"null", "a JSON object is needed, not null"),
        (b"true", "a JSON object is needed, not true or false"),
        (b"12", "a JSON object is needed, not a number"),
        (b'"text"', "a JSON object is needed, not a string"),
        (b"[" * 200_000, "config.json: nested too deeply"),
        (b'{"a": ' * 200_000, "config.json: nested too deeply"),
        (b'{"a": "\xff"}', "config.json: not UTF-8 text at byte 7"),
        (b'{"a": ' + b"9" * 5000 + b"}", "config.json: not usable JSON: Exceeds the limit"),
    ],
)
def test_broken_configurations(tmp_path, content, says):
    (tmp_path / "config.json").write_bytes(content)
    assert says in failure(read_config, tmp_path)


def test_absent_configurations(tmp_path):
    assert "no such folder" in failure(read_config, tmp_path / "nowhere")
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert str(caught.value) == f"{tmp_path}: no config.json"
    assert caught.value.hint == "a model folder needs config.json and *.safetensors"
    (tmp_path / "config.json").mkdir()
    assert "config.json: not a regular file" in failure(read_config, tmp_path)


def test_a_configuration_too_large_is_not_parsed(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2 * 1024**3)
    start = time.monotonic()
    assert "2147483648 bytes, more than the limit of 16777216" in failure(read_config, tmp_path)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("value", [0, -4, 3.5, "4", True, 10**7, [], [4, 0], {}])
@pytest.mark.parametrize("field", ["num_attention_heads", "n_head", "decoder_attention_heads"])
def test_counts_that_no_model_can_have(field, value):
    assert f"{field} is {value!r}, expected a whole number" in failure(check_config, {field: value})
    nested = failure(check_config, {"text_config": {"encoder_config": {field: value}}})
    assert nested.startswith(f"config.json: text_config.encoder_config.{field} is ")


def test_counts_that_may_be_absent_null_or_lists():
    check_config({"num_key_value_heads": None, "head_dim": None, "n_head": None, "vocab_size": 10**9})
    check_config({"num_attention_heads": [2, 4], "num_key_value_heads": 3, "text_config": "words"})
    assert "num_attention_heads is None" in failure(check_config, {"num_attention_heads": None})
    assert "vocab_size is 1000000001" in failure(check_config, {"vocab_size": 10**9 + 1})


def test_groups_must_be_whole():
    message = failure(check_config, {"vision_config": {"num_attention_heads": 12, "num_key_value_heads": 5}})
    assert message == "config.json: vision_config.num_key_value_heads 5 does not divide num_attention_heads 12"
    check_config({"num_attention_heads": 12, "num_key_value_heads": 4})


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"])
def test_sizes_that_the_weights_do_not_bear_out(field):
    folder = SAMPLES / "llama-gqa-web"
    config, tensors = read_config(folder), read_headers(folder)
    check_sizes(config, tensors)
    assert f"{field} is 1000000, but the weights" in failure(check_sizes, config | {field: 10**6}, tensors)


def test_sound_headers(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
        "none": {"dtype": "I64", "shape": [0, 10**18], "data_offsets": [24, 24]},
        **ONE,
    }
    (tmp_path / "model.safetensors").write_bytes(packed(json.dumps(header).encode() + b"   ", 26))
    assert has_safetensors(tmp_path)
    assert read_headers(tmp_path)["a"] == TensorInfo("a", "F32", (2, 3), "model.safetensors")
    assert {name: info.shape for name, info in read_headers(tmp_path).items()} == {
        "b": (),
        "none": (0, 10**18),
        "a": (2, 3),
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ": empty: 0 bytes"),
        (b"1234", ": cut short: 4 bytes"),
        (packed(ONE, length=2**63), "header of 9223372036854775808 bytes, more than the limit"),
        (packed(ONE, length=10**6), "cut short or not safetensors: header of 1000000 bytes in a file of"),
        (packed(b"[]"), "header: a JSON object is needed, not an array"),
        (packed(b"{" * 9), "header: not JSON at line 1 column 2"),
        (packed(b'{"a": {}, "a": {}}'), "header: not usable JSON: key 'a' stands twice"),
        (packed({"a": 3}), "tensor 'a': described by a number"),
        (packed(entry(dtype="F31")), "tensor 'a': dtype 'F31' is not known"),
        (packed(entry(dtype=None)), "tensor 'a': dtype None is not known"),
        (packed(entry(shape=[2, -3])), "tensor 'a': shape [2, -3] is not a list"),
        (packed(entry(shape=[2, True])), "tensor 'a': shape [2, True] is not a list"),
        (packed(entry(shape=6)), "tensor 'a': shape 6 is not a list"),
        (packed(entry(data_offsets=[24, 0])), "data_offsets [24, 0] are not two ascending"),
        (packed(entry(data_offsets=[0])), "data_offsets [0] are not two ascending"),
        (packed(entry(shape=[2, 4])), "24 bytes do not hold shape [2, 4] of F32"),
        (packed(entry(shape=[10**9] * 9)), "24 bytes do not hold shape"),
        (packed(ONE, 20), "cut short: tensor 'a' ends at byte 24 of 20"),
        (packed(ONE, 30), "6 bytes at the end belong to no tensor"),
        (packed(entry(data_offsets=[4, 28]), 28), "tensor 'a' starts at byte 4, the one before ends at 0"),
        (packed(ONE | {"b": ONE["a"]}), "tensor 'b' starts at byte 0, the one before ends at 24"),
        (packed({"\x1b[31m": 3}), r"tensor '\x1b[31m': described by a number"),
    ],
)
def test_broken_headers(tmp_path, content, says):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert says in failure(read_headers, tmp_path)


def test_folders_without_safetensors(tmp_path):
    assert not has_safetensors(tmp_path)
    assert failure(read_headers, tmp_path) == f"{tmp_path}: no weights"
    (tmp_path / "adapter_model.safetensors").touch()
    assert "only 'adapter_model.safetensors'" in failure(read_headers, tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="'pytorch_model.bin'") as caught:
        read_headers(tmp_path)
    assert "--allow-pickle" in str(caught.value.hint)


def test_shards(tmp_path):
    where = {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}
    indexed(tmp_path, where, x=named("b", "a"), y=named("c"))
    assert {name: info.file for name, info in read_headers(tmp_path).items()} == where


@pytest.mark.parametrize(
    ("where", "x", "y", "says"),
    [
        ("abc", "ab", "", "'c' is not in 'y.safetensors'"),
        ("abc", "ab", "ac", "'a' is in 'x.safetensors' and 'y.safetensors'"),
        ("abc", "abd", "c", "'d' of 'x.safetensors' is not listed"),
        ("abc", "ac", "b", "'b' is in 'y.safetensors', not in 'x.safetensors'"),
    ],
)
def test_index_and_shards_that_disagree(tmp_path, where, x, y, says):
    files = {name: "y.safetensors" if name == "c" else "x.safetensors" for name in where}
    indexed(tmp_path, files, x=named(*x), y=named(*y))
    assert says in failure(read_headers, tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {"a": 3}}, "gives 'a' no file name but a number"),
        ({"weight_map": {"a": "gone.safetensors"}}, "'gone.safetensors' is missing"),
        ({"weight_map": {"a": "model.bin"}}, "'model.bin' is not a .safetensors file"),
    ],
)
def test_broken_indexes(tmp_path, content, says):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    assert says in failure(read_headers, tmp_path)


@pytest.fixture
def opened(monkeypatch):
    """The files read since the start of the test."""
    seen = []
    stock = jsonfiles.read

    def spy(path, *rest, **named):
        seen.append(path.name)
        return stock(path, *rest, **named)

    monkeypatch.setattr(headers, "read", spy)
    return seen


@pytest.mark.parametrize(
    "how", ["../out.safetensors", "/out.safetensors", "..", "", "a\\b.safetensors", "C:x.safetensors"]
)
def test_an_index_cannot_point_outside(tmp_path, opened, how):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "out.safetensors").write_bytes(packed(named("b")))
    name = f"{tmp_path}/out.safetensors" if how.startswith("/") else how
    indexed(folder, {"a": "in.safetensors", "b": name}, **{"in": named("a")})
    assert "is not a plain file name inside the folder" in failure(read_headers, folder)
    assert opened == ["model.safetensors.index.json"]


def test_a_link_cannot_lead_outside(tmp_path, opened):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "out.safetensors").write_bytes(packed(named("b")))
    indexed(folder, {"a": "in.safetensors", "b": "link.safetensors"}, **{"in": named("a")})
    (folder / "link.safetensors").symlink_to("../out.safetensors")
    assert "'link.safetensors' is a link that leaves the folder" in failure(read_headers, folder)
    assert opened == ["model.safetensors.index.json"]
    (folder / "model.safetensors").symlink_to(tmp_path / "out.safetensors")
    assert "'model.safetensors' is a link that leaves the folder" in failure(read_headers, folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    assert "'model.safetensors' cannot be read" in failure(read_headers, folder)


def test_a_snapshot_may_link_to_the_blobs_of_its_own_cache(tmp_path):
    folder = tmp_path / "models--org--name" / "snapshots" / "0123"
    blobs = tmp_path / "models--org--name" / "blobs"
    other = tmp_path / "models--org--other" / "blobs"
    for made in (folder, blobs, other):
        made.mkdir(parents=True)
    for place in (blobs, other):
        (place / "b10b").write_bytes(packed(named("a")))
    (folder / "model.safetensors").symlink_to("../../blobs/b10b")
    assert list(read_headers(folder)) == ["a"]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../../models--org--other/blobs/b10b")
    assert "leaves the folder" in failure(read_headers, folder)


def test_a_folder_reached_by_a_link_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "model.safetensors").write_bytes(packed(named("a")))
    (tmp_path / "link").symlink_to("real")
    assert list(read_headers(tmp_path / "link")) == ["a"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert "not a regular file" in failure(read_config, tmp_path)
