"""Memory that runs out: batches are halved, down to single examples, and the results are those of whole ones."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from checkpoints import Ran, command, refused
from pandas.testing import assert_frame_equal
from task_cases import CASES
from tiny_tokenizers import save, write
from transformers import BertForSequenceClassification

from headscope.errors import DeviceError
from headscope.examples import Batch
from headscope.made_up._asked import BATCH, TOKENS
from headscope.memory import in_halves, memory_errors
from headscope.pair_sums import PairSums
from headscope.sums import ScoreSums

Run = Callable[..., Ran]
NOTE = "memory ran out: batches were halved"
ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total of 4 GiB"),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 1 GB, other allocations: 1 GB)"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "host": RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
    "python": MemoryError(),
}
COMMANDS = {
    "inspect": ("inspect", "--measures", "importance,sensitivity,effect,attention"),
    "gated": ("inspect", "--measures", "only,ablation"),
    "similarity": ("similarity", "--measures", "attention,output", "--importance"),
    "evaluate": ("evaluate",),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    """The command on the model and the seven examples of a case, all in one batch unless told."""
    place = save(tmp_path / "model", CASES["single"].build(), CASES["single"].companion())
    data = write(tmp_path / "rows.jsonl", CASES["single"].rows)
    given = command(monkeypatch, capsysbinary)
    return lambda name, *words: given(name, place, "--data", data, "--dtype", "float64", "--no-progress", *words)


def shrink(monkeypatch: pytest.MonkeyPatch, most: int, error: BaseException) -> list[int]:
    """Let the model fail on more than so many examples at once; returns the sizes that it then ran."""
    forward, sizes = BertForSequenceClassification.forward, list[int]()

    @functools.wraps(forward)  # headscope reads its signature
    def small(self: Any, input_ids: Any = None, **inputs: Any) -> Any:
        size, tokens = input_ids.shape
        if (size, tokens) != (BATCH, TOKENS):  # made-up inputs fit
            if size > most:
                raise error
            sizes.append(size)
        return forward(self, input_ids=input_ids, **inputs)

    monkeypatch.setattr(BertForSequenceClassification, "forward", small)
    return sizes


def frame(ran: Ran) -> pandas.DataFrame:
    assert ran.code == 0, ran
    return pandas.read_csv(io.StringIO(ran.out))


@pytest.mark.parametrize(("name", "most", "kind"), [
    ("inspect", 1, "cuda"), ("inspect", 2, "python"), ("gated", 3, "host"), ("similarity", 2, "mps"),
    ("evaluate", 1, "cublas"),
])  # fmt: skip
def test_b116_memory_that_runs_out_changes_nothing_but_a_note(
    name: str, most: int, kind: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(*COMMANDS[name])
    assert NOTE not in whole.err
    sizes = shrink(monkeypatch, most, ERRORS[kind])
    halved = run(*COMMANDS[name])
    assert_frame_equal(frame(halved), frame(whole), rtol=1e-6, atol=1e-12)
    assert halved.err.count(NOTE) == 1 and "Traceback" not in halved.err
    assert max(sizes) == most or (most == 3 and max(sizes) in (2, 3))


@pytest.mark.parametrize("name", COMMANDS)
def test_b116_an_example_that_does_not_fit_alone_is_one_error(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch, 0, ERRORS["cuda"])
    assert refused(run(*COMMANDS[name]), 1, "out of memory on one example", "hint: use --max-length")


def test_processes_that_run_a_batch_together_do_not_halve_it() -> None:
    """Of a model that is split, the other processes are in the midst of the same batch and would wait for ever."""
    batch, notes, tried = Batch({}, torch.zeros(4, 1), (0, 1, 2, 3), (1, 1, 1, 1)), list[str](), list[int]()

    def run(part: Batch) -> int:
        tried.append(len(part))
        if len(part) > 2:
            raise ERRORS["cuda"]
        return len(part)

    with pytest.raises(DeviceError, match="out of memory on 4 examples") as caught:
        list(in_halves(run, batch, notes, together=True))
    assert tried == [4] and not notes and "--batch-size" in str(caught.value.hint)
    assert [size for _, size in in_halves(run, batch, notes)] == [2, 2] and notes


@pytest.mark.parametrize("name", ["inspect", "similarity"])
def test_memory_that_runs_out_between_batches_is_no_bug(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch has ended it cannot be halved any more; what to do about it is the same."""

    def full(self: PairSums | ScoreSums, *args: Any) -> None:
        raise ERRORS["cuda"]

    monkeypatch.setattr(PairSums, "end", full)
    monkeypatch.setattr(ScoreSums, "add", full)
    assert refused(run(*COMMANDS[name]), 1, "error: out of memory\n", "--batch-size")


def test_memory_that_runs_out_in_a_check_names_the_batch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, 2, ERRORS["cuda"])
    assert refused(run("inspect", "--check"), 1, "out of memory on 7 examples", "--batch-size")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_errors():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(DeviceError, match="^out of memory$"), memory_errors():
        torch.empty(2**58)
