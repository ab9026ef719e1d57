"""Row sums: 1 in a sound model, less by what sinks take, and a failed check where attention is broken."""

import pytest
import tiny_tokenizers
import torch
from checkpoints import command, refused
from conftest import SAMPLES, TEST_FILES
from torch.testing import assert_close
from transformers.models.bert import modeling_bert
from transformers.models.gpt_oss import modeling_gpt_oss
from zoo import SPECIMENS

from headscope.checks import check, failures
from headscope.data import DataOptions
from headscope.models import LoadOptions
from headscope.row_sums import row_sums, switched_off
from headscope.study import Study, StudyOptions

TEXTS = tiny_tokenizers.texts((3, 7, 5, 4))


@pytest.fixture
def run(monkeypatch, capsysbinary):
    return command(monkeypatch, capsysbinary)


def saved(name, form, folder):
    """A zoo model with a tokenizer, and texts for it."""
    tokenizer = tiny_tokenizers.tokenizer(form)
    data = tiny_tokenizers.write(folder / "data.jsonl", [{"text": text, "label": 0} for text in TEXTS])
    return tiny_tokenizers.save(folder / "model", SPECIMENS[name].build().float(), tokenizer), data, tokenizer


def found(table):
    return {row["site"]: (row["status"], row["detail"]) for row in table.rows if row["check"] == "row_sums"}


def halved(eager):
    """An eager attention whose rows are half of what they should be."""

    def broken(*args, **kwargs):
        context, rows = eager(*args, **kwargs)
        return context / 2, rows / 2

    return broken


@pytest.mark.parametrize("name", sorted(TEST_FILES))
def test_rows_of_sound_models_sum_to_one(run, name):
    folder = SAMPLES / name
    ran = run("inspect", folder, "--check", "--data", folder / TEST_FILES[name], "--limit", "4", "--verbose")
    rows = [row for row in ran.rows if row[0] == "row_sums"]
    assert (ran.code, len(rows)) == (0, len(Study.open(str(folder)).sites))
    assert all(row[2] == "pass" and row[3].startswith("rows sum to 1 within ") for row in rows)
    assert "examples: 4\n" in ran.err
    assert "row_sums" not in run("inspect", folder, "--check").out


def test_the_check_honours_columns_and_limits(run, tmp_path):
    folder, _, _ = saved("bert", "bert", tmp_path)
    data = tiny_tokenizers.write(tmp_path / "more.jsonl", [{"words": text, "y": 0} for text in TEXTS * 20])
    words = ("inspect", folder, "--check", "--data", data, "--verbose")
    assert refused(run(*words), 2, "text")
    named = (*words, "--text-column", "words", "--label-column", "y")
    assert "examples: 32\n" in run(*named).err
    assert "examples: 32\n" in run(*named, "--limit", "all").err
    assert "examples: 3\n" in run(*named, "--limit", "3").err


@pytest.mark.parametrize("implementation", ["auto", "sdpa", "eager"])
def test_broken_attention_fails(run, tmp_path, monkeypatch, implementation):
    folder, data, _ = saved("bert", "bert", tmp_path)
    words = ("inspect", folder, "--check", "--data", data, "--attn-implementation", implementation)
    assert run(*words).code == 0
    monkeypatch.setattr(modeling_bert, "eager_attention_forward", halved(modeling_bert.eager_attention_forward))
    ran = run(*words)
    rows = [row for row in ran.rows if row[0] == "row_sums"]
    assert ran.code == 1
    assert rows
    assert all(row[2:] == ["fail", "rows sum to 0.5 to 0.5, not 1"] for row in rows if "0.4999" not in row[3])


def test_sinks_take_attention_and_that_is_no_failure(tmp_path):
    folder, data, tokenizer = saved("gpt_oss", "llama", tmp_path)
    table = check(folder, LoadOptions(dtype="float32"), data=data)
    assert failures(table) == 0
    model = Study.open(folder, None, StudyOptions(LoadOptions(dtype="float32"))).loaded.model
    taken = []
    for text in TEXTS:
        with torch.no_grad():
            maps = model(torch.tensor([tokenizer(text)["input_ids"]]), output_attentions=True).attentions
        taken.append([1 - float(one.sum(dim=-1).mean()) for one in maps])
    means = torch.tensor(taken).mean(dim=0).tolist()
    assert min(means) > 0.01
    for (status, detail), mean in zip(found(table).values(), means, strict=True):
        assert (status, detail.split("; ")[0]) == ("pass", f"sinks take {mean:.2g} of the attention")


def test_sinks_explain_only_what_they_take(tmp_path, monkeypatch):
    folder, data, _ = saved("gpt_oss", "llama", tmp_path)
    eager = modeling_gpt_oss.eager_attention_forward
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", halved(eager))
    rows = found(check(folder, LoadOptions(dtype="float32"), data=data))
    assert {status for status, _ in rows.values()} == {"fail"}
    assert all("with sinks switched off, not 1" in str(detail) for _, detail in rows.values())


def test_everything_is_put_back(tmp_path):
    folder, data, _ = saved("gpt_oss", "llama", tmp_path)
    study = Study.open(folder, data, StudyOptions(LoadOptions(dtype="float32"), DataOptions(limit=2)))
    model = study.loaded.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    assert all(sums.passed for sums in row_sums(study).values())
    sinks = [piece for site in study.sites for piece in site.slices if piece.name == "sinks"]
    assert len(sinks) == len(study.sites)
    with pytest.raises(ZeroDivisionError), switched_off(model, sinks):
        assert float(model.get_parameter(sinks[0].path).max()) < -1e30
        raise ZeroDivisionError
    assert model.config._attn_implementation == implementation
    for name, value in model.state_dict().items():
        assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_but_passes(tmp_path, dtype):
    folder, data, _ = saved("bert", "bert", tmp_path)
    rows = found(check(folder, LoadOptions(dtype=dtype), data=data))
    assert rows
    assert {status for status, _ in rows.values()} == {"pass"}
