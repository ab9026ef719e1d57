"""Cost of attention statistics: time and peak memory against a plain forward and against transformers' own maps.

Prints, for a narrow causal model of random weights with 12 heads, at 8,192 tokens the peak memory that one pass adds
(each way in a process of its own) and its CPU seconds, and at 512 tokens CPU seconds of ways that take turns in one
process. One thread. "own maps" is `output_attentions=True` under eager attention, with the same statistics.

    python tests/benchmarks/attention.py [--tokens 8192] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaModel

from headscope.discovery import find_sites
from headscope.patterns import Block
from headscope.reading import RowReader
from headscope.scores.attention import SCORE
from headscope.texts import Texts

WAYS = ("plain", "headscope", "own maps")
HEADS, LAYERS = 12, 2


def model(implementation: str) -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HEADS * 32,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=65_536,
        attn_implementation=implementation,
    )
    return LlamaModel(config).eval().requires_grad_(False)


def way(name: str, tokens: int) -> Callable[[], object]:
    """One pass over a text of random tokens."""
    made = model("eager" if name == "own maps" else "sdpa")
    inputs = {"input_ids": torch.randint(256, (1, tokens)), "use_cache": False}
    sites = find_sites(made).sites
    texts = Texts(inputs, None, torch.tensor([0]))
    reader = RowReader(made, sites, [SCORE.rows], replace=True)  # type: ignore[list-item]

    def plain() -> None:
        made(**inputs)

    def read() -> None:
        reader.start(texts, 1)
        with reader.reading():
            made(**inputs)

    def own() -> None:
        maps = made(**inputs, output_attentions=True).attentions
        visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None]
        for site, rows in zip(sites, maps, strict=True):
            SCORE.rows(texts.block(Block(site, 0, rows, visible), 1))  # type: ignore[misc]

    return {"plain": plain, "headscope": read, "own maps": own}[name]


def alone(name: str, tokens: int) -> dict[str, float]:
    """CPU seconds of a pass and the peak memory it adds, in this process."""
    torch.set_num_threads(1)
    run, short = way(name, tokens), way(name, 64)
    with torch.inference_mode():
        short()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        run()
        seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "added": (peak - before) / 1024, "peak": peak / 1024}


def in_turns(tokens: int, rounds: int) -> dict[str, float]:
    """Least CPU seconds of each way over rounds in which all take turns."""
    torch.set_num_threads(1)
    runs = {name: way(name, tokens) for name in WAYS}
    best = dict.fromkeys(WAYS, float("inf"))
    with torch.inference_mode():
        for index in range(rounds + 1):
            for name, run in runs.items():
                start = time.process_time()
                run()
                if index:
                    best[name] = min(best[name], time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        print(json.dumps(alone(chosen.alone, chosen.tokens)))
        return
    long: dict[str, dict[str, float]] = {}
    for name in WAYS:
        command = [sys.executable, __file__, "--alone", name, "--tokens", str(chosen.tokens)]
        long[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    base = long["plain"]
    print(f"{chosen.tokens} tokens, {HEADS} heads, {LAYERS} layers, one thread")
    for name, found in long.items():
        print(
            f"{name:10s} {found['seconds']:7.2f} s ({found['seconds'] / base['seconds']:.2f}x)   "
            f"peak {found['peak']:7.0f} MiB ({found['peak'] / base['peak']:.2f}x), added {found['added']:7.0f} MiB"
        )
    short = in_turns(512, chosen.rounds)
    print("512 tokens")
    for name, seconds in short.items():
        print(f"{name:10s} {seconds:7.3f} s ({seconds / short['own maps']:.2f}x of own maps)")


if __name__ == "__main__":
    main()
