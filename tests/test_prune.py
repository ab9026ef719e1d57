"""`prune` from end to end: a verified checkpoint or nothing, loaded again by every road that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import Ran, command, refused  # noqa: F401
from pruning_cases import difference, masked, said
from safetensors.torch import load_file
from task_cases import CASES, open_case
from transformers import AutoModelForSequenceClassification, PreTrainedModel

import headscope
from headscope import layouts, plan, pruning, verify
from headscope.cli import prune as command_line
from headscope.discovery import find_sites
from headscope.errors import ProofFailed
from headscope.inputs import probe_inputs
from headscope.manifest import changed_files, read_manifest
from headscope.models import LoadOptions, load
from headscope.plan import SiteHeads, read_plan
from headscope.prune_report import summary
from headscope.request import Request

pytestmark = pytest.mark.usefixtures("own_modules")
Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return command(monkeypatch, capsysbinary)


def rows(ran: Ran) -> list[dict[str, str]]:
    header, *lines = ran.rows
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_the_sentiment_sample(run: Run, samples: Path, tmp_path: Path) -> None:
    """Heads by score, a portable checkpoint, and both ways of loading it give what the masked model says."""
    source, target = samples / "sentiment-minilm", tmp_path / "pruned"
    chosen = ("--data", source / "dev.jsonl", "--limit", 16, "--criterion", "importance", "--ratio", 0.3)
    ran = run("prune", source, *chosen, "--no-compensate", "-o", target)
    assert ran.code == 0, ran.err
    table = rows(ran)
    assert list(table[0]) == ["site", "heads_before", "heads_after", "kv_before", "kv_after", "removed"]
    assert sum(len(row["removed"].split()) for row in table) == 22  # ⌊0.3·72 + ½⌋
    assert all(int(row["heads_before"]) - int(row["heads_after"]) == len(row["removed"].split()) for row in table)
    assert "portable" in ran.err and "held-out loss" in ran.err

    whole = load(str(source), LoadOptions(dtype="float64")).model
    sites = find_sites(whole).sites
    plan = read_plan(target, [SiteHeads.of(site) for site in sites])
    inputs = probe_inputs(whole)
    expected = masked(whole, sites, plan, inputs)
    plain = AutoModelForSequenceClassification.from_pretrained(target, trust_remote_code=True, dtype=torch.float64)
    for model in (plain.eval(), headscope.load(target, dtype="float64")):
        assert difference(expected, said(model, inputs)) <= 1e-9
        assert sum(parameter.numel() for parameter in model.parameters()) < 12_535_682
    with pytest.raises((RuntimeError, ValueError)):
        AutoModelForSequenceClassification.from_pretrained(target, trust_remote_code=False)
    heads = headscope.inspect(str(target))["head"]
    assert sorted(heads) == sorted(str(head) for site in sites for head in site.heads if head not in plan.removed)

    manifest = read_manifest(target)
    assert manifest is not None and not changed_files(target, manifest)
    assert all(check["passed"] for check in manifest["proof"].values())
    assert {"tokenizer.json", "vocab.txt", "README.md", "modeling_headscope.py"} <= manifest["files"].keys()

    ran = run("evaluate", source, target, "--data", source / "test.jsonl", "--limit", 8)
    assert ran.code == 0, ran.err
    first, second = rows(ran)
    assert float(first["divergence"]) == 0 < float(second["divergence"])
    assert int(second["parameters"]) < int(first["parameters"])


NATIVE = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float64)
assert not any(name.startswith("headscope") for name in sys.modules)
assert type(model).__module__ == "transformers.models.llama.modeling_llama"
prompt = load_file(sys.argv[2])
with torch.no_grad():
    logits = model(**prompt).logits
tokens = model.generate(**prompt, max_new_tokens=5, do_sample=False)
save_file({"logits": logits, "tokens": tokens}, sys.argv[3])
"""


@pytest.mark.usefixtures("in_process")  # the program above starts a process of its own
def test_the_llama_sample_becomes_native(run: Run, samples: Path, tmp_path: Path) -> None:
    source, target = samples / "llama-gqa-web", tmp_path / "pruned"
    ran = run("prune", source, "--criterion", "random", "--ratio", 0.25, "--scope", "uniform", "-o", target)
    assert ran.code == 0, ran.err
    assert {(row["heads_after"], row["kv_after"]) for row in rows(ran)} == {("6", "3")}
    config = json.loads((target / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (6, 3, 32)
    assert "auto_map" not in config and not list(target.glob("*.py"))
    whole = load(str(source), LoadOptions(dtype="float64")).model
    sites = find_sites(whole).sites
    plan = read_plan(target, [SiteHeads.of(site) for site in sites])
    prompt = {name: value for name, value in probe_inputs(whole).items() if name != "use_cache"}
    from safetensors.torch import save_file

    save_file(prompt, tmp_path / "prompt.safetensors")
    script = [
        sys.executable,
        "-P",
        "-c",
        NATIVE,
        target,
        tmp_path / "prompt.safetensors",
        tmp_path / "said.safetensors",
    ]
    subprocess.run([str(part) for part in script], check=True)
    found = load_file(tmp_path / "said.safetensors")
    assert difference(masked(whole, sites, plan, prompt), [found["logits"]]) <= 1e-9
    assert found["tokens"].shape[1] == prompt["input_ids"].shape[1] + 5


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("sample", "sites"),
    [("t5-g2p", {"encoder.self", "decoder.causal", "decoder.cross"}), ("vit-digits", {"vision.self"})],
)
def test_the_other_samples_become_portable(
    run: Run, samples: Path, tmp_path: Path, sample: str, sites: set[str]
) -> None:
    target = tmp_path / "pruned"
    ran = run("prune", samples / sample, "--criterion", "random", "--ratio", 0.4, "-o", target)
    assert ran.code == 0, ran.err
    assert {row["site"].rpartition(".")[0] for row in rows(ran) if row["removed"]} == sites
    manifest = read_manifest(target)
    assert manifest is not None and manifest["layout"] == "portable"
    assert manifest["proof"]["pruned and reloaded outputs"]["difference"] == 0
    assert any("float64" in name and check["difference"] <= 1e-9 for name, check in manifest["proof"].items())


@pytest.mark.usefixtures("in_process")
def test_pruning_twice_keeps_the_first_numbers(run: Run, samples: Path, tmp_path: Path) -> None:
    source, first, second = samples / "vit-digits", tmp_path / "first", tmp_path / "second"
    assert run("prune", source, "--heads", "0:0,2", "-o", first).code == 0
    ran = run("prune", first, "--heads", "0:0,3;1:1", "-o", second)
    assert ran.code == 0, ran.err
    assert "vision.self.0.0: removed before" in ran.err
    at_once = tmp_path / "once"
    assert run("prune", source, "--heads", "0:0,2,3;1:1", "-o", at_once).code == 0
    one, other = load_file(second / "model.safetensors"), load_file(at_once / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    recipes = [json.loads((folder / "config.json").read_text())["headscope"] for folder in (second, at_once)]
    assert recipes[0] == recipes[1]


@pytest.mark.usefixtures("in_process")
def test_a_dry_run_writes_nothing_and_its_plan_can_be_fed_back(run: Run, samples: Path, tmp_path: Path) -> None:
    source = samples / "vit-digits"
    ran = run("prune", source, "--criterion", "random", "--ratio", 0.3, "--dry-run", "--format", "json")
    assert ran.code == 0, ran.err
    for words in ("parameters:", "attention MACs", "weights in bytes", "it would be portable", "headscope.load"):
        assert words in ran.err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "plan.json").write_text(ran.out)
    again = run("prune", source, "--plan", tmp_path / "plan.json", "-o", tmp_path / "pruned", "--format", "json")
    assert again.code == 0, again.err
    assert again.out == ran.out


@pytest.mark.usefixtures("in_process")
def test_data_that_only_judges_a_plan_did_not_choose_it(run: Run, samples: Path, tmp_path: Path) -> None:
    source, first, second = samples / "vit-digits", tmp_path / "first", tmp_path / "second"
    few = ("--limit", 8, "--no-compensate")
    chosen = ("--data", source / "dev.csv", "--criterion", "importance", "--ratio", 0.3)
    assert run("prune", source, *chosen, *few, "-o", first).code == 0
    assert run("prune", source, "--plan", first, "--data", source / "test.csv", *few, "-o", second).code == 0
    assert "chosen by: importance, on dev.csv." in (first / "README.md").read_text()
    assert "chosen by: importance." in (second / "README.md").read_text()


@pytest.mark.usefixtures("in_process")
def test_a_site_may_lose_all_heads(run: Run, samples: Path, tmp_path: Path) -> None:
    source, target = samples / "llama-gqa-web", tmp_path / "pruned"
    heads = "1:0,1,2,3,4,5,6,7"
    assert refused(run("prune", source, "--heads", heads, "-o", target), 2, "--min-heads 0")
    ran = run("prune", source, "--heads", heads, "--min-heads", 0, "-o", target)
    assert ran.code == 0, ran.err
    assert [row["heads_after"] for row in rows(ran)] == ["8", "0", "8", "8"]
    labels = set(headscope.inspect(str(target))["layer"])
    assert labels == {0, 2, 3}


@pytest.mark.usefixtures("in_process")
def test_masked_keeps_shapes_and_takes_any_heads(run: Run, samples: Path, tmp_path: Path) -> None:
    source, target = samples / "llama-gqa-web", tmp_path / "masked"
    assert refused(run("prune", source, "--heads", "0:1", "-o", target), 2, "--layout masked")
    ran = run("prune", source, "--heads", "0:1", "--layout", "masked", "-o", target)
    assert ran.code == 0, ran.err
    assert "neither time nor memory" in ran.err
    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["model.layers.0.self_attn.o_proj.weight"]
    flags = headscope.inspect(str(target))["flags"]
    assert [head for head, flag in flags.items() if "dead" in str(flag)] == ["decoder.causal.0.1"]


@pytest.mark.usefixtures("in_process")
def test_nothing_is_left_when_the_proof_fails(
    run: Run, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that changes between the proof in memory and the file on disk is noticed by the reload."""
    true_save = pruning.publish.__globals__["save_portable"]

    def spoilt(model: PreTrainedModel, folder: Path, **options: str) -> None:
        true_save(model, folder, **options)
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in tensors if "layers.0" in name and name.endswith("weight"))
        tensors[name] = tensors[name] + 0.01
        from safetensors.torch import save_file

        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    monkeypatch.setitem(pruning.publish.__globals__, "save_portable", spoilt)
    target = tmp_path / "pruned"
    ran = run("prune", samples / "vit-digits", "--heads", "0:0", "-o", target)
    assert refused(ran, 1, "proof failed", "reloaded")
    assert [path.name for path in tmp_path.iterdir()] in ([], ["modules"])


def test_surgery_gone_wrong_is_noticed(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking out another head than the plan says fails the first proof, in float64."""
    true_cut = pruning.take_out

    def wrong(model: PreTrainedModel, sites, plan) -> None:
        true_cut(model, sites, pruning.replace(plan, removed=(sites[0].heads[1],)))

    monkeypatch.setattr(pruning, "take_out", wrong)
    with pytest.raises(ProofFailed, match="float64"):
        headscope.prune(str(samples / "vit-digits"), output=tmp_path / "pruned", heads="0:0")
    assert not (tmp_path / "pruned").exists()


def test_a_verification_can_say_no() -> None:
    good, bad = verify.Check("outputs", 1e-12, 1e-9), verify.Check("outputs", float("nan"), 1e-9)
    assert verify.Verification((good,)).passed
    assert not verify.Verification((good, bad)).passed
    assert not verify.Verification().passed, "no check proves nothing"
    assert verify.compared([{"a": torch.ones(2)}], [{"b": torch.ones(2)}]) == float("inf")
    assert verify.compared([{"a": torch.ones(2)}], [{"a": torch.ones(3)}]) == float("inf")
    assert verify.compared([{"a": torch.tensor([2.0, 4.0])}], [{"a": torch.tensor([2.0, 5.0])}]) == 0.25
    assert verify.compared([{"a": torch.ones(2)}], [{"a": torch.tensor([1.0, float("nan")])}]) == float("inf")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--ratio", "0.3"), 2, "-o DIR"),
        (("-o", "x"), 2, "what to remove"),
        (("--ratio", "half", "-o", "x"), 2, "expected a share 0 <= R < 1"),
        (("--ratio", "0.3", "--criterion", "importance", "-o", "x"), 2, "needs data"),
        (("--ratio", "30", "-o", "x"), 2, "0.3"),
        (("--heads", "0:0", "--layout", "onnx", "-o", "x"), 2, "--layout"),
        (("--heads", "0:0", "--compensate", "-o", "x"), 2, "--compensate"),
        (("--heads", "9:0", "-o", "x"), 2, "no head"),
        (("--heads", "0:0", "--layout", "native", "-o", "x"), 2, "no native checkpoint"),
        (("--heads", "0:0", "--metric", "accuracy", "-o", "x"), 2, "--data"),
        (("--heads", "0:0", "--data", "absent.csv", "--metric", "acuracy", "-o", "x"), 2, "no metric 'acuracy'"),
        (("--heads", "0:0", "--columns", "site,nope", "-o", "x"), 2, "no column 'nope'"),
        (("--heads", "0:0", "--max-shard-size", "abc", "-o", "x"), 2, "such as 5GB"),
        (("--plan", "nowhere.json", "-o", "x"), 1, "nowhere.json"),
        (("--target-parameters", "5", "--criterion", "random", "-o", "x"), 3, "cannot be met"),
    ],
)
def test_wrong_use_is_one_line(
    run: Run,
    samples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(run("prune", samples / "vit-digits", *options), code, words)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["modules"])


def test_what_became_of_held_out_data_is_said(run: Run, samples: Path, tmp_path: Path) -> None:
    source, few = samples / "vit-digits", tmp_path / "few.csv"
    few.write_text("".join((source / "test.csv").read_text().splitlines(keepends=True)[:4]))
    given = ("--data", source / "dev.csv", "--eval-data", few, "--limit", 8, "--heads", "0:0", "--dry-run")
    ran = run("prune", source, *given)
    assert ran.code == 0, ran.err
    assert "note: --eval-data: --limit 8 is more than there are: all 3 examples are used" in ran.err


def test_why_f1_is_the_metric_is_said_as_by_evaluate(run: Run, samples: Path, tmp_path: Path) -> None:
    source, skewed = samples / "vit-digits", tmp_path / "skewed.csv"
    header, *rows = (source / "test.csv").read_text().splitlines()
    skewed.write_text("\n".join([header, *("3" + row[row.index(",") :] for row in rows[:10])]))  # the label comes first
    given = ("--data", source / "dev.csv", "--eval-data", skewed, "--limit", 10, "--heads", "0:0", "--no-compensate")
    ran = run("prune", source, *given, "-o", tmp_path / "pruned")
    assert ran.code == 0, ran.err
    assert "note: f1 is the metric, since one class has more than 80 % of the labels" in ran.err
    assert "note: all labels are of one class: f1 says nothing" in ran.err


@pytest.mark.usefixtures("in_process")
def test_a_divergence_of_directions_is_not_in_nats(tmp_path: Path) -> None:
    open_case(CASES["embedding"], tmp_path)
    request = Request(ratio=0.5, criterion="random", min_heads=0)
    done = pruning.prune(
        str(tmp_path / "model"), str(tmp_path / "rows.jsonl"), tmp_path / "pruned", pruning.PruneOptions(request)
    )
    said_of_it = [line for line in summary(done) if line.startswith(("divergence", "repaired"))]
    assert len(said_of_it) == 2 and all("1 - cos" in line and "nats" not in line for line in said_of_it)


@pytest.mark.usefixtures("in_process")
def test_the_target_is_checked_first(run: Run, samples: Path, tmp_path: Path) -> None:
    source = samples / "vit-digits"
    assert refused(run("prune", source, "--heads", "0:0", "-o", source), 2, str(source))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    assert refused(run("prune", source, "--heads", "0:0", "-o", tmp_path / "there", "--force"), 2, "no checkpoint")
    (tmp_path / "there" / "model.safetensors").write_text("old")
    assert refused(run("prune", source, "--heads", "0:0", "-o", tmp_path / "there"), 2, "--force")
    assert (tmp_path / "there" / "config.json").read_text() == "{}"
    assert run("prune", source, "--heads", "0:0", "-o", tmp_path / "there", "--force").code == 0
    assert (tmp_path / "there" / "headscope.json").is_file()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stand_in_pad_token_is_not_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    """A decoder that classifies needs a pad token for batches, also where it is loaded anew in the format of its files;
    a stand-in is no part of the checkpoint.
    """
    from tiny_tokenizers import tokenizer

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=20, n_head=5, n_layer=2, vocab_size=53, n_positions=16, num_labels=2)
    config.pad_token_id = None
    transformers.GPT2ForSequenceClassification(config).to(dtype).save_pretrained(tmp_path / "whole")
    tokenizer("gpt2", pad=False).save_pretrained(tmp_path / "whole")
    lines = [
        {"text": text, "label": number % 2}
        for number, text in enumerate(("w1 w2 w3", "w2 w5", "w9 w2 w1 w4", "w7") * 3)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = headscope.prune(str(tmp_path / "whole"), str(tmp_path / "data.jsonl"), tmp_path / "pruned", heads="0:1")
    assert done.verification.passed
    written = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert written.get("pad_token_id") is None


def test_the_command_knows_what_the_library_knows() -> None:
    """The command line repeats these names, so that --help and a misspelt one need no torch."""
    assert (command_line.SCOPES, command_line.UNITS, command_line.LAYOUTS) == (plan.SCOPES, plan.UNITS, layouts.LAYOUTS)
