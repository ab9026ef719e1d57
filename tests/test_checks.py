"""Structure checks see what is built wrong and nothing else; reports without loading agree with the loaded model."""

import dataclasses
from functools import partial

import pytest
import torch
from checkpoints import BERT_QUERY, bert, command, configure, llama, refused, rewrite
from conftest import SAMPLES, TEST_FILES, slow_if
from zoo import FAST, SPECIMENS

from headscope import inspection
from headscope.checks import check, failures
from headscope.headers import has_safetensors
from headscope.models import LoadOptions
from headscope.study import Study, StudyOptions
from headscope.survey import survey

HEALTHY = ("bert", "albert", "gpt2", "gpt_neox", "llama", "t5", "vit", "clip", "olmo2", "distilbert", "qwen3")
NOT_BUILT_BY_AUTO = {"clip": "embedding", "wav2vec2": "embedding", "whisper": "embedding"}
UNLIKE = {
    "bart": "a buffer, final_logits_bias, is stored among the parameters",
    "marian": "position tables, which the config settles, are not stored; final_logits_bias is",
    "wav2vec2": "loaded without its head, which is stored",
    "whisper": "loaded without its head",
}
"""Why the total of stored parameters differs from the loaded model's."""
SELF = "bert.encoder.layer.1.attention."


@pytest.fixture
def run(monkeypatch, capsysbinary):
    return command(monkeypatch, capsysbinary)


def found(folder, name):
    """Rows of a check, by site."""
    table = check(str(folder))
    return {row["site"]: (row["status"], row["detail"]) for row in table.rows if row["check"] == name}


def saved(name, folder):
    """A zoo model on disk in float32; every one can be opened by what its architecture says, or as an embedding."""
    SPECIMENS[name].build().float().save_pretrained(folder)
    return folder


def equal_heads(tensors, heads=(1, 4), d_head=4):
    for role in ("query", "key", "value"):
        for what in ("weight", "bias"):
            parameter = tensors[f"{SELF}self.{role}.{what}"]
            first, second = (slice(head * d_head, (head + 1) * d_head) for head in heads)
            parameter[second] = parameter[first]


def zero_output(tensors, head, d_head=4):
    tensors[f"{SELF}output.dense.weight"][:, head * d_head : (head + 1) * d_head] = 0


def zero_value(tensors, head, *, bias, d_head=4):
    tensors[f"{SELF}self.value.weight"][head * d_head : (head + 1) * d_head] = 0
    tensors[f"{SELF}self.value.bias"][head * d_head : (head + 1) * d_head] = 0.0 if bias else 1.0


def test_heads_with_equal_weights(run, tmp_path):
    rewrite(bert(tmp_path), equal_heads)
    rows = found(tmp_path, "equal_heads")
    assert rows["encoder.self.0"][0] == "pass"
    assert rows["encoder.self.1"] == ("fail", "heads with equal query, key and value weights: 1, 4")
    ran = run("inspect", tmp_path, "--check")
    assert ran.code == 1
    assert ran.out.startswith("check,site,status,detail\nconfig,,pass,41 stored tensors fit config.json\n")
    assert ran.err == "error: 1 of 14 structure checks failed\n"


@pytest.mark.parametrize(
    ("damage", "dead"),
    [
        (lambda tensors: [zero_output(tensors, 2), zero_output(tensors, 0)], "0, 2"),
        (partial(zero_value, head=3, bias=True), "3"),
        (partial(zero_value, head=3, bias=False), None),
    ],
    ids=["output", "value", "value-with-bias"],
)
def test_heads_that_write_nothing(run, tmp_path, damage, dead):
    rewrite(bert(tmp_path), damage)
    expected = ("fail", f"heads that write nothing: {dead}") if dead else ("pass", "every head can write")
    assert found(tmp_path, "dead_heads") == {
        "encoder.self.0": ("pass", "every head can write"),
        "encoder.self.1": expected,
    }
    assert run("inspect", tmp_path, "--check").code == int(dead is not None)
    flags = [row[1] for row in run("inspect", tmp_path, "--columns", "head,flags").rows[1:]]
    assert flags == ["dead" if dead and str(row - 5) in dead.split(", ") and row > 4 else "" for row in range(10)]


@pytest.mark.parametrize(
    ("fields", "failed"),
    [
        ({"num_attention_heads": 12}, {"head_count": "q_proj", "concatenation": "o_proj"}),
        ({"num_key_value_heads": 6}, {"head_count": "k_proj"}),
        ({"num_key_value_heads": 1}, {"head_count": "v_proj"}),
        ({"head_dim": 6}, {"head_count": "q_proj", "concatenation": "o_proj"}),
    ],
)
def test_a_wrong_head_count_is_laid_at_the_right_projection(run, tmp_path, fields, failed):
    configure(llama(tmp_path), **fields)
    table = check(str(tmp_path))
    for name, projection in failed.items():
        rows = [row for row in table.rows if row["check"] == name]
        assert {row["site"] for row in rows} == {"decoder.causal.0", "decoder.causal.1"}
        assert {row["status"] for row in rows} == {"fail"}
        assert any(f"self_attn.{projection}.weight is stored as [" in str(row["detail"]) for row in rows)
    assert (table.rows[-1]["check"], table.rows[-1]["status"]) == ("weights", "skip")
    assert run("inspect", tmp_path, "--check").code == 1


def test_an_output_projection_that_does_not_return_to_the_stream(run, tmp_path):
    name = "model.layers.1.self_attn.o_proj.weight"
    rewrite(llama(tmp_path), lambda tensors: tensors.update({name: torch.ones(20, 24)}))
    detail = f"{name} is stored as [20, 24], config.json asks for [24, 24]"
    assert found(tmp_path, "output_width") == {"decoder.causal.1": ("fail", detail)}
    assert run("inspect", tmp_path, "--check").code == 1


def test_shapes_of_other_layers_are_laid_at_the_config(tmp_path):
    configure(llama(tmp_path), intermediate_size=30)
    table = check(str(tmp_path))
    assert {(row["check"], row["site"]) for row in table.rows} == {("config", ""), ("weights", "")}
    assert failures(table) == 6


def test_names_without_the_prefix_of_the_body_are_compared(tmp_path):
    configure(bert(tmp_path), intermediate_size=30)
    assert failures(check(str(tmp_path), LoadOptions(task="embedding"))) == 6


def test_non_finite_weights_are_counted_and_the_rest_is_checked(run, tmp_path):
    rewrite(bert(tmp_path), lambda tensors: tensors[BERT_QUERY][0, :3].fill_(float("nan")))
    assert found(tmp_path, "finite") == {"": ("fail", f"3 values of {BERT_QUERY} are NaN or infinite")}
    assert found(tmp_path, "dead_heads")["encoder.self.0"][0] == "pass"
    assert run("inspect", tmp_path, "--check").code == 1


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_pass(name, tmp_path):
    saved(name, tmp_path)
    table = check(str(tmp_path), LoadOptions(task=NOT_BUILT_BY_AUTO.get(name, "auto")))
    assert failures(table) == 0
    assert [row["check"] for row in table.rows if row["status"] == "skip"] == ["equal_heads"] * 2 * (name == "olmo2")
    sites = {row["site"] for row in table.rows} - {""}
    assert len(sites) == SPECIMENS[name].n_sites
    assert {row["check"] for row in table.rows if row["site"]} == {
        *("projections", "split", "concatenation", "output_width", "equal_heads", "dead_heads")
    }


def test_coupled_heads_are_said_but_no_failure(tmp_path):
    saved("olmo2", tmp_path)
    rows = [row["detail"] for row in check(str(tmp_path)).rows if row["check"] == "projections"]
    assert rows
    assert all(str(detail).startswith("heads are coupled by model.layers.") for detail in rows)


@pytest.mark.parametrize("name", sorted(TEST_FILES))
def test_sample_models_pass(run, name):
    ran = run("inspect", SAMPLES / name, "--check", "--quiet")
    assert (ran.code, ran.err) == (0, "")
    assert {row[2] for row in ran.rows[1:]} == {"pass"}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "albert", "olmo2", "gpt_neox"])
def test_structure_names_every_slice(run, name, tmp_path):
    ran = run("inspect", saved(name, tmp_path), "--structure")
    assert ran.code == 0
    assert ran.rows[0][:8] == ["site", "module", "class", "heads", "kv_heads", "head_dim", "value_dim", "parameters"]
    study = Study.open(str(tmp_path))
    rows = inspection.structure_table(study).rows
    assert len(rows) == SPECIMENS[name].n_sites
    modules = dict(study.loaded.model.named_modules())
    parameters = dict(study.loaded.model.named_parameters())
    for row in rows:
        assert type(modules[str(row["module"])]).__name__ == row["class"]
        slices = [part.split(": ") for part in str(row["parameters"]).split("; ")]
        assert {"query", "key", "value", "output"} <= {role for role, _ in slices}
        for _, place in slices:
            path, _, axis = place.removesuffix("]").partition("[")
            assert parameters[path].shape[int(axis)] >= int(row["heads"] or 0) // 2
    coupled = {bool(row["coupled"]) for row in rows}
    assert coupled == {name == "olmo2"} or name == "t5"
    remarks = " ".join(str(row["remark"]) for row in rows)
    assert ("one module for layers" in remarks) == (name == "albert")


def same(quick, loaded, skip=()):
    """Whether two tables have equal rows, columns named in `skip` apart."""
    assert quick.names == loaded.names
    assert len(quick.rows) == len(loaded.rows)
    for a, b in zip(quick.rows, loaded.rows, strict=True):
        assert {k: v for k, v in a.items() if k not in skip} == {k: v for k, v in b.items() if k not in skip}
    return True


def surveyed(folder, task="auto"):
    """Both reports without loading and with; None where the outline does not answer."""
    quick = [survey(str(folder), by, 100) for by in ("model", "layer")]
    if None in quick:
        return None
    study = Study.open(str(folder), options=StudyOptions(load=LoadOptions(task=task)))
    scores = dataclasses.replace(study.scores(["weights"]), measures=(), values={})
    return quick, [inspection.model_table(study, 100), inspection.layer_table(study, scores, 100)]


@pytest.mark.parametrize("name", sorted(TEST_FILES))
def test_survey_of_samples_agrees_with_the_loaded_model(name):
    both = surveyed(SAMPLES / name)
    assert both is not None
    for quick, loaded in zip(*both, strict=True):
        assert same(quick, loaded)


@pytest.mark.parametrize("name", slow_if(SPECIMENS, SPECIMENS.keys() - FAST))
def test_survey_of_the_zoo_agrees_with_the_loaded_model(name, tmp_path):
    folder = saved(name, tmp_path)
    assert has_safetensors(folder)
    both = surveyed(folder, NOT_BUILT_BY_AUTO.get(name, "auto"))
    if both is None:
        assert name not in ("bert", "gpt2", "llama", "vit")
        return
    for quick, loaded in zip(*both, strict=True):
        assert same(quick, loaded, {"total_parameters", "attention_share"} if name in UNLIKE else ())


def test_nothing_to_check_is_an_error(run, tmp_path):
    assert refused(run("inspect", tmp_path, "--check"), 1, "no config.json")
