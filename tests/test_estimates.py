"""What a dry run states is held against the run: the peak memory of many pairs of heads."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_tokenizers import save, texts, tokenizer, write
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from headscope.footprint import peak, resident

MEASURED = """
import re, sys
import headscope.cli
sys.argv = ["headscope", *sys.argv[1:]]
code = headscope.cli._run()
print("most:", re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
sys.exit(code)
"""
"""Prints kilobytes; not those of getrusage, which begin with what the starting process holds."""


def test_the_process_is_part_of_the_peak() -> None:
    model, before = nn.Linear(4, 4), resident()
    assert before > 100e6
    held = torch.ones(2**24)  # 64 MiB that are written to
    assert resident() - before > 0.9 * held.nbytes
    assert abs(peak([model], 5_000_000) - resident() - 5_000_000) < 1e6


@pytest.mark.slow
@pytest.mark.parametrize("measures", ["hellinger", "output", "hellinger,output,qk"])
def test_b118_the_peak_for_5120_heads_is_what_the_dry_run_states(measures: str, tmp_path: Path) -> None:
    """13 million pairs: what is held does not grow with the tokens, and is stated within a fifth."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 16, "num_hidden_layers": 40, "vocab_size": 53, "pad_token_id": 0}
    heads = {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 2, "max_position_embeddings": 64}
    model = save(tmp_path / "model", LlamaForCausalLM(LlamaConfig(**sizes, **heads)), tokenizer("llama"))
    data = write(tmp_path / "data.jsonl", [{"text": text} for text in texts([15] * 8)])
    words = ["similarity", model, "--data", data, "--measures", measures, "--top", "5", "--format", "csv"]
    stated, ran = (
        subprocess.run(
            [sys.executable, "-c", MEASURED, *words, "--no-progress", *more],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        for more in (["--dry-run"], [])
    )
    assert (stated.returncode, ran.returncode) == (0, 0), (stated.stderr, ran.stderr)
    items = {row["item"]: row["value"] for row in csv.DictReader(stated.stdout.splitlines())}
    assert (items["heads"], items["pairs"]) == ("5120", "13104640") and len(ran.stdout.splitlines()) == 6
    most = 1024 * int(re.findall(r"most: (\d+)", ran.stderr)[0])
    print(f"{measures}: stated {int(items['peak_bytes']) / 1e6:.0f} MB, taken {most / 1e6:.0f} MB")
    assert abs(int(items["peak_bytes"]) / most - 1) < 0.2
