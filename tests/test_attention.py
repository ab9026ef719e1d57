"""Attention statistics equal loops over transformers' own maps, for every structure, padded and of unequal lengths."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from conftest import SAMPLES, TEST_FILES
from torch import Tensor
from transformers import PreTrainedModel
from zoo import FAST, SPECIMENS

import headscope.patterns
import headscope.tiles
from headscope.data import DataOptions
from headscope.discovery import find_sites
from headscope.heads import AttentionKind, Site
from headscope.models import LoadOptions
from headscope.reading import RowReader
from headscope.scores import Evidence, Means
from headscope.scores.attention import MASSES, ROLES, SCORE
from headscope.study import Study, StudyOptions
from headscope.texts import Texts

SPECIAL = (0, 2)
TEXT = [
    *("bert", "roberta", "distilbert", "electra", "deberta", "deberta-v2", "mpnet", "modernbert", "gpt2", "gpt_neo"),
    *("gptj", "gpt_neox", "opt", "bloom", "mpt", "falcon-mqa", "falcon-gqa", "codegen", "llama"),
    *("llama-mqa", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "cohere", "stablelm"),
    *("gpt_oss", "deepseek_v3", "bitnet", "albert", "olmo2", "gpt_bigcode"),
]
# Not falcon-alibi: its eager path adds the bias to a mask that holds it already, so it is not the model under sdpa.
PAIRS = ["t5", "bart", "marian", "whisper", "speech_to_text"]
PICTURES = ["vit", "deit", "dinov2"]
FLOAT32_SOFTMAX = 2e-6  # many families' eager softmax is float32 whatever the model


def sums(model: PreTrainedModel, inputs: dict[str, Any], *, replace: bool = True) -> dict[Site, dict[str, Tensor]]:
    """Columns of each example `[batch head]` by site, from one forward pass of a model."""
    sites = find_sites(model).sites
    count = next(len(value) for value in inputs.values() if isinstance(value, Tensor))
    decoded = inputs.get("decoder_attention_mask")
    if decoded is None and "decoder_input_ids" in inputs:
        decoded = torch.ones_like(inputs["decoder_input_ids"])
    reader = RowReader(model, sites, [SCORE.rows], replace=replace)  # type: ignore[list-item]
    reader.start(Texts(inputs, decoded, torch.tensor(SPECIAL)), count)
    with torch.no_grad(), reader.reading():
        model(**inputs)
    positions = torch.ones(count, dtype=torch.long)
    return {site: SCORE.moments(Evidence(site, positions, rows=reader.sums[site.id])) for site in sites}


def own_maps(model: PreTrainedModel, inputs: dict[str, Any]) -> list[Tensor]:
    """The maps that transformers itself gives under eager attention, in the order of its own outputs."""
    if model.config.model_type == "falcon":
        model.config._attn_implementation = "eager"  # it cannot be switched by its method, and reads this when it runs
    else:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
    groups = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return [one for name in groups for one in (getattr(result, name, None) or ()) if one is not None]


def check(site: Site, found: dict[str, Tensor], maps: Tensor, inputs: dict[str, Any], tolerance: float) -> None:
    """Every column of every example of a site against the reference on its map."""
    pair = "decoder_input_ids" in inputs
    decoder = pair and site.id.stack == "decoder"
    ids = inputs.get("decoder_input_ids") if decoder else inputs.get("input_ids")
    mask = inputs.get("decoder_attention_mask") if decoder else inputs.get("attention_mask")
    source_mask = inputs.get("attention_mask")
    for example in range(len(maps)):
        grid = maps[example]
        texts = site.id.stack not in ("vision", "audio") and ids is not None and ids.shape[1] == grid.shape[1]
        real = int(mask[example].sum()) if texts and mask is not None else grid.shape[1]
        keys, special, tokens = real, None, None
        if site.id.kind is AttentionKind.CROSS:
            whole = source_mask is None or source_mask.shape[1] != grid.shape[2]
            keys = grid.shape[2] if whole else int(source_mask[example].sum())
            key_ids = inputs.get("input_ids")
        else:
            key_ids = ids if texts else None
            tokens = ids[example].tolist() if texts and ids is not None else None
        if key_ids is not None and key_ids.shape[1] == grid.shape[2]:
            special = [token in SPECIAL for token in key_ids[example].tolist()]
        wanted = reference.attention(grid, real=real, kind=str(site.id.kind), tokens=tokens, special=special, keys=keys)
        for name, values in wanted.items():
            got = found[name][example]
            torch.testing.assert_close(
                got, torch.tensor(values, dtype=torch.float64), rtol=tolerance, atol=tolerance, msg=f"{site.id} {name}"
            )
        absent = {name for name in MASSES if name not in wanted} & set(found)
        assert not absent, f"{site.id} measures {absent} without positions for it"


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=[pytest.mark.slow] * (way != "tiles" and name not in FAST))
        for way in ("blocks", "whole", "tiles")
        for name in (*TEXT, *PAIRS, *PICTURES)
    ],
)
def test_statistics_equal_loops_over_own_maps(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specimen = SPECIMENS[name]
    model = specimen.build()
    inputs = specimen.inputs(model)
    if way == "blocks":
        monkeypatch.setattr(headscope.patterns, "BLOCK_VALUES", 3 * 5 * 9 * 3)  # three queries
    if way == "tiles":
        monkeypatch.setattr(headscope.tiles, "LONG", 0)
        monkeypatch.setattr(headscope.tiles, "VALUES", 8 * 9 * 2)
    before = model.config._attn_implementation
    found = sums(model, inputs)
    assert model.config._attn_implementation == before
    maps = own_maps(model, inputs)
    assert len(maps) == len(found)
    for (site, columns), grid in zip(found.items(), maps, strict=True):
        check(site, columns, grid, inputs, FLOAT32_SOFTMAX * 5)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "t5", "mistral", "modernbert", "gpt_oss", "qwen3"])
def test_replaced_context_is_the_models_own(name: str) -> None:
    """Going on with the blocks' context changes the output by no more than eager differs from sdpa."""
    specimen = SPECIMENS[name]
    model = specimen.build()
    inputs = specimen.inputs(model)
    sites = find_sites(model).sites
    with torch.no_grad():
        plain = model(**inputs)
        reader = RowReader(model, sites, [SCORE.rows], replace=True)  # type: ignore[list-item]
        reader.start(Texts(inputs, None, None), 3)
        with reader.reading():
            read = model(**inputs)
    key = "logits" if hasattr(plain, "logits") else "last_hidden_state"
    scale = float(plain[key].abs().max())
    torch.testing.assert_close(read[key], plain[key], rtol=1e-5, atol=1e-5 * scale)
    reader = RowReader(model, sites, [SCORE.rows], replace=False)  # type: ignore[list-item]
    reader.start(Texts(inputs, None, None), 3)
    with torch.no_grad(), reader.reading():
        assert torch.equal(model(**inputs)[key], plain[key]), "reading alone changes nothing"


def test_rows_under_windows_bypass_nothing() -> None:
    """Swin's windows of one image count together; the statistics do not depend on how many images stand in a batch."""
    model = SPECIMENS["swin"].build()
    inputs = SPECIMENS["swin"].inputs(model)
    whole = sums(model, inputs)
    alone = sums(model, {name: value[1:2] if isinstance(value, Tensor) else value for name, value in inputs.items()})
    for (site, columns), other in zip(whole.items(), alone.values(), strict=True):
        for name, values in columns.items():
            torch.testing.assert_close(values[1:2], other[name], rtol=1e-6, atol=1e-9, msg=f"{site.id} {name}")


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "bloom"])
def test_padding_counts_for_nothing(name: str) -> None:
    model = SPECIMENS[name].build()
    inputs = SPECIMENS[name].inputs(model)
    whole = sums(model, inputs)
    row = 0
    length = int(inputs["attention_mask"][row].sum())
    alone = {}
    for key, value in inputs.items():
        if not isinstance(value, Tensor):
            alone[key] = value
        elif key.startswith("decoder"):
            size = int(inputs["decoder_attention_mask"][row].sum()) if "decoder_attention_mask" in inputs else None
            alone[key] = value[row : row + 1, :size]
        else:
            alone[key] = value[row : row + 1, :length]
    for (site, columns), other in zip(whole.items(), sums(model, alone).values(), strict=True):
        for title, values in columns.items():
            torch.testing.assert_close(values[row : row + 1], other[title], rtol=5e-6, atol=5e-6, msg=str(site.id))


@pytest.mark.parametrize("name", sorted(TEST_FILES))
def test_samples_equal_their_own_maps(name: str) -> None:
    options = StudyOptions(LoadOptions(), DataOptions(limit=6, max_length=20 if "llama" in name else None))
    found = Study.open(str(SAMPLES / name), str(SAMPLES / name / TEST_FILES[name]), options)
    scores = found.scores(["attention"])
    examples = found.examples
    assert examples is not None
    columns: dict[str, dict[Any, list[list[float]]]] = {}
    special = set(found.loaded.tokenizer().all_special_ids) if found.loaded.reads == "text" else None
    for batch in examples.batches(1, tokens=0):
        placed = found.loaded.task.prepare(found.loaded.model, batch) if found.loaded.task.prepare else batch.inputs
        maps = own_maps(found.loaded.model, dict(placed))
        for site, grid in zip(found.sites, maps, strict=True):
            ids = placed.get("decoder_input_ids" if site.id.stack == "decoder" and "t5" in name else "input_ids")
            sources = placed.get("input_ids")
            cross = site.id.kind is AttentionKind.CROSS
            keys = sources if cross else ids
            wanted = reference.attention(
                grid[0],
                real=grid.shape[2],
                kind=str(site.id.kind),
                tokens=None if ids is None or cross else ids[0].tolist(),
                special=None if keys is None or special is None else [token in special for token in keys[0].tolist()],
                keys=grid.shape[3],
            )
            for title, values in wanted.items():
                columns.setdefault(title, {}).setdefault(site.id, []).append(values)
    for title, by_site in columns.items():
        for site, values in by_site.items():
            mean = torch.tensor(values, dtype=torch.float64).mean(dim=0)
            torch.testing.assert_close(scores.values[title][site], mean, rtol=1e-5, atol=1e-5, msg=f"{site} {title}")


def test_uniform_causal_head_by_hand() -> None:
    """On four tokens uniform causal attention gives the previous token (0 + 1/2 + 1/3 + 1/4) / 4."""
    rows = torch.tril(torch.ones(4, 4)) / torch.arange(1, 5)[:, None]
    found = reference.attention(rows[None], real=4, kind="causal", tokens=[5, 6, 5, 6])
    assert found["previous"][0] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert found["previous"] == pytest.approx(found["previous_uniform"])
    assert found["entropy_ratio"][0] == pytest.approx(1)
    assert found["duplicate"][0] == pytest.approx((1 / 3 + 1 / 4) / 4)
    assert found["induction"][0] == pytest.approx((1 / 3 + 1 / 4) / 4)


def test_roles_by_hand() -> None:
    site = find_sites(SPECIMENS["bert"].build()).sites[0]  # five heads
    values = {
        f"{name}{end}": torch.zeros(5, dtype=torch.float64) for name in (*MASSES, "local") for end in ("", "_uniform")
    }
    values |= {
        name: torch.zeros(5, dtype=torch.float64) for name in ("entropy", "entropy_ratio", "distance", "confidence")
    }
    values["previous"][0], values["first"][0] = 0.6, 0.9  # the first in the list wins
    values["first"][1], values["first_uniform"][1] = 0.6, 0.3  # not three times uniform
    values["local"][2] = 0.95
    values["entropy_ratio"][3] = 0.95
    values["induction"][4], values["induction_uniform"][4] = 0.5, 0.1
    role = SCORE.finish(site, Means(1, values))["role"]
    assert [ROLES[int(code)] for code in role] == ["previous", "mixed", "local", "broad", "induction"]
