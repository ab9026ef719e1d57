"""What the fuzzing works on: tiny valid models and files in one folder, and the command run inside the process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from checkpoints import bert, llama, sharded, t5
from tiny_tokenizers import SIZE, tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification
from transformers.utils import logging

from headscope.cli import _run
from headscope.models import LoadOptions, load
from headscope.plan import Plan, SiteHeads
from headscope.study import Study, StudyOptions


@dataclass
class Bench:
    """Valid models and files that inputs are made from and put into, in one folder."""

    folder: Path
    models: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        sizes = {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 16, "vocab_size": 40}
        patches = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 8}
        self.models = {
            "bert": bert(self.folder / "bert", vocab_size=SIZE),
            "llama": llama(self.folder / "llama"),
            "t5": t5(self.folder / "t5"),
            "gpt2": self._saved(GPT2LMHeadModel(GPT2Config(**sizes)), "gpt2"),
            "vit": self._saved(ViTForImageClassification(ViTConfig(**patches, image_size=4, patch_size=2)), "vit"),
        }
        tokenizer("bert").save_pretrained(self.models["bert"])
        sharded(self.folder / "shards")

    def _saved(self, model: Any, name: str) -> Path:
        model.save_pretrained(self.folder / name)
        return self.folder / name

    @property
    def weights(self) -> Path:
        """The weights of the tiny BERT."""
        return self.models["bert"] / "model.safetensors"

    @property
    def index(self) -> Path:
        """The index of a checkpoint in shards."""
        return self.folder / "shards" / "model.safetensors.index.json"

    @cached_property
    def study(self) -> Study:
        """The tiny BERT, loaded once."""
        return Study(load(str(self.models["bert"]), LoadOptions()), None, StudyOptions())

    @cached_property
    def sites(self) -> tuple[SiteHeads, ...]:
        """Its heads."""
        return tuple(SiteHeads.of(site) for site in self.study.sites)

    @cached_property
    def configs(self) -> list[dict[str, Any]]:
        """The configurations of all models."""
        return [json.loads((folder / "config.json").read_text()) for folder in self.models.values()]

    @cached_property
    def plans(self) -> list[dict[str, Any]]:
        """Plans for the tiny BERT in the forms that are read."""
        heads = [head for site in self.study.sites for head in site.heads]
        plan = Plan(self.sites, tuple(heads[:2]), scores={head: 0.5 for head in heads}).as_dict()
        counts = {"heads_before": 5, "heads_after": 4, "kv_before": 5, "kv_after": 4}
        rows = [{"site": f"encoder.self.{layer}", **counts, "removed": str(layer)} for layer in range(2)]
        return [plan, {"plan": plan}, {"rows": rows}, {"removed": ["encoder.self.0.1"]}]

    def put(self, name: str, content: bytes) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.write_bytes(content)
        return path

    @contextlib.contextmanager
    def instead(self, path: Path, content: bytes) -> Iterator[None]:
        """A file of a model with other content while the block runs."""
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            yield
        finally:
            path.write_bytes(before)


def command(*words: object) -> None:
    """Run the command line in this process: it ends with a code of its own and says nothing that a terminal obeys.

    Compiled libraries, which write past Python's streams, say nothing at all.
    """
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace") for _ in range(2)]
    before = sys.argv
    sys.argv = ["headscope", *map(str, words)]
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]), _past_python() as past:
            code = _run()
            for stream in streams:
                stream.flush()
    finally:
        sys.argv = before
    out, err = (stream.buffer.getvalue() for stream in streams)  # type: ignore[attr-defined]
    assert code in (0, 1, 2, 3), (code, err)
    assert b"\x1b" not in out + err and b"Traceback" not in err, err
    assert past == [b""], past
    if code:
        assert err.startswith(b"error: ") or b"\nerror: " in err, (code, err)
        assert all(len(line) < 5000 for line in err.splitlines()), err


@contextlib.contextmanager
def _past_python() -> Iterator[list[bytes]]:
    """What is written to the process's own output in this block, once it has ended."""
    found: list[bytes] = []
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(descriptor) for descriptor in (1, 2)]
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield found
        finally:
            for descriptor, own in zip((1, 2), kept, strict=True):
                os.dup2(own, descriptor)
                os.close(own)
            file.seek(0)
            found.append(file.read())
