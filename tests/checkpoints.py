"""Tiny checkpoints on disk, tools to damage them, and the command run inside the test process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from headscope.cli import _run

BERT_QUERY = "bert.encoder.layer.0.attention.self.query.weight"
LLAMA_QUERY = "model.layers.0.self_attn.q_proj.weight"
LLAMA_SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "num_hidden_layers": 2,
    "intermediate_size": 20, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """What one run of the command left: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """The cells of a CSV report that needs no quoting."""
        return [line.split(",") for line in self.out.splitlines()]


def command(monkeypatch, capsysbinary) -> Callable[..., Ran]:
    """A function that runs `headscope ARGUMENTS` in this process."""

    def run(*words: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["headscope", *map(str, words)])
        capsysbinary.readouterr()
        code = _run()
        out, err = capsysbinary.readouterr()
        return Ran(code, out.decode("utf-8", "surrogateescape"), err.decode())

    return run


def refused(ran: Ran, code: int, *parts: str) -> bool:
    """Whether a run failed as it should: this exit code, nothing on stdout, one error line with these words, no trace.

    A second line may only be a hint.
    """
    lines = ran.err.splitlines()
    assert ran.code == code, ran
    assert ran.out == "", ran
    assert lines and lines[0].startswith("error: "), ran
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), ran
    for part in parts:
        assert part in ran.err, (part, ran)
    return "Traceback" not in ran.err


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def bert(folder: Path, model_class: type[PreTrainedModel] = BertForSequenceClassification, **changes: object) -> Path:
    """Two layers of five heads of width four."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "num_attention_heads": 5, "num_hidden_layers": 2, "intermediate_size": 12}
    config = BertConfig(**sizes | {"vocab_size": 40, "max_position_embeddings": 16, "pad_token_id": 0} | changes)
    return save(model_class(config), folder)


def llama(folder: Path, **changes: object) -> Path:
    """Two layers of six query heads on three key/value heads, of width four."""
    torch.manual_seed(0)
    return save(LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES | changes)), folder)


def t5(folder: Path) -> Path:
    """One layer in each stack, three heads of width five."""
    torch.manual_seed(0)
    sizes = {"d_model": 12, "d_kv": 5, "num_heads": 3, "num_layers": 1, "num_decoder_layers": 1, "d_ff": 8}
    return save(T5ForConditionalGeneration(T5Config(**sizes, vocab_size=30, decoder_start_token_id=0)), folder)


def configure(folder: Path, *drop: str, **fields: object) -> Path:
    """Set and drop fields of config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in drop}))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the stored tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    return folder


def pickled(folder: Path, *, keep: bool = False, **more: object) -> Path:
    """Store the tensors as a pickle, instead of or beside (`keep`) the safetensors."""
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors | more, folder / "pytorch_model.bin")
    if not keep:
        (folder / "model.safetensors").unlink()
    return folder


def sharded(folder: Path) -> Path:
    """The tiny llama in several shards."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES)).save_pretrained(folder, max_shard_size="5KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def point(folder: Path, tensor: str, file: str) -> Path:
    """Let the index say that a tensor lies in another file."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][tensor] = file
    path.write_text(json.dumps(index))
    return folder


def gguf_llama(path: Path) -> dict[str, numpy.ndarray]:
    """A GGUF file of a llama with six query and three key/value heads of width four; returns its tensors."""
    writer, random = gguf.GGUFWriter(path, "llama"), numpy.random.default_rng(0)
    writer.add_context_length(32)
    writer.add_embedding_length(24)
    writer.add_block_count(2)
    writer.add_feed_forward_length(20)
    writer.add_head_count(6)
    writer.add_head_count_kv(3)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(4)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(40)
    letters = [chr(97 + number) for number in range(18)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"\u2581{letter}" for letter in letters), *letters, "\u2581"])
    writer.add_token_scores([-float(number) for number in range(40)])
    writer.add_token_types([2, 3, 3, *[1] * 37])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {"token_embd": (40, 24), "output_norm": (24,), "output": (40, 24)}
    layer = {"attn_q": (24, 24), "attn_k": (12, 24), "attn_v": (12, 24), "attn_output": (24, 24), "attn_norm": (24,)}
    layer |= {"ffn_norm": (24,), "ffn_gate": (20, 24), "ffn_up": (20, 24), "ffn_down": (24, 20)}
    shapes |= {f"blk.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    tensors = {name: random.normal(0, 0.3, shape).astype(numpy.float32) for name, shape in shapes.items()}
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
