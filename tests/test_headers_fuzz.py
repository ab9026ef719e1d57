"""Arbitrary bytes as headers and configurations: a HeadscopeError, quickly, or a result that other readers share."""

import json
import struct
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from headscope.errors import HeadscopeError
from headscope.headers import check_config, check_sizes, read_config, read_headers
from headscope.outline import outline

SAMPLES = Path(__file__).parents[1] / "sample_inputs"
FUZZ = settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])


def packed(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(24)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["dtype", "shape", "data_offsets"])


@FUZZ
@given(st.binary(max_size=60) | st.dictionaries(st.text(max_size=3), st.dictionaries(KEYS, JSON) | JSON).map(packed))
def test_fuzzed_headers(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        found = read_headers(tmp_path)
    except HeadscopeError:
        return
    assert found == {} or found.keys() == load_file(tmp_path / "model.safetensors").keys()


@FUZZ
@given(st.data())
def test_fuzzed_changes_of_a_sound_file(tmp_path, data):
    content = bytearray((SAMPLES / "vit-digits" / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        tensors = read_headers(tmp_path)
    except HeadscopeError:
        return
    outline(read_config(SAMPLES / "vit-digits"), tensors)


CONFIGS = ["llama-gqa-web", "sentiment-minilm", "t5-g2p", "vit-digits"]


@FUZZ
@given(st.data())
def test_fuzzed_configurations(tmp_path, data):
    folder = SAMPLES / data.draw(st.sampled_from(CONFIGS))
    config = json.loads((folder / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        config[data.draw(st.sampled_from(sorted(config)) | st.text(max_size=4))] = data.draw(JSON)
    text = bytearray(json.dumps(config).encode())
    if data.draw(st.booleans()):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "config.json").write_bytes(text)
    tensors = read_headers(folder)
    try:
        found = read_config(tmp_path)
        check_config(found)
        check_sizes(found, tensors)
    except HeadscopeError:
        return
    outline(found, tensors)


def test_nothing_heavy_is_imported():
    code = (
        "import sys, headscope.outline, headscope.headers, headscope.cost\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
