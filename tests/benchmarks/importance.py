"""Cost of importance on the sentiment sample, in plain forward passes, and against the usual loop.

Prints, from one run in which the candidates take turns (A B C D A B C D …), CPU seconds of one thread: a plain forward
over the same batches; `importance`; `importance` with `sensitivity`; and the loop that Michel-style scripts use (batch
size 1, padded to 128 tokens, a mask of ones as a leaf, gradients of all weights too). Then the same for `effect` with
two draws on the language model sample, or on another MODEL with the same texts, cut to 48 tokens.

    python tests/benchmarks/importance.py [--examples 64] [--rounds 3] [--model MODEL]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from headscope.data import DataOptions
from headscope.study import Study, StudyOptions, batches

SAMPLE = Path(__file__).parents[2] / "sample_inputs" / "sentiment-minilm"
LANGUAGE = SAMPLE.parent / "llama-gqa-web"
PADDED = 128
LAYERS, HEADS, WIDTH = 6, 12, 32


def usual_loop(study: Study) -> Tensor:
    """Importance `[layer head]` as Michel-style scripts compute it."""
    model = study.loaded.model
    assert study.examples is not None
    mask = torch.ones(LAYERS, HEADS, requires_grad=True)
    total = torch.zeros(LAYERS, HEADS, dtype=torch.float64)
    handles = []
    for index, layer in enumerate(model.bert.encoder.layer):

        def hook(module: nn.Module, args: tuple[Tensor, ...], index: int = index) -> tuple[Tensor, ...]:
            return (args[0] * mask[index].repeat_interleave(WIDTH), *args[1:])

        handles.append(layer.attention.output.dense.register_forward_pre_hook(hook))
    model.requires_grad_(True)
    for example in study.examples.items:
        padding = PADDED - len(example.inputs["input_ids"])
        inputs = {name: torch.tensor([values + [0] * padding]) for name, values in example.inputs.items()}
        mask.grad = None
        model(**inputs, labels=torch.tensor([int(example.targets[0])])).loss.backward()
        assert mask.grad is not None
        total += mask.grad.abs()
    model.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
    return total / len(study.examples)


def forward(study: Study) -> None:
    """A plain forward pass over the batches that the scores use."""
    with torch.inference_mode():
        for batch in batches(study):
            study.loaded.model(**batch.inputs)


def measure(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least CPU seconds of each candidate over rounds in which all take turns, after one round to warm up."""
    best = dict.fromkeys(candidates, float("inf"))
    for index in range(rounds + 1):
        for name, candidate in candidates.items():
            start = time.process_time()
            candidate()
            if index:
                best[name] = min(best[name], time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=str(LANGUAGE))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    options = StudyOptions(data=DataOptions(limit=chosen.examples))
    study = Study.open(str(SAMPLE), str(SAMPLE / "test.jsonl"), options)
    scores = study.scores(["importance"])
    got = torch.stack(list(scores.values["importance"].values()))
    wanted = usual_loop(study)
    assert study.examples is not None
    tokens = sum(example.length for example in study.examples.items)
    seconds = measure(
        {
            "plain forward": lambda: forward(study),
            "importance": lambda: study.scores(["importance"]),
            "importance,sensitivity": lambda: study.scores(["importance", "sensitivity"]),
            "usual loop": lambda: usual_loop(study),
        },
        chosen.rounds,
    )
    print(f"{chosen.examples} texts of {tokens / chosen.examples:.1f} tokens, one thread, best of {chosen.rounds}")
    print(f"largest relative difference from the usual loop: {float(((got - wanted).abs() / wanted).max()):.1e}")
    told(seconds)
    print(f"usual loop / importance: {seconds['usual loop'] / seconds['importance']:.1f}x")
    language_model(chosen.model, min(24, chosen.examples), chosen.rounds)


def language_model(model: str, examples: int, rounds: int) -> None:
    """Print what `effect` costs on a language model."""
    options = StudyOptions(data=DataOptions(limit=examples, max_length=48, on_long="truncate"), draws=2)
    study = Study.open(model, str(LANGUAGE / "test.jsonl"), options)
    print(f"{Path(model).name}: {len(study.sites)} sites, {examples} texts")
    wanted = {
        "plain forward": lambda: forward(study),
        "importance": lambda: study.scores(["importance"]),
        "effect": lambda: study.scores(["effect"]),
    }
    told(measure(wanted, rounds))


def told(seconds: dict[str, float]) -> None:
    """Print the seconds of candidates, the first of which is a plain forward."""
    base = seconds["plain forward"]
    for name, spent in seconds.items():
        print(f"{name:24s} {spent:7.2f} s   {spent / base:6.2f} plain forwards")


if __name__ == "__main__":
    main()
