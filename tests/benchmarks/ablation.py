"""Cost of exact ablation against whole passes, and what a budget of exact runs buys.

Prints, from one run in which both take turns, CPU seconds of one thread for every head of the sentiment sample, of a
model as large as BERT-base with random weights and of the language model sample: one whole pass with a gate a head
(`naive`), and `ablation` without its metric. Then, from the exact changes and guesses of every example, over many
seeds: how many exact runs a head a plain subset needs for the summed squared error that `--budget` reaches, the share
of 95 % intervals that hold the mean over all examples, and the bias in standard errors. A fixed part of `ablation`, the
proof of the ways in which sites are reached again, takes some ten passes, and weighs more the fewer the examples are.

    python tests/benchmarks/ablation.py [--examples 64] [--rounds 2] [--population 512] [--seeds 200]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from headscope import ablated
from headscope.capture import gate
from headscope.data import DataOptions
from headscope.heads import HeadId
from headscope.objective import Objective
from headscope.sampling import estimate
from headscope.study import Study, StudyOptions, batches

SAMPLES = Path(__file__).parents[2] / "sample_inputs"
BUDGETS = (16, 24, 32)


def opened(name: str, limit: int) -> Study:
    """A study of one sample."""
    folder = SAMPLES / name
    return Study.open(str(folder), str(folder / "test.jsonl"), StudyOptions(data=DataOptions(limit=limit)))


def as_large_as_bert(study: Study) -> Study:
    """The texts of a study for a BERT-base with random weights."""
    config = BertConfig(vocab_size=study.loaded.model.config.vocab_size)
    model = BertForSequenceClassification(config).eval().requires_grad_(False)
    return Study(replace(study.loaded, model=model), study.examples, study.options)


def naive(study: Study) -> Tensor:
    """Mean change of the loss for every head, by whole passes."""
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    rows: list[Tensor] = []
    for batch in batches(study):
        whole, columns = objective.losses(batch), []
        for site in study.sites:
            for head in torch.eye(site.n_heads):
                with gate(study.loaded.model, {site.id: 1 - head}, [site]):
                    columns.append(objective.losses(batch) - whole)
        rows.append(torch.stack(columns, dim=1))
    return torch.cat(rows).mean(dim=0)


def fast(study: Study) -> Tensor:
    """The same from where each head comes in."""
    return study.ablate(heads_of(study)).change


def removals(study: Study) -> list[ablated.Removal]:
    return ablated.removals_of(heads_of(study), study.sites)


def heads_of(study: Study) -> list[list[HeadId]]:
    return [[head] for site in study.sites for head in site.heads]


def bench(study: Study) -> ablated.Bench:
    assert study.examples is not None
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    return ablated.Bench(objective, study.examples.items, lambda some: batches(study, some))


def compare(name: str, study: Study, rounds: int) -> None:
    """Print least CPU seconds of both ways, which take turns."""
    best, found = {naive: float("inf"), fast: float("inf")}, {}
    assert study.sites
    for _ in range(rounds):
        for way in best:
            start = time.process_time()
            found[way] = way(study)
            best[way] = min(best[way], time.process_time() - start)
    gap = float((found[naive] - found[fast]).abs().max())
    print(
        f"{name:18s} naive {best[naive]:7.2f} s   ablation {best[fast]:7.2f} s   ratio {best[fast] / best[naive]:.3f}"
        f"   largest difference {gap:.1e} of {float(found[naive].abs().max()):.1e}",
        flush=True,
    )


def efficiency(name: str, study: Study, seeds: int) -> None:
    """Print what budgets buy, from one exact table."""
    made = bench(study)
    changes = study.ablate(heads_of(study)).changes
    values = torch.stack([changes[item.number] for item in made.examples])
    guess = ablated._guesses(made, removals(study))
    truth, examples = values.mean(dim=0), len(values)
    for budget in BUDGETS:
        found = [
            estimate(guess, lambda rows, columns: values[torch.tensor(rows)[:, None], torch.tensor(columns)], budget,
                     seed=seed)
            for seed in range(seeds)
        ]  # fmt: skip
        errors = torch.stack([one.mean for one in found]) - truth
        inside = [(one.mean - truth).abs() <= one.margin(one.sampling_error) + 1e-12 for one in found]
        runs = float(torch.stack([one.runs for one in found]).double().mean())
        share = float(errors.square().mean(dim=0).sum() / values.var(dim=0).sum())
        plain = 1 / (share + 1 / examples)  # runs of a plain subset, drawn without replacement
        bias = float((errors.mean(dim=0).abs() / errors.std(dim=0).clamp_min(1e-12)).median())
        print(
            f"{name:18s} budget {budget}: {runs:.1f} runs a head of {examples} are worth {plain:.1f} plain ones "
            f"({plain / runs:.1f}x), intervals cover {float(torch.stack(inside).double().mean()):.3f}, "
            f"median bias {bias:.3f} standard errors (noise alone {0.67 / seeds**0.5:.3f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--population", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=200)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    compare("sentiment-minilm", opened("sentiment-minilm", chosen.examples), chosen.rounds)
    compare("llama-gqa-web", opened("llama-gqa-web", chosen.examples), chosen.rounds)
    compare("bert-base-like", as_large_as_bert(opened("sentiment-minilm", max(2, chosen.examples // 4))), 1)
    for name in ("sentiment-minilm", "llama-gqa-web"):
        efficiency(name, opened(name, chosen.population), chosen.seeds)


if __name__ == "__main__":
    main()
