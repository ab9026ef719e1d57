"""How far a device agrees with the CPU in float64 on the samples, and how fast the whole command is there.

Writes one JSON file: for each sample and number format the largest gap of every column, over the column's largest
number; the proof of a pruned model; examples a second of `headscope inspect` and the most memory that the device gave.
On a CPU a reduced form, of fewer examples and no large model. Needs nothing that only tests need.

    python tests/gpu/agreement.py [--device cuda] [--out gpu.json]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import headscope
from headscope.cli import _run
from headscope.data import DataOptions
from headscope.likeness import Question, compare_heads
from headscope.models import LoadOptions
from headscope.pairing import Party
from headscope.study import Study, StudyOptions, batches

SAMPLES = Path(__file__).parents[2] / "sample_inputs"
DATA = {
    "sentiment-minilm": "test.jsonl",
    "llama-gqa-web": "test.jsonl",
    "t5-g2p": "test.jsonl",
    "vit-digits": "test.csv",
}
MEASURES = ("importance", "sensitivity", "attention")
PAIRED = ("attention", "hellinger", "output", "cosine")
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.15}
"""Of a column's largest number: rounding adds up over layers, and sums over tokens cancel."""
HALF = ("importance", "importance_token", "entropy", "confidence", "distance", "output of pairs")
"""What is compared in bfloat16: other columns hang on single drawn labels or on differences of what nearly cancels."""


@dataclass(frozen=True)
class Extent:
    """How much is run: samples, examples to compare of each, of the proof and of the timed command, a large model."""

    samples: tuple[str, ...] = tuple(DATA)
    compared: int = 24
    proved: int = 32
    timed: int = 512
    large: bool = True


REDUCED = Extent(("vit-digits",), compared=6, proved=8, timed=16, large=False)


def options(device: str, dtype: str, limit: int) -> StudyOptions:
    """Batches of four, whatever the device, so that all rows are padded alike."""
    return StudyOptions(LoadOptions(device=device, dtype=dtype), DataOptions(limit=limit), batch_size=4)


def numbers(name: str, device: str, dtype: str, limit: int) -> dict[str, torch.Tensor]:
    """All scores of heads, `[head]`, and likenesses of pairs, `[head head]`, of a sample."""
    study = Study.open(str(SAMPLES / name), str(SAMPLES / name / DATA[name]), options(device, dtype, limit))
    scores = {title: torch.cat(list(one.values())) for title, one in study.scores(MEASURES).values.items()}
    pairs = compare_heads(Party((study,)), Question(PAIRED)).values
    return scores | {f"{title} of pairs": one.values for title, one in pairs.items()}


def gaps(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference in each column, over its largest number; infinite where cells are empty in one only."""
    result: dict[str, float] = {}
    for title, values in wanted.items():
        same = torch.equal(values.isnan(), found[title].isnan())
        gap, size = (found[title] - values).nan_to_num().abs().max(), values.nan_to_num().abs().max()
        result[title] = float(gap / size.clamp_min(1e-300)) if same else float("inf")
    return result


def compared(title: str, dtype: str) -> bool:
    """Whether a column is compared in a number format; the name of a role may change by rounding."""
    return title != "role" and (dtype != "bfloat16" or title in HALF)


def agreement(name: str, device: str, limit: int) -> dict[str, dict[str, float]]:
    """The gaps of a sample's columns from the CPU in float64, by number format; on a CPU of float32 alone."""
    wanted = numbers(name, "cpu", "float64", limit)
    found: dict[str, dict[str, float]] = {}
    for dtype in ("float32",) if device == "cpu" else tuple(TOLERANCES):
        every = gaps(numbers(name, device, dtype, limit), wanted)
        found[dtype] = {title: gap for title, gap in every.items() if compared(title, dtype)}
    return found


def proof(device: str, limit: int) -> dict[str, Any]:
    """The proof of a checkpoint that was pruned on the device; it is written to a temporary folder."""
    sample = SAMPLES / "vit-digits"
    with tempfile.TemporaryDirectory() as folder:
        done = headscope.prune(
            str(sample),
            str(sample / "dev.csv"),
            Path(folder) / "smaller",
            ratio=0.3,
            options=options(device, "auto", limit),
        )
        return {"passed": done.verification.passed, "checks": done.verification.as_dict()}


def command(words: list[str]) -> None:
    """Run the command in this process; its report is thrown away."""
    sys.argv = ["headscope", *words]
    with contextlib.redirect_stdout(io.StringIO()):
        code = _run()
    if code:
        raise SystemExit(f"headscope {' '.join(words)} ended with {code}")


@contextlib.contextmanager
def peak(device: str) -> Iterator[Callable[[], float | None]]:
    """How many MB of the device were taken at most in the block; None on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    yield lambda: None if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20


def timed(model: Path, data: Path, device: str, limit: int, *more: str) -> dict[str, float | None]:
    """Examples a second of the whole command, from reading files to the report, after one run to warm up."""
    words = ["inspect", str(model), "--data", str(data), "--device", device, "--no-progress", "--quiet", *more]
    command([*words, "--limit", "8"])
    with peak(device) as megabytes:
        begin = time.perf_counter()
        command([*words, "--limit", str(limit)])
        seconds = time.perf_counter() - begin
        return {"examples": limit, "examples_per_second": limit / seconds, "peak_mb": megabytes()}


def passed(device: str, limit: int) -> dict[str, float]:
    """Examples a second of the pass alone, with everything loaded; the second of two."""
    sample = SAMPLES / "sentiment-minilm"
    wanted = StudyOptions(LoadOptions(device=device, dtype="float32"), DataOptions(limit=limit))
    study = Study.open(str(sample), str(sample / DATA["sentiment-minilm"]), wanted)
    seconds = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        study.scores(["importance"])  # which brings sums to the host, so that all is done by then
        seconds = time.perf_counter() - begin
    return {"examples": limit, "batches": len(batches(study)), "examples_per_second": limit / seconds}


def large(folder: Path) -> Path:
    """A random Llama of a billion parameters, with the vocabulary of the sample, as a checkpoint."""
    sample = SAMPLES / "llama-gqa-web"
    config = transformers.AutoConfig.from_pretrained(sample)
    config.update(
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
        }
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(sample).save_pretrained(folder)
    return folder


def speed(device: str, extent: Extent) -> dict[str, Any]:
    """The benchmark: the command on the sentiment sample on the CPU and the device, and on a large random model."""
    sample = SAMPLES / "sentiment-minilm"
    found: dict[str, Any] = {}
    for one in dict.fromkeys(("cpu", device)):
        found[f"inspect sentiment-minilm, {one}"] = timed(sample, sample / "test.jsonl", one, extent.timed)
        found[f"importance alone, {one}"] = passed(one, extent.timed)
    if extent.large:
        with tempfile.TemporaryDirectory() as folder:
            data = SAMPLES / "llama-gqa-web" / "test.jsonl"
            for measures in ("importance", "importance,attention"):
                found[f"inspect a Llama of 16 x 32 heads, {measures}, {device}"] = timed(
                    large(Path(folder)), data, device, 64, "--measures", measures
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    chosen = parser.parse_args()
    begin, extent = time.perf_counter(), REDUCED if chosen.device == "cpu" else Extent()
    found: dict[str, Any] = {
        "device": "cpu" if chosen.device == "cpu" else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "agreement": {name: agreement(name, chosen.device, extent.compared) for name in extent.samples},
        "proof": proof(chosen.device, extent.proved),
    }
    found["failures"] = [
        f"{name}, {dtype}: {title} is off by {gap:.2g}, allowed {TOLERANCES[dtype]:.2g}"
        for name, by_dtype in found["agreement"].items()
        for dtype, columns in by_dtype.items()
        for title, gap in columns.items()
        if not gap <= TOLERANCES[dtype]
    ] + ([] if found["proof"]["passed"] else ["the proof of the pruned model"])
    chosen.out.write_text(json.dumps(found, indent=1) + "\n")  # what is known by now, should the benchmark fail
    found["speed"] = speed(chosen.device, extent)
    found["seconds"] = time.perf_counter() - begin
    chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("device", "speed", "failures", "seconds")}, indent=1))
    raise SystemExit(bool(found["failures"]))


if __name__ == "__main__":
    main()
