"""The manifest headscope.json: strict JSON, stable bytes, hashes that find each change, faults told in one line."""

from __future__ import annotations

import hashlib
import json
import math
import os

import pytest

from headscope.errors import ModelError
from headscope.manifest import NAME, SCHEMA, changed_files, hashes, read_manifest, write_manifest


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    (made / "1_Pooling").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
    (made / "1_Pooling" / "config.json").write_bytes(b"")
    return made


def test_hashes(folder):
    (folder / NAME).write_text("not hashed")
    (folder / "1_Pooling" / NAME).write_text("hashed")
    assert hashes(folder) == {
        "1_Pooling/config.json": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "1_Pooling/headscope.json": hashlib.sha256(b"hashed").hexdigest(),
        "config.json": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "model.safetensors": hashlib.sha256(bytes(range(256)) * 5000).hexdigest(),
    }
    assert list(hashes(folder)) == sorted(hashes(folder))


def test_what_is_written_is_read(folder):
    content = {
        "source": "somebody/\u202emodel\x1b\U0001f600",
        "plan": [1, None, 0.1, 1e-300],
        "nested": {"b": 1, "a": {}},
    }
    write_manifest(folder, content)
    manifest = read_manifest(folder)
    assert manifest == {"schema": 1, **content, "files": hashes(folder)}
    assert list(manifest) == ["schema", "source", "plan", "nested", "files"]
    assert changed_files(folder, manifest) == []
    text = (folder / NAME).read_bytes()
    assert text.endswith(b"}\n") and text.isascii() and b"\x1b" not in text and b"\r" not in text
    write_manifest(folder, content)
    assert (folder / NAME).read_bytes() == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_that_json_cannot_say(folder, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_manifest(folder, {"proof": {"loss": [value]}})
    assert not (folder / NAME).exists()


@pytest.mark.parametrize("field", ["schema", "files"])
def test_fields_that_are_added_are_not_given(folder, field):
    with pytest.raises(ValueError, match=f"manifest's {field}"):
        write_manifest(folder, {field: 1})


def test_no_manifest(folder):
    assert read_manifest(folder) is None


def test_every_change_is_found(folder):
    write_manifest(folder, {})
    manifest = read_manifest(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[777_777] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").unlink()
    (folder / "new.txt").write_text("not one of the manifest's")
    assert changed_files(folder, manifest) == ["config.json", "model.safetensors"]
    (folder / "config.json").mkdir()
    assert changed_files(folder, manifest) == ["config.json", "model.safetensors"]


def test_a_manifest_does_not_lead_out_of_its_folder(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    digest = hashlib.sha256(b"secret").hexdigest()
    (folder / "link").symlink_to(outside)
    (folder / "inner").symlink_to("config.json")
    os.mkfifo(folder / "pipe")
    names = ["../outside", str(outside), "link", "a\0b", "pipe", "", "x" * 300]
    inner = hashes(folder / "1_Pooling")["config.json"]
    files = {**dict.fromkeys(names, digest), "inner": hashlib.sha256(b"{}").hexdigest(), "1_Pooling/config.json": inner}
    assert changed_files(folder, {"files": files}) == sorted(names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"schema": 1, "files": {}', "cut short"),
        ("[]", "a JSON object is needed, not an array"),
        ('{"schema": 1, "schema": 1, "files": {}}', "stands twice"),
        ('{"files": {}}', "schema is missing, expected a whole number from 1"),
        ('{"schema": true, "files": {}}', "schema is true or false, True, expected"),
        ('{"schema": "1", "files": {}}', "schema is a string, '1', expected"),
        ('{"schema": 1.0, "files": {}}', "schema is a number, 1.0, expected"),
        ('{"schema": 0, "files": {}}', "schema is a number, 0, expected"),
        ('{"schema": 1}', "no list of files"),
        ('{"schema": 1, "files": ["a"]}', "no list of files"),
        ('{"schema": 1, "files": {"a": 1}}', "no list of files"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_faults(folder, text, message):
    (folder / NAME).write_text(text)
    with pytest.raises(ModelError) as caught:
        read_manifest(folder)
    assert message in str(caught.value) and str(folder / NAME) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_newer_manifest(folder):
    (folder / NAME).write_text(json.dumps({"schema": SCHEMA + 1, "other": "layout"}))
    with pytest.raises(
        ModelError, match=r"written by a newer headscope \(schema 2, this one reads up to 1\)"
    ) as caught:
        read_manifest(folder)
    assert caught.value.hint == "pip install --upgrade headscope"


def test_a_manifest_that_is_no_file_of_the_folder(folder, tmp_path):
    (folder / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="missing or a broken link"):
        read_manifest(folder)
    (tmp_path / "elsewhere").write_text('{"schema": 1, "files": {}}')
    with pytest.raises(ModelError, match="leaves the folder"):
        read_manifest(folder)
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    with pytest.raises(ModelError, match="not a regular file"):
        read_manifest(folder)
