"""Cost of likenesses of all pairs of heads: against loops over stored maps and outputs, in plain forwards, in memory.

From one run, CPU seconds of one thread, best of some rounds in which all take turns, on the sentiment sample with its
72 heads: what each measure takes beyond the forward pass, and what loops take that compare stored maps or stored
written vectors (storing them is not counted); then whole passes in plain forwards. In processes of their own: peak
memory for 64, 256 and 1,024 texts, and for `output` of 1,200 heads of a random model shaped like a narrow GPT-2 XL.

    python tests/benchmarks/similarity.py [--examples 128] [--rounds 2] [--parts loops,passes,memory,large]
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model

from headscope.capture import watch
from headscope.data import DataOptions
from headscope.discovery import find_sites
from headscope.likeness import Question, compare_heads, open_party
from headscope.matrices import head_weights
from headscope.measures import Evidence, Measure, PairSum, PairValues
from headscope.measures.attention import Divergence, candidates
from headscope.pair_sums import PairSums, load_measures
from headscope.pairing import Party, run
from headscope.pairs import HeadSpace
from headscope.states import State
from headscope.study import StudyOptions, batches
from headscope.texts import Texts

SAMPLE = Path(__file__).parents[2] / "sample_inputs" / "sentiment-minilm"
FORWARD = "plain forward"


class Timed:
    """The sums of a measure, with the CPU seconds that they take."""

    def __init__(self, inner: PairSum) -> None:
        self.inner, self.seconds = inner, 0.0

    def add(self, part: Any) -> None:
        """Add a part on the clock."""
        start = time.process_time()
        self.inner.add(part)
        self.seconds += time.process_time() - start

    def state(self) -> State:
        """The sums of the measure itself."""
        return self.inner.state()

    def absorb(self, state: State) -> None:
        """Add sums on the clock."""
        start = time.process_time()
        self.inner.absorb(state)
        self.seconds += time.process_time() - start

    @property
    def size(self) -> int:
        """That of the measure itself."""
        return self.inner.size

    def finish(self) -> PairValues:
        """Finish on the clock."""
        start = time.process_time()
        found = self.inner.finish()
        self.seconds += time.process_time() - start
        return found


class Kept:
    """Keeps every part that is shown."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def add(self, part: Any) -> None:
        """Keep a part."""
        self.parts.append(part)

    def state(self) -> State:
        """Nothing: every unit of the data is shown to this one."""
        return {}

    def absorb(self, state: State) -> None:
        """Nothing to add."""

    @property
    def size(self) -> int:
        """Nothing is passed on."""
        return 0

    def finish(self) -> PairValues:
        """Nothing to say."""
        return PairValues(torch.zeros(0, 0))


def party(examples: int) -> Party:
    options = StudyOptions(data=DataOptions(limit=examples))
    return open_party([str(SAMPLE)], str(SAMPLE / "test.jsonl"), options)


def timed(heads: Party, measure: Measure) -> tuple[float, Tensor]:
    """Seconds that a measure takes beside the pass, and its values."""
    clock: list[Timed] = []

    def begin(space: HeadSpace) -> PairSum:
        clock.append(Timed(measure.begin(space)))  # one for all, and one for each unit of the data
        return clock[-1]

    sums = PairSums(heads.space, {measure.title: replace(measure, begin=begin)})
    run(heads, sums)
    values = sums.finish()[measure.title].values
    return sum(one.seconds for one in clock), values


def stored(heads: Party, evidence: Evidence) -> list[Any]:
    """All that a pass shows."""
    kept = Kept()
    column = load_measures(["output"])["output"].column
    run(heads, PairSums(heads.space, {"kept": Measure("kept", column, evidence, lambda space: kept)}))
    return kept.parts


def overlap_loop(texts: list[numpy.ndarray]) -> numpy.ndarray:
    """Hellinger overlap pair by pair, text by text."""
    count = len(texts[0])
    table = numpy.eye(count)
    for a in range(count):
        for b in range(a):
            table[a, b] = table[b, a] = numpy.mean([numpy.sqrt(cells[a] * cells[b]).sum() for cells in texts])
    return table


def divergence_loop(texts: list[numpy.ndarray]) -> numpy.ndarray:
    """Jensen-Shannon distance of each head against all others at once, text by text."""
    count = len(texts[0])
    total = numpy.zeros((count, count))
    for cells in texts:
        own = _entropy(cells)
        for head in range(count):
            total[head] += _entropy((cells + cells[head]) / 2) - (own + own[head]) / 2
    return 1 - numpy.sqrt(numpy.clip(total / len(texts) / math.log(2), 0, 1))


def _entropy(cells: numpy.ndarray) -> numpy.ndarray:
    return -(cells * numpy.log(cells, out=numpy.zeros_like(cells), where=cells > 0)).sum(axis=1)


def output_loop(written: list[Tensor]) -> Tensor:
    """Linear CKA pair by pair from the stored vectors that heads write, `[token d_model]` each."""
    centred = [one - one.mean(dim=0) for one in written]
    own = [float((one.T @ one).norm()) for one in centred]
    table = torch.eye(len(written), dtype=torch.float64)
    for a in range(len(written)):
        for b in range(a):
            table[a, b] = table[b, a] = float((centred[a].T @ centred[b]).norm() ** 2) / (own[a] * own[b])
    return table


def on_clock(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def loops(examples: int, rounds: int) -> None:
    """Measures beside loops over what was stored."""
    heads, measures = party(examples), load_measures(["hellinger", "attention", "output"])
    texts: dict[int, list[numpy.ndarray]] = {}
    for number, part in enumerate(stored(heads, Evidence.ROWS)):
        texts.setdefault(number, []).append(part.cells.numpy())
    cells = [numpy.concatenate(parts, axis=1) for parts in texts.values()]
    written: list[Tensor] = []
    outputs = stored(heads, Evidence.OUTPUTS)
    for number, site in enumerate(heads.space.sites):
        z = torch.cat([part.outputs[part.sites.index(number)] for part in outputs])
        matrix = heads.space.weights(site).output
        assert matrix is not None
        written += list(torch.einsum("thd,hdm->htm", z, matrix))
    naive: dict[str, Callable[[], Any]] = {
        "hellinger": lambda: overlap_loop(cells),
        "attention": lambda: divergence_loop(cells),
        "output": lambda: output_loop(written),
    }
    print(f"\n{examples} texts, 72 heads, 2,556 pairs; CPU seconds beside the forward pass")
    spent: dict[str, float] = {}
    for name, measure in measures.items():
        ours, theirs, apart = math.inf, math.inf, 0.0
        for _ in range(rounds):
            seconds, values = timed(heads, measure)
            slow, wanted = on_clock(naive[name])
            ours, theirs = min(ours, seconds), min(theirs, slow)
            apart = float((values - torch.as_tensor(wanted)).abs().max())
        spent |= {name: ours, f"{name} loop": theirs}
        print(f"{name:10s} {ours:7.2f} s, loop {theirs:7.2f} s: {theirs / ours:6.1f}x (largest difference {apart:.1e})")
    print(f"hellinger instead of the loop for attention: {spent['attention loop'] / spent['hellinger']:.1f}x")
    overlap = timed(heads, measures["hellinger"])[1]
    left = candidates(overlap, 20)
    near = partial(Divergence, pairs=left)
    _, some = timed(heads, replace(measures["attention"], begin=near))
    upper = torch.triu_indices(72, 72, offset=1)
    exact = torch.as_tensor(naive["attention"]())[upper[0], upper[1]]
    same = torch.equal(some[upper[0], upper[1]].nan_to_num(nan=-1).topk(20).indices, exact.topk(20).indices)
    print(
        f"20 nearest pairs by attention: {len(left)} of 2,556 compared ({len(left) / 25.56:.1f} %), the same 20: {same}"
    )


def forward(heads: Party) -> None:
    """A plain forward pass over the same batches."""
    study = heads.studies[0]
    with torch.inference_mode():
        for batch in batches(study):
            study.loaded.model(**batch.inputs)


def joint(heads: Party, scores: list[str], names: list[str]) -> None:
    """One pass for scores and measures together."""
    sums = PairSums(heads.space, load_measures(names))
    if scores:
        heads.studies[0].scores(scores, pairs=sums)
    else:
        run(heads, sums)
    sums.finish()


def passes(examples: int, rounds: int) -> None:
    """Whole passes in plain forwards."""
    heads = party(examples)
    ways: dict[str, Callable[[], None]] = {
        FORWARD: partial(forward, heads),
        "output": partial(joint, heads, [], ["output"]),
        "hellinger": partial(joint, heads, [], ["hellinger"]),
        "hellinger,output": partial(joint, heads, [], ["hellinger", "output"]),
        "attention": partial(joint, heads, [], ["attention"]),
        "importance,attention + hellinger,output": partial(
            joint, heads, ["importance", "attention"], ["hellinger", "output"]
        ),
        "similarity --top 20 --measures attention,output": lambda: _nearest(heads),
    }
    best = dict.fromkeys(ways, math.inf)
    for index in range(rounds + 1):
        for name, way in ways.items():
            seconds, _ = on_clock(way)
            if index:
                best[name] = min(best[name], seconds)
    print(f"\n{examples} texts; whole passes")
    for name, seconds in best.items():
        print(f"{name:50s} {seconds:7.2f} s   {seconds / best[FORWARD]:5.2f} plain forwards")


def _nearest(heads: Party) -> None:
    compare_heads(heads, Question(("attention", "output"), top=20))


def peak() -> float:
    """Peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(examples: int) -> None:
    """What a pass adds to the memory of a process."""
    heads = party(examples)
    run(party(8), PairSums(heads.space, load_measures(["hellinger", "output"])))
    before = peak()
    joint(heads, [], ["hellinger", "output"])
    print(f"{examples:5d} texts: peak {peak():6.0f} MiB, {peak() - before:5.0f} MiB above a pass over 8 texts")


def large() -> None:
    """`output` of 1,200 heads."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=48, n_head=25, n_embd=400, vocab_size=512, n_positions=128)
    model = GPT2Model(config).eval().requires_grad_(False)
    sites = find_sites(model).sites
    space = HeadSpace(sites, partial(head_weights, model))
    sums = PairSums(space, load_measures(["output"]))
    start = time.process_time()
    with torch.no_grad(), watch(model, sites, gradients=False) as seen, sums.watching(model, sites):
        for number in range(0, 32, 4):
            ids = torch.randint(512, (4, 128))
            seen.batch = 4
            sums.start(Texts({"input_ids": ids}, None, None), range(number, number + 4))
            model(input_ids=ids)
            sums.end(seen)
    found = sums.finish()["output"]
    seconds = time.process_time() - start
    known = int(found.values.isfinite().sum())
    print(f"{len(space.heads):,} heads: {known:,} values, {seconds:.0f} s, peak {peak():.0f} MiB")
    print(*found.notes, sep="\n")


def apart(part: str, *words: object) -> None:
    """Run a part in a process of its own."""
    subprocess.run([sys.executable, __file__, "--parts", part, *map(str, words)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parts", default="loops,passes,memory,large")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for part in chosen.parts.split(","):
        if part == "loops":
            loops(chosen.examples, chosen.rounds)
        elif part == "passes":
            passes(chosen.examples, chosen.rounds)
        elif part == "memory":
            print("\nhellinger and output, each in a process of its own", flush=True)
            for examples in (64, 256, 1024):
                apart("one", "--examples", examples)
        elif part == "one":
            memory(chosen.examples)
        else:
            large()


if __name__ == "__main__":
    main()
