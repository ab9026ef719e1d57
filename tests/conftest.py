"""Test set-up: one thread, no network, and shape annotations that are run."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)  # tiny models: a second thread only waits

SHAPED = ["headscope.capture", "headscope.losses", "headscope.matrices", "headscope.scores"]
with install_import_hook(SHAPED, "beartype.beartype"):
    import headscope.capture
    import headscope.losses
    import headscope.matrices
    import headscope.scores
    import headscope.scores.weights  # noqa: F401

from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "sample_inputs"
TEST_FILES = {
    "sentiment-minilm": "test.jsonl",
    "llama-gqa-web": "test.jsonl",
    "t5-g2p": "test.jsonl",
    "vit-digits": "test.csv",
}


@pytest.fixture(scope="session")
def samples() -> Path:
    return SAMPLES
