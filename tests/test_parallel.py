"""Models that tensor parallelism splits between processes: heads, scores and likenesses are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from rank_cases import Ended, spread
from tiny_tokenizers import save, texts, tokenizer, write
from torch import Tensor
from zoo_configs import grouped

import headscope
from headscope.data import DataOptions
from headscope.errors import UsageError
from headscope.launching import Standing
from headscope.likeness import Question, compare_heads
from headscope.models import LoadOptions
from headscope.pairing import Party
from headscope.parallel import local
from headscope.study import Study, StudyOptions

MEASURES = ("weights", "importance", "sensitivity", "effect", "attention", "ablation", "only")
PAIRED = ("attention", "hellinger", "output", "cosine", "qk", "ov")
TOLERANCE = 1e-9
"""In float64; one process adds the parts of an output projection in another order."""


def checkpoint(folder: Path, name: str, model_class: str, **config: Any) -> tuple[str, str]:
    """A tiny model whose key/value heads two processes can share out, and texts."""
    model = zoo.build(grouped(name, model_class, **{"n_kv_heads": 2, "pad_token_id": None} | config))
    place = save(folder / "model", model, tokenizer("llama", pad=False))
    return place, write(folder / "rows.jsonl", [{"text": text} for text in texts((5, 9, 3, 12, 7))])


def found(place: str, data: str, *, split: bool) -> dict[str, Any]:
    """All that is measured of a model, and its sites."""
    options = StudyOptions(LoadOptions(dtype="float64", tensor_parallel=split), DataOptions(), batch_size=2)
    study = Study.open(place, data, options)
    scores = {name: torch.cat(list(one.values())) for name, one in study.scores(MEASURES).values.items()}
    pairs = {
        f"{name} of pairs": one.values for name, one in compare_heads(Party((study,)), Question(PAIRED)).values.items()
    }
    held = local(study.loaded.model.get_submodule(study.sites[0].output).weight)
    return {"sites": study.sites, "numbers": scores | pairs, "held": held.shape[1]}


def in_two(job: Callable[[], Any], folder: Path) -> list[Ended]:
    """What a job gives in each of two processes that may split a model."""

    def run(place: Standing) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=place.rank, world_size=place.world)
        return job()

    return spread(2, run, folder, patience=20.0)


def gap(values: Tensor, wanted: Tensor) -> float:
    """The largest difference, on the scale of the column."""
    assert torch.equal(values.isnan(), wanted.isnan())
    return float((values - wanted).nan_to_num().abs().max() / wanted.nan_to_num().abs().max().clamp_min(1e-300))


def same(folder: Path, name: str, model_class: str, **config: Any) -> bool:
    place, data = checkpoint(folder, name, model_class, **config)
    wanted = found(place, data, split=False)
    for ended in in_two(lambda: found(place, data, split=True), folder):
        assert ended.error == "" and ended.given is not None
        assert ended.given["sites"] == wanted["sites"], "heads of all processes, in order"
        assert ended.given["held"] * 2 == len(wanted["sites"][0].channels), "each process holds half of them"
        assert ended.given["numbers"].keys() == wanted["numbers"].keys()
        for title, values in wanted["numbers"].items():
            assert gap(ended.given["numbers"][title], values) <= TOLERANCE, title
    return True


def test_two_processes_that_share_out_heads_find_what_one_does(tmp_path: Path) -> None:
    assert same(tmp_path, "llama", "LlamaForCausalLM")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model_class", "config"),
    [
        ("qwen3", "Qwen3ForCausalLM", {}),
        ("gemma2", "Gemma2ForCausalLM", {"sliding_window": 4, "attn_logit_softcapping": 3.0}),
        ("mistral", "MistralForCausalLM", {"sliding_window": 4}),
    ],
    ids=["qwen3", "gemma2", "mistral"],
)
def test_other_families_too(tmp_path: Path, name: str, model_class: str, config: dict[str, Any]) -> None:
    assert same(tmp_path, name, model_class, **config)


def test_heads_that_cannot_be_shared_out_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, data = checkpoint(tmp_path, "llama", "LlamaForCausalLM")
    split = StudyOptions(LoadOptions(tensor_parallel=True))
    with pytest.raises(UsageError, match="needs several processes"):
        headscope.inspect(place, data, options=split)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="4 processes cannot share out 8 heads with 2 keys"):
        headscope.inspect(place, data, options=split)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="--device cpu names one"):
        headscope.inspect(place, data, options=StudyOptions(LoadOptions(tensor_parallel=True, device="cpu")))
    for refuse in (
        lambda: headscope.prune(place, data, ratio=0.3, options=split),
        lambda: headscope.evaluate(place, data, options=split),
        lambda: headscope.curve(place, data, options=split),
        lambda: headscope.check(place, options=split.load),
    ):
        with pytest.raises(UsageError, match="needs a whole model"):
            refuse()
