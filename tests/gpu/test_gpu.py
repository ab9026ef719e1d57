"""On a GPU: the same numbers as on the CPU, proofs that hold, and a host that does not wait inside a batch."""

from __future__ import annotations

import agreement
import pytest
import torch
from test_samples import study

from headscope.capture import watch
from headscope.objective import Objective, Wanted
from headscope.study import batches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", sorted(agreement.DATA))
def test_the_gpu_says_what_the_cpu_says(name: str) -> None:
    for dtype, columns in agreement.agreement(name, "cuda", 8).items():
        for title, gap in columns.items():
            assert gap <= agreement.TOLERANCES[dtype], f"{title} in {dtype}"


def test_a_model_pruned_on_the_gpu_is_proved() -> None:
    assert agreement.proof("cuda")["passed"]


def test_two_runs_on_the_gpu_give_the_same_bits() -> None:
    first, second = (agreement.numbers("sentiment-minilm", "cuda", "float32", 16) for _ in range(2))
    for title, values in first.items():
        assert torch.equal(values.nan_to_num(), second[title].nan_to_num()), title


def test_the_host_waits_once_for_the_gradients_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the model's run and its losses nothing is asked of the GPU: that raises in this mode."""
    found = study("sentiment-minilm", limit=16, device="cuda")
    objective = Objective(found.loaded.model, found.loaded.task, found.sites)
    batch, wanted = batches(found)[0], Wanted(gradient=True, draws=1)
    with watch(found.loaded.model, found.sites) as seen:
        objective.run(batch, seen, wanted)
        rows, summed = objective._rows(batch, wanted), objective._summed
        monkeypatch.setattr(objective, "_rows", lambda *_: rows)

        def awake(*given: object) -> torch.Tensor:
            torch.cuda.set_sync_debug_mode("default")
            return summed(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(objective, "_summed", awake)
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert objective.run(batch, seen, wanted).gate
        finally:
            torch.cuda.set_sync_debug_mode("default")
