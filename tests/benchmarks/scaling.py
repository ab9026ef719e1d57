"""How time and memory grow with examples, tokens, layers and heads: `inspect` importance, and all of `similarity`.

Tiny random Llamas read random token ids. Each cell runs in a process of its own, two at a time, each of one thread: CPU
seconds of an example, and by how much the process grows at its peak beyond what it has when model and data are there.
Behind each axis stands the power of its size by which the time of an example and the memory grow from the first row to
the last: 0 is flat, 1 linear, 2 quadratic. Importance needs no maps, but every query meets every key in the kernel;
similarity compares all pairs of heads in all cells of their maps, and holds as many of these as its limit allows.

    python tests/benchmarks/scaling.py [--axes examples,tokens,layers,heads] [--largest 4096]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headscope.examples import IGNORED, Example, Examples
from headscope.likeness import Question, compare_heads
from headscope.location import Location
from headscope.models import LoadedModel
from headscope.pairing import Party
from headscope.study import Study, StudyOptions
from headscope.tasks import causal_lm

WIDTH, FEATURES, VOCABULARY = 128, 16, 512
"""Sizes of every model: of its states, of a head, and of its vocabulary."""
LAST = 1 << 13
"""Tokens that a cell reads along the axis of tokens, however long its examples are."""


@dataclass(frozen=True)
class Size:
    """One cell: how much data, and how large a model."""

    examples: int = 32
    tokens: int = 128
    layers: int = 4
    heads: int = 8


AXES = {
    "examples": [Size(examples=count) for count in (64, 256, 1024)],
    "tokens": [Size(LAST // tokens, tokens) for tokens in (128, 256, 512, 1024, 2048, 4096)],
    "layers": [Size(layers=count) for count in (2, 4, 8, 16)],
    "heads": [Size(heads=count) for count in (4, 8, 16, 32)],
}


@dataclass(frozen=True)
class Cost:
    """CPU milliseconds of an example, and how far the process grew, in MB."""

    milliseconds: float
    megabytes: float


def study_of(size: Size) -> Study:
    """A study of a random model on random token ids, all of one length."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=FEATURES,
        max_position_embeddings=max(128, size.tokens),
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(VOCABULARY, (size.examples, size.tokens)).tolist()
    items = [
        Example(number, {"input_ids": row, "attention_mask": [1] * size.tokens}, (*row[1:], IGNORED), size.tokens)
        for number, row in enumerate(ids)
    ]
    loaded = LoadedModel(model, "causal-lm", causal_lm.TASK, Location("random", Path()))
    study = Study(loaded, Examples(tuple(items)), StudyOptions())
    assert sum(site.n_heads for site in study.sites) == size.layers * size.heads
    return study


def inspect(study: Study) -> None:
    """What `inspect --measures importance` does."""
    study.scores(["importance"])


def similarity(study: Study) -> None:
    """What `similarity` does with data."""
    compare_heads(Party((study,)), Question())


COMMANDS: dict[str, Callable[[Study], None]] = {"inspect": inspect, "similarity": similarity}


def measured(cell: tuple[str, Size]) -> Cost:
    """The cost of a command, in this process."""
    command, size = cell
    torch.set_num_threads(1)
    COMMANDS[command](study_of(replace(size, examples=2, tokens=64)))  # what every first run makes
    study = study_of(size)
    before, start = _peak(), time.process_time()
    COMMANDS[command](study)
    return Cost(1000 * (time.process_time() - start) / size.examples, _peak() - before)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def power(sizes: list[Size], values: list[float], axis: str) -> float:
    """By which power of the axis the values grow between the first and the last row."""
    span = math.log(getattr(sizes[-1], axis) / getattr(sizes[0], axis))
    return math.log(max(values[-1], 1.0) / max(values[0], 1.0)) / span


def lines(axis: str, sizes: list[Size], costs: dict[tuple[str, Size], Cost]) -> Iterator[str]:
    """One axis of the table."""
    titles = [f"{name}, {unit}" for name in COMMANDS for unit in ("ms an example", "MB")]
    yield f"| {axis} | " + " | ".join(titles) + " |"
    yield "|---" * (1 + len(titles)) + "|"
    for size in sizes:
        found = [costs[name, size] for name in COMMANDS]
        cells = [f"{one.milliseconds:.1f} | {one.megabytes:.0f}" for one in found]
        yield f"| {getattr(size, axis)} | " + " | ".join(cells) + " |"
    powers = [
        power(sizes, [getattr(costs[name, size], unit) for size in sizes], axis)
        for name in COMMANDS
        for unit in ("milliseconds", "megabytes")
    ]
    yield "| power | " + " | ".join(f"{one:.1f}" for one in powers) + " |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--largest", type=int, default=4096, help="the largest size along any axis")
    chosen = parser.parse_args()
    axes = {
        name: [one for one in AXES[name] if getattr(one, name) <= chosen.largest] for name in chosen.axes.split(",")
    }
    cells = dict.fromkeys((name, size) for sizes in axes.values() for size in sizes for name in COMMANDS)
    ordered = sorted(cells, key=lambda cell: cell[1].tokens * cell[1].heads, reverse=True)  # the slowest first
    begin = time.monotonic()
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        costs = dict(zip(ordered, pool.map(measured, ordered, chunksize=1), strict=True))
    base = Size()
    print(
        f"{base.examples} examples of {base.tokens} tokens, {base.layers} layers of {base.heads} heads, where not said"
    )
    print(f"one thread of {torch.__version__}; {time.monotonic() - begin:.0f} s in all\n")
    for axis, sizes in axes.items():
        print("\n".join(lines(axis, sizes, costs)))


if __name__ == "__main__":
    main()
