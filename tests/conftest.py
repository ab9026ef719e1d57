"""Test set-up: one thread, no network, and shape annotations that are run."""

from __future__ import annotations

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
import transformers.masking_utils  # noqa: F401  before the hook, under which Python finds none of it compiled
import transformers.modeling_utils  # noqa: F401
import transformers.processing_utils  # noqa: F401
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

torch.set_num_threads(1)  # tiny models: a second thread only waits

SHAPED = ["headscope.capture", "headscope.losses", "headscope.matrices", "headscope.scores", "headscope.subsets"]
with install_import_hook(SHAPED, "shape_checks.checked"):
    import headscope.capture
    import headscope.losses
    import headscope.matrices
    import headscope.scores
    import headscope.scores.weights
    import headscope.subsets  # noqa: F401

import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils import logging

from headscope import reload, verify

settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")  # a busy machine is no fault of what is tested

SAMPLES = Path(__file__).parents[1] / "sample_inputs"
TEST_FILES = {
    "sentiment-minilm": "test.jsonl",
    "llama-gqa-web": "test.jsonl",
    "t5-g2p": "test.jsonl",
    "vit-digits": "test.csv",
}


def slow_if(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Parameters of a test, of which some take their time."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def pytest_collection_finish() -> None:
    """What is imported by now stays, so that no later search for garbage looks through it; and searches are fewer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # small models are made by the thousand, and most go without being searched for


@pytest.fixture
def own_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code of checkpoints is copied to a folder of the test, not to the user's cache."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def in_process(own_modules: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Proofs reload in this process, which saves the seconds of starting another; a few tests start one."""
    monkeypatch.setattr(verify, "launch", lambda arguments, scratch: reload.main(*arguments))
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if bars:
        logging.enable_progress_bar()


@pytest.fixture(scope="session")
def samples() -> Path:
    return SAMPLES
