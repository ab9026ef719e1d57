"""Time and memory of choosing by reconstruction, and of repairing, in a model with 1,200 heads; a repair's saving.

A random GPT-2 shaped like a narrow GPT-2 XL (48 layers of 25 heads, 400 wide) reads random tokens: seconds of one
thread and the peak memory of the process for the moments, the greedy order of all heads, and the repair of a plan that
takes half of them. `--runs` compares, on the llama sample, a repair whose unfinished runs go on where they stopped with
one that starts every run from the beginning; both must give the same weights.

    python tests/benchmarks/reconstruction.py [--layers 48] [--examples 32] [--runs 64]
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from headscope.data import DataOptions
from headscope.examples import IGNORED, Example, Examples
from headscope.heads import HeadId
from headscope.location import Location
from headscope.models import LoadedModel
from headscope.original import Original
from headscope.output_moments import Weighting
from headscope.plan import Plan, SiteHeads
from headscope.reconstruct import by
from headscope.repair import fit
from headscope.study import Study, StudyOptions
from headscope.tasks.causal_lm import TASK

LLAMA = Path(__file__).parents[2] / "sample_inputs" / "llama-gqa-web"
TOKENS = 64


def peak() -> float:
    """The most memory that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def random_study(layers: int, examples: int) -> Study:
    """A random model on random tokens."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_head=25, n_embd=400, vocab_size=512, n_positions=TOKENS)
    model = GPT2LMHeadModel(config).eval().requires_grad_(False)
    items: list[Example] = []
    for number, ids in enumerate(torch.randint(512, (examples, TOKENS)).tolist()):
        inputs = {"input_ids": ids, "attention_mask": [1] * TOKENS}
        items.append(Example(number, inputs, (*ids[1:], IGNORED), TOKENS))
    loaded = LoadedModel(model, "causal-lm", TASK, Location("random", LLAMA))
    return Study(loaded, Examples(tuple(items)), StudyOptions())


def half(study: Study, scores: dict[HeadId, float]) -> Plan:
    """A plan that takes half of all heads, the lowest first."""
    order = sorted(scores, key=lambda head: (scores[head], head))
    return Plan(tuple(SiteHeads.of(site) for site in study.sites), tuple(sorted(order[: len(order) // 2])))


def large(layers: int, examples: int) -> None:
    """Order and repair of many heads."""
    study = random_study(layers, examples)
    blocks = [(head,) for site in study.sites for head in site.heads]
    print(f"{len(blocks):,} heads, {examples} texts of {TOKENS} tokens; model alone: peak {peak():.0f} MiB", flush=True)
    start = time.process_time()
    scores = dict(by(study, blocks, weighting=Weighting.GRADIENT))
    print(f"order of all heads: {time.process_time() - start:.0f} s, peak {peak():.0f} MiB", flush=True)
    start = time.process_time()
    found = fit(study, half(study, scores))
    sites = 0 if found is None else len(found.sites)
    print(
        f"repair of half of them: {sites} sites, {time.process_time() - start:.0f} s, peak {peak():.0f} MiB", flush=True
    )


def runs(examples: int) -> None:
    """A repair whose runs go on where they stopped, against one whose runs start from the beginning."""
    options = StudyOptions(data=DataOptions(limit=examples, max_length=128))
    study = Study.open(str(LLAMA), str(LLAMA / "dev.jsonl"), options)
    removed = tuple(head for site in study.sites for head in site.heads if head.index % 2)
    plan = Plan(tuple(SiteHeads.of(site) for site in study.sites), removed)
    seconds: list[float] = []
    repairs = []
    for room in (2**31, 0):
        start = time.process_time()
        repairs.append(fit(study, plan, original=Original(study, room=room)))
        seconds.append(time.process_time() - start)
    first, second = repairs
    assert first is not None and second is not None
    apart = max(float((a.columns - b.columns).abs().max()) for a, b in zip(first.sites, second.sites, strict=True))
    print(
        f"llama-gqa-web, {len(study.examples or ())} pieces: {seconds[0]:.1f} s, from the beginning {seconds[1]:.1f} s,"
    )
    print(f"{seconds[1] / seconds[0]:.2f} times as long; weights differ by at most {apart:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--runs", type=int, default=64)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.runs:
        runs(chosen.runs)
    if chosen.layers:
        large(chosen.layers, chosen.examples)


if __name__ == "__main__":
    main()
