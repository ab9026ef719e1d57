"""What is lost with a share of the heads: loss, metric and divergence for criteria, with and without repair.

Choosing and repairing see a sample's dev file only, measuring its test file only. `michel` is `importance` without a
repair and without a floor, which is what usual scripts do. A row is printed as soon as it is known, as CSV, and at the
end the divergence of `auto` with repair over that of `michel`, share by share, with the geometric mean.

    python tests/benchmarks/prune_quality.py [--models sentiment-minilm,...] [--criteria auto,...] [--shares 40,50]
        [--examples 384] [--measured 400] [--min-heads 0] [--layout masked|real] [--on test|dev]

`--layout real` removes what can go for good (whole key/value groups); `--on dev` measures on a quarter of the dev file
that nothing else sees, for trying things out.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from headscope.card import Quality
from headscope.choice import Rules, choose, possible_counts, wanted_count
from headscope.counts import total_heads
from headscope.criteria import load_criterion
from headscope.data import DataOptions, load_examples
from headscope.examples import held_out
from headscope.plan import Plan, SiteHeads
from headscope.prepared import mender
from headscope.request import Request
from headscope.selection import select
from headscope.study import Study, StudyOptions
from headscope.trials import Trials, Verdict
from headscope.units import blocks

SAMPLES = Path(__file__).parents[2] / "sample_inputs"
MODELS = ("sentiment-minilm", "llama-gqa-web", "t5-g2p", "vit-digits")
CRITERIA = ("auto", "importance", "fisher", "joint-fisher", "sensitivity", "reconstruction", "reconstruction-fisher")
MICHEL, AUTO = "michel", "auto"


@dataclass(frozen=True)
class Setting:
    """How a run of the benchmark removes heads."""

    share: float
    min_heads: int
    masked: bool

    @property
    def unit(self) -> str:
        """Single heads where they are only silenced."""
        return "head" if self.masked else "auto"


class Bench:
    """One sample: examples to choose by, and others to measure on."""

    def __init__(self, name: str, chosen: argparse.Namespace) -> None:
        suffix = "csv" if name == "vit-digits" else "jsonl"
        files = [str(SAMPLES / name / f"{part}.{suffix}") for part in ("dev", "test")]
        options = StudyOptions(data=DataOptions(limit=chosen.examples, max_length=128 if "llama" in name else None))
        self.study = Study.open(str(SAMPLES / name), files[0], options)
        assert self.study.examples is not None
        if chosen.on == "dev":
            choosing, judged = held_out(self.study.examples, 7, split=5)
            self.study = self.study.on(choosing)
        else:
            judged = load_examples(
                files[1], self.study.loaded, DataOptions(limit=chosen.measured, max_length=options.data.max_length)
            )
        self.sites = tuple(SiteHeads.of(site) for site in self.study.sites)
        self.judging, self.mender = self.study.on(judged), mender(self.study)
        self._scores: dict[tuple[str, str], dict] = {}

    def plan(self, criterion: str, how: Setting) -> Plan:
        """What goes in one round by a criterion; `auto` as the command chooses it, with repair."""
        if criterion == AUTO:
            request = Request(
                ratio=self.count(how) / total_heads(self.sites),
                unit=how.unit,
                min_heads=how.min_heads,
                masked=how.masked,
                criterion=AUTO,
            )
            found = select(self.study, request, None, mender=self.mender)
            print(f"# {found.notes[-1]}", flush=True)
            return found.plan
        rules = Rules("model", how.unit, how.min_heads, structural=not how.masked)
        count = self.count(how)
        removed = choose(self.sites, self._order(criterion, rules), count, rules, total=total_heads(self.sites))
        return Plan(self.sites, tuple(sorted(removed)), criterion=criterion)

    def count(self, how: Setting) -> int:
        """The number of heads nearest to the share that can go."""
        rules = Rules("model", how.unit, how.min_heads, structural=not how.masked)
        wanted = wanted_count(how.share, self.sites)
        return min(possible_counts(self.sites, rules), key=lambda count: (abs(count - wanted), count))

    def _order(self, criterion: str, rules: Rules) -> dict:
        key = (criterion, rules.unit)
        if key not in self._scores:
            one = load_criterion(criterion)
            scores = (
                one.scores(self.study, 0)
                if one.greedy is None
                else one.greedy(self.study, 0, blocks(self.sites, rules))
            )
            self._scores[key] = dict(scores)
        return self._scores[key]

    def judged(self, plan: Plan, *, repair: bool) -> Verdict:
        """The model without the plan's heads on the examples that measure."""
        return Trials(self.judging, None, self.mender if repair else None).judged(plan)


def shown(name: str, criterion: str, share: float, plan: Plan, *, repair: str, quality: Quality) -> None:
    """Print one row."""
    cells = [name, criterion, repair, f"{share:g}", len(plan.removed), quality.loss, quality.metric, quality.divergence]
    print(",".join(f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells), flush=True)


def run(name: str, chosen: argparse.Namespace) -> dict[float, float]:
    """All rows of one model; the ratio of divergences for each share."""
    start = time.time()
    bench, ratios = Bench(name, chosen), {}
    for share in chosen.shares:
        how = Setting(share / 100, chosen.min_heads, chosen.layout == "masked")
        usual = bench.plan("importance", Setting(how.share, 0, how.masked))
        base = bench.judged(usual, repair=False)
        if share == chosen.shares[0]:
            shown(name, "dense", 0.0, Plan(bench.sites, ()), repair="", quality=base.whole)
        shown(name, MICHEL, how.share, usual, repair="no", quality=base.pruned)
        for criterion in chosen.criteria:
            plan = bench.plan(criterion, how)
            found = bench.judged(plan, repair=True)
            if criterion != AUTO:
                shown(name, criterion, how.share, plan, repair="no", quality=found.pruned)
            shown(name, criterion, how.share, plan, repair="yes", quality=found.final)
            if criterion == AUTO:
                assert found.final.divergence is not None and base.pruned.divergence
                ratios[share] = found.final.divergence / base.pruned.divergence
    print(f"# {name}: {time.time() - start:.0f} s", flush=True)
    return ratios


def _numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS)
    parser.add_argument("--criteria", type=lambda text: text.split(","), default=CRITERIA)
    parser.add_argument("--shares", type=_numbers, default=(25, 40, 50, 60, 75))
    parser.add_argument("--examples", type=int, default=384)
    parser.add_argument("--measured", type=int, default=400)
    parser.add_argument("--min-heads", type=int, default=0)
    parser.add_argument("--layout", choices=("masked", "real"), default="masked")
    parser.add_argument("--on", choices=("test", "dev"), default="test")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print("model,criterion,repair,share,heads_removed,loss,metric,divergence")
    table = {name: run(name, chosen) for name in chosen.models}
    if AUTO not in chosen.criteria:
        return
    print("\ndivergence of auto with repair over that of michel")
    print("model," + ",".join(f"{share:g} %" for share in chosen.shares))
    for name, ratios in table.items():
        print(f"{name}," + ",".join(f"{ratio:.3f}" for ratio in ratios.values()))
    counted = [ratio for ratios in table.values() for share, ratio in ratios.items() if share >= 40]
    if counted:
        mean = math.exp(sum(map(math.log, counted)) / len(counted))
        print(f"geometric mean from 40 % on: {mean:.3f}, worst {max(counted):.3f}")


if __name__ == "__main__":
    main()
