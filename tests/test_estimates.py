"""What dry runs state is held against the runs: peak memory of every command, and the seconds of `prune`."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import Ran, command
from tiny_tokenizers import save, texts, tokenizer, write
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from headscope.estimate import Extent
from headscope.examples import held_out
from headscope.footprint import peak, resident
from headscope.foresight import _Left, fitting_bytes, kept_bytes
from headscope.mending import Mender
from headscope.study import Study, batches

Run = Callable[..., Ran]

MEASURED = """
import re, resource, sys, time
time.monotonic = time.perf_counter = time.process_time
import headscope.cli
sys.argv = ["headscope", *sys.argv[1:]]
code = headscope.cli._run()
children = resource.getrusage(resource.RUSAGE_CHILDREN)
print("took:", time.process_time() + children.ru_utime + children.ru_stime, file=sys.stderr)
print("most:", re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
sys.exit(code)
"""
"""Prints kilobytes; not those of getrusage, which begin with what the starting process holds. Seconds are those of the
processor, so that nothing else that runs counts.
"""
SAMPLES = Path(__file__).parents[1] / "sample_inputs"
DATA = {"llama-gqa-web": "dev.jsonl", "sentiment-minilm": "dev.jsonl", "t5-g2p": "dev.jsonl", "vit-digits": "dev.csv"}
LLAMA = SAMPLES / "llama-gqa-web"
LONG = (LLAMA, "--data", LLAMA / "dev.jsonl", "--batch-size", "64")
"""Texts of 256 tokens, 64 at once, so that activations and logits take two to three times what libraries do."""


def measured(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """One run of the command in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, words), "--no-progress"],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran


def took(ran: subprocess.CompletedProcess[str]) -> float:
    return float(re.findall(r"took: (\S+)", ran.stderr)[0])


def most(ran: subprocess.CompletedProcess[str]) -> int:
    return 1024 * int(re.findall(r"most: (\d+)", ran.stderr)[0])


def items(ran: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What a dry run states, by name."""
    return {row["item"]: row["value"] for row in csv.DictReader(ran.stdout.splitlines())}


def near(stated: float, found: float, share: float = 0.25) -> bool:
    print(f"stated {stated / 1e6:.0f} MB, taken {found / 1e6:.0f} MB")
    return abs(stated / found - 1) < share


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return command(monkeypatch, capsysbinary)


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
    stated, ran = measured(*words, "--dry-run"), measured(*words)
    found = items(stated)
    assert (found["heads"], found["pairs"]) == ("5120", "13104640") and len(ran.stdout.splitlines()) == 6
    assert near(int(found["peak_bytes"]), most(ran), 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("measures", ["importance", "sensitivity,attention", "attention", "weights"])
def test_the_peak_of_inspect_is_what_the_dry_run_states(measures: str) -> None:
    words = ["inspect", *LONG, "--measures", measures, "--format", "csv"]
    assert near(int(items(measured(*words, "--dry-run"))["peak_bytes"]), most(measured(*words)))


@pytest.mark.slow
def test_the_peak_of_evaluate_is_what_the_dry_run_states() -> None:
    words = ["evaluate", LLAMA, *LONG, "--format", "csv"]
    assert near(int(items(measured(*words, "--dry-run"))["peak_bytes"]), most(measured(*words)))


@pytest.mark.slow
@pytest.mark.parametrize("repair", ["--compensate", "--no-compensate"])
def test_the_peak_of_a_curve_is_what_the_dry_run_states(repair: str, tmp_path: Path) -> None:
    words = ["prune", *LONG, "--limit", 64, repair]
    words += ["--criterion", "importance", "--unit", "group", "--curve", tmp_path / "curve.csv"]
    dry = measured(*words, "--dry-run", "--format", "csv")
    assert near(int(items(dry)["peak_bytes"]), most(measured(*words)))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 32])
def test_the_peak_of_an_offloaded_model_is_what_the_dry_run_states(batch: int) -> None:
    sample = SAMPLES / "sentiment-minilm"
    words = ["inspect", sample, "--data", sample / "test.jsonl", "--limit", 64, "--device", "balanced"]
    words += ["--batch-size", batch, "--format", "csv"]
    budget = {"HEADSCOPE_MAX_MEMORY": "cpu=12MB"}
    assert near(int(items(measured(*words, "--dry-run", **budget))["peak_bytes"]), most(measured(*words, **budget)))


TIME = re.compile(r"estimated time: (\d+) s, of which the plan and what it needs are (\d+) s")
PEAK = re.compile(r"estimated peak memory: ([\d,]+) bytes, and ([\d,]+) bytes of a process that loads")


@pytest.mark.slow
@pytest.mark.parametrize("with_data", [True, False], ids=["importance", "random"])
@pytest.mark.parametrize("name", sorted(DATA))
def test_what_a_dry_run_of_prune_states_is_what_the_run_takes(name: str, with_data: bool, tmp_path: Path) -> None:
    """A quarter of the heads of a sample: seconds within a factor of two, bytes within a quarter."""
    words = ["prune", SAMPLES / name, "--ratio", 0.25, "--unit", "group"]
    if with_data:
        words += ["--data", SAMPLES / name / DATA[name], "--criterion", "importance"]
    else:
        words += ["--criterion", "random"]
    dry, ran = measured(*words, "--dry-run"), measured(*words, "-o", tmp_path / "pruned")
    ((seconds, planned),) = TIME.findall(dry.stderr)
    print(f"stated {seconds} s, of which {planned} for the plan, taken {took(ran):.0f} s")
    assert 0.5 < int(seconds) / took(ran) < 2 and 0 < int(planned) <= took(dry) + 1
    ((peak, _),) = PEAK.findall(dry.stderr)
    assert near(int(peak.replace(",", "")), most(ran))


def test_a_dry_run_of_prune_states_time_and_memory_beside_its_plan(
    run: Run, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headscope.foresight.most", lambda: 0)  # else what earlier tests held
    monkeypatch.setattr("headscope.footprint.resident", lambda: 200_000_000)
    source = samples / "vit-digits"
    words = ("prune", source, "--data", source / "dev.csv", "--criterion", "random", "--ratio", 0.3, "--dry-run")
    bare, mended = (run(*words, "--format", "csv", more) for more in ("--no-compensate", "--compensate"))
    assert bare.out == mended.out and bare.out.startswith("site,heads_before")
    stated = {ran: [*TIME.findall(ran.err), *PEAK.findall(ran.err)] for ran in (bare, mended)}
    assert all(len(found) == 2 for found in stated.values())
    least, more = (int(stated[ran][1][0].replace(",", "")) for ran in (bare, mended))
    assert 200e6 < least < more


def test_every_stage_that_is_left_takes_its_part() -> None:
    """Seconds and bytes of a pruning grow with a repair, with a merge, and with what is judged."""
    found = Study.open(str(SAMPLES / "vit-digits"), str(SAMPLES / "vit-digits" / "test.csv"))
    assert found.examples is not None
    chosen, judged = held_out(found.examples, 0)
    whole, half = found.on(chosen), found.on(judged)
    bare = _Left(whole, half, None, torch.float16)
    mended = replace(bare, mender=Mender(whole, noise=False))
    passes, count = bare._passes(merged=False), len(batches(whole))
    assert mended._passes(merged=False) - passes == pytest.approx(
        (1 + 3 * 2.5 + 3 + 0.75) * count + 1.5 * len(batches(half))
    )
    assert bare._passes(merged=True) - passes == count
    few = replace(bare, judging=half.on(replace(judged, items=judged.items[:4])))
    assert passes - few._passes(merged=False) == 3.0 * (len(batches(half)) - 1) > 0
    assert mended._fitting() > 0 == bare._fitting()
    assert bare._proof() == 8 * bare.size and bare.reloading() == 4 * bare.size
    assert kept_bytes(whole, 3) == 3 * kept_bytes(whole) == 3 * 4 * 64 * 4 * Extent.of(batches(whole)).padded
    assert fitting_bytes(whole) > kept_bytes(whole)
