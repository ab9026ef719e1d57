"""`similarity` from the command line and as a function: pairs with verdicts, nearest ones, clusters, two models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import torch
from checkpoints import Ran, command  # noqa: F401
from conftest import SAMPLES, TEST_FILES
from pair_cases import ALL
from transformers import PreTrainedModel

import headscope
from headscope import likeness
from headscope.data import DataOptions
from headscope.errors import UsageError
from headscope.likeness import Question, compare_heads, default_measures, open_party
from headscope.measures import PairValues
from headscope.models import LoadOptions
from headscope.pair_sums import PairSums, load_measures
from headscope.pairing import Party
from headscope.pairing import run as run_pass
from headscope.similarity_report import PAIR_COLUMNS, every_column, pair_table, verdict
from headscope.study import Study, StudyOptions

Run = Callable[..., Ran]
DOUBLE = StudyOptions(LoadOptions(dtype="float64"), DataOptions(limit=6, max_length=24))
SENTIMENT = "sentiment-minilm"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return command(monkeypatch, capsysbinary)


def paths(name: str) -> tuple[str, str]:
    return str(SAMPLES / name), str(SAMPLES / name / TEST_FILES[name])


def party(name: str, options: StudyOptions = DOUBLE) -> Party:
    return open_party([paths(name)[0]], paths(name)[1], options)


@pytest.fixture(scope="module")
def sentiment() -> Party:
    return party(SENTIMENT)


@pytest.fixture(scope="module")
def whole(sentiment: Party) -> dict[str, PairValues]:
    """All measures of all pairs, from one plain pass."""
    sums = PairSums(sentiment.space, load_measures(ALL))
    run_pass(sentiment, sums)
    return sums.finish()


def best(values: torch.Tensor, count: int) -> list[tuple[int, int]]:
    left, right = torch.triu_indices(*values.shape, offset=1)
    order = values[left, right].nan_to_num(nan=-9).argsort(descending=True, stable=True)[:count]
    return list(zip(left[order].tolist(), right[order].tolist(), strict=True))


def test_all_pairs_are_reported_most_alike_first(sentiment: Party, whole: dict[str, PairValues]) -> None:
    found = compare_heads(sentiment, Question())
    assert tuple(found.values) == ALL == default_measures(True)
    for name, one in found.values.items():
        torch.testing.assert_close(one.values, whole[name].values, rtol=0, atol=1e-12, equal_nan=True)
    assert list(zip(*map(torch.Tensor.tolist, (found.pairs.left, found.pairs.right)), strict=True)) == best(
        whole["attention"].values, 72 * 71 // 2
    )
    table = pair_table(found)
    assert table.names == [column.name for column in PAIR_COLUMNS] + [*ALL, "verdict"]
    first = table.rows[0]
    assert first["attention"] == pytest.approx(float(whole["attention"].values.clone().fill_diagonal_(-1).max()))
    assert [type(first[name]) for name in ("a", "same_layer", "attention", "verdict")] == [str, bool, float, str]


@pytest.mark.parametrize("by", ["attention", "output"])
def test_nearest_pairs_take_few_comparisons_and_are_the_same(
    by: str, sentiment: Party, whole: dict[str, PairValues]
) -> None:
    found = compare_heads(sentiment, Question(("attention", "output"), by=by, top=20))
    pairs = list(zip(found.pairs.left.tolist(), found.pairs.right.tolist(), strict=True))
    assert pairs == best(whole[by].values, 20)
    assert 20 <= found.compared <= 0.1 * 2556
    for a, b in pairs:
        assert float(found.values["attention"].values[a, b]) == pytest.approx(
            float(whole["attention"].values[a, b]), abs=1e-12
        )


def test_a_threshold_bounds_what_is_compared(sentiment: Party, whole: dict[str, PairValues]) -> None:
    found = compare_heads(sentiment, Question(("attention",), threshold=0.6))
    expected = [pair for pair in best(whole["attention"].values, 2556) if whole["attention"].values[pair] >= 0.6]
    assert list(zip(found.pairs.left.tolist(), found.pairs.right.tolist(), strict=True)) == expected
    assert len(expected) <= found.compared < 2556 / 2


def test_pairs_of_one_head_and_of_one_layer(sentiment: Party, whole: dict[str, PairValues]) -> None:
    table = pair_table(compare_heads(sentiment, Question(("attention",), head="2.3", top=4)))
    values = whole["attention"].values[27].clone()
    values[27] = -1
    wanted = [str(sentiment.heads[place]) for place in values.topk(4).indices.tolist()]
    assert [({str(row["a"]), str(row["b"])} - {"encoder.self.2.3"}).pop() for row in table.rows] == wanted
    inside = pair_table(compare_heads(sentiment, Question(("attention",), same_layer=True)))
    assert len(inside.rows) == 6 * 66 and all(row["same_layer"] for row in inside.rows)


def test_importance_comes_from_the_same_pass(sentiment: Party, whole: dict[str, PairValues]) -> None:
    """It equals what `inspect` says, and the measures are those of a pass without gradients."""
    found = compare_heads(sentiment, Question(("attention", "output"), importance=True))
    torch.testing.assert_close(found.values["output"].values, whole["output"].values, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.values["attention"].values, whole["attention"].values, rtol=0, atol=1e-7)
    scores = sentiment.studies[0].scores(["importance"])
    row = pair_table(found).rows[0]
    for side in ("a", "b"):
        site = sentiment.studies[0].sites[int(str(row[side]).split(".")[2])]
        place = int(str(row[side]).split(".")[3])
        assert row[f"importance_{side}"] == pytest.approx(float(scores.values["importance"][site.id][place]), rel=1e-9)


def copy_head(model: PreTrainedModel, layer: int, *, pattern: bool, output: bool) -> None:
    """Let the third head of a layer attend, or write, like the second."""
    attention = model.bert.encoder.layer[layer].attention
    width = attention.self.attention_head_size
    a, b = (slice(head * width, (head + 1) * width) for head in (1, 2))
    layers = [attention.self.query, attention.self.key] if pattern else []
    layers += [attention.self.value] if output else []
    with torch.no_grad():
        for one in layers:
            one.weight[b], one.bias[b] = one.weight[a].clone(), one.bias[a].clone()
        if output:
            attention.output.dense.weight[:, b] = attention.output.dense.weight[:, a].clone()


def planted(layer: int, *, pattern: bool, output: bool) -> dict[str, object]:
    """The row of two heads of a layer of the sentiment model of which one was made like the other."""
    found = party(SENTIMENT)
    copy_head(found.studies[0].loaded.model, layer, pattern=pattern, output=output)
    question = Question(("attention", "output"), head=f"{layer}.1", importance=True)
    rows = pair_table(compare_heads(found, question)).rows
    return next(row for row in rows if {row["a"], row["b"]} == {f"encoder.self.{layer}.1", f"encoder.self.{layer}.2"})


def test_a_copied_head_is_redundant() -> None:
    row = planted(0, pattern=True, output=True)
    assert row["attention"] == pytest.approx(1, abs=1e-6) and row["output"] == pytest.approx(1, abs=1e-9)
    assert row["importance_a"] == pytest.approx(row["importance_b"], rel=1e-9)
    assert row["verdict"] == "redundant"


def test_one_map_with_different_values_is_the_same_pattern() -> None:
    row = planted(0, pattern=True, output=False)
    assert row["attention"] == pytest.approx(1, abs=1e-6) and float(str(row["output"])) < 0.9
    assert row["verdict"] == "same-pattern"


def test_different_maps_with_one_output_are_the_same_output() -> None:
    """In the last layer most tokens carry the same, so that it matters little which of them is attended to."""
    row = planted(5, pattern=False, output=True)
    assert float(str(row["output"])) >= 0.9 > float(str(row["attention"]))
    assert row["verdict"] == "same-output"


def test_unlike_heads_are_different() -> None:
    assert planted(0, pattern=False, output=False)["verdict"] == "different"


@pytest.mark.parametrize(
    ("attention", "output", "apart", "wanted"),
    [
        (0.9, 0.9, False, "redundant"),
        (0.9, 0.9, True, "same-pattern"),
        (0.95, 0.89, False, "same-pattern"),
        (0.89, 0.95, True, "same-output"),
        (0.89, 0.89, False, "different"),
        (None, 0.95, False, "same-output"),
        (0.95, None, False, "same-pattern"),
        (None, None, False, "different"),
    ],
)
def test_verdicts(attention: float | None, output: float | None, apart: bool, wanted: str) -> None:
    assert verdict({"attention": attention, "output": output}, apart=apart) == wanted


def test_no_verdict_without_both_measures() -> None:
    assert verdict({"attention": 1.0}) is None and verdict({"output": 1.0}) is None


def test_permuting_heads_permutes_rows(whole: dict[str, PairValues]) -> None:
    """Two heads of the first layer that change places: every other number stays, theirs are exchanged."""
    found = party(SENTIMENT)
    layer = found.studies[0].loaded.model.bert.encoder.layer[0].attention
    width = layer.self.attention_head_size
    order = torch.arange(12 * width).view(12, width)[[0, 2, 1, *range(3, 12)]].flatten()
    with torch.no_grad():
        for one in (layer.self.query, layer.self.key, layer.self.value):
            one.weight.copy_(one.weight[order].clone())
            one.bias.copy_(one.bias[order].clone())
        layer.output.dense.weight.copy_(layer.output.dense.weight[:, order].clone())
    values = compare_heads(found, Question()).values
    places = [0, 2, 1, *range(3, 72)]
    for name, one in values.items():
        torch.testing.assert_close(
            one.values, whole[name].values[places][:, places], rtol=0, atol=1e-9, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("name", ["llama-gqa-web", "t5-g2p", "vit-digits"])
def test_the_other_samples(name: str, run: Run) -> None:
    source, data = paths(name)
    ran = run("similarity", source, "--data", data, "--limit", 4, "--max-length" if "vit" not in name else "--seed", 24)
    assert ran.code == 0, ran.err
    header, *rows = ran.rows
    heads = {"llama-gqa-web": 32, "t5-g2p": 144 // 2, "vit-digits": 32}[name]
    assert len(rows) == heads * (heads - 1) // 2
    frame = pandas.DataFrame(rows, columns=header)
    if name == "llama-gqa-web":
        assert (frame["shared_kv"] == "true").sum() == 16  # four layers of four pairs of heads that share keys
    if name == "t5-g2p":
        across = frame[frame["a"].str.startswith("encoder") != frame["b"].str.startswith("encoder")]
        assert len(across) and set(across["attention"]) == set(across["output"]) == {""}
        crossed = frame[frame["a"].str.contains("cross") != frame["b"].str.contains("cross")]
        same = crossed[crossed["a"].str.startswith("decoder") & crossed["b"].str.startswith("decoder")]
        assert set(same["attention"]) == {""} and "" not in set(same["output"])


def test_weights_alone_need_no_data(run: Run) -> None:
    ran = run("similarity", paths("llama-gqa-web")[0], "--top", 3)
    assert ran.code == 0, ran.err
    assert ran.rows[0] == ["a", "b", "same_layer", "shared_kv", "qk", "ov", "verdict"]
    assert len(ran.rows) == 4 and float(ran.rows[1][4]) >= float(ran.rows[2][4])


def test_matrix_and_clusters(run: Run, tmp_path: Path) -> None:
    source, data = paths("vit-digits")
    options = ("--data", data, "--limit", 8)
    ran = run("similarity", source, *options, "--matrix", "output", "--plot", tmp_path / "one.png")
    assert ran.code == 0, ran.err
    frame = pandas.DataFrame(ran.rows[1:], columns=ran.rows[0]).set_index("head").astype(float)
    assert frame.shape == (32, 32) and list(frame.columns) == list(frame.index)
    assert (frame.to_numpy() == frame.to_numpy().T).all() and frame.to_numpy().diagonal() == pytest.approx(1)
    again = run("similarity", source, *options, "--matrix", "output", "--plot", tmp_path / "two.png")
    assert again.out == ran.out
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    for count in ("5", "auto"):
        ran = run("similarity", source, *options, "--measures", "output", "--clusters", count)
        assert ran.code == 0, ran.err
        header, *rows = ran.rows
        assert header == ["head", "cluster", "medoid"] and len(rows) == 32
        named = {row[1] for row in rows}
        assert len(named) == 5 if count == "5" else 2 <= len(named) < 32
        assert all({row[0]: row[1] for row in rows}[medoid] == cluster for _, cluster, medoid in rows)


def test_two_models_are_matched(run: Run, tmp_path: Path, in_process: None) -> None:
    """A pruned model's heads in front of what was cut are the original's, and all are matched to themselves."""
    source, data = paths("vit-digits")
    assert run("prune", source, "--heads", "0:1,2;3:0", "-o", tmp_path / "less").code == 0
    options = ("--data", data, "--limit", 8, "--measures", "attention,output,ov")
    ran = run("similarity", source, "--with", tmp_path / "less", *options, "--plot", tmp_path / "both.svg")
    assert ran.code == 0, ran.err
    frame = pandas.DataFrame(ran.rows[1:], columns=ran.rows[0])
    assert len(frame) == 32 * 29 and (tmp_path / "both.svg").stat().st_size > 1000
    matched = frame[frame["matched"] == "true"]
    assert list(matched.index) == list(range(29)), "matched pairs come first"
    assert (matched["a"] == matched["b"]).all()
    assert matched["ov"].astype(float).to_numpy() == pytest.approx(1)
    first = matched[matched["a"].str.startswith("vision.self.0.")]
    assert len(first) == 6 and first["attention"].astype(float).to_numpy() == pytest.approx(1, abs=1e-6)
    assert set(first["verdict"]) == {"redundant"} and set(frame["shared_kv"]) == {""}
    square = run("similarity", source, "--with", tmp_path / "less", "--data", data, "--limit", 4, "--matrix", "ov")
    assert (len(square.rows), len(square.rows[0])) == (33, 30)


def test_two_models_give_what_one_gives_twice(sentiment: Party, whole: dict[str, PairValues]) -> None:
    source, data = paths(SENTIMENT)
    both = open_party([source, source], data, DOUBLE)
    values = compare_heads(both, Question()).values
    for name, one in values.items():
        block = one.values[:72, 72:]
        torch.testing.assert_close(
            block, whole[name].values.clone().fill_diagonal_(1), rtol=0, atol=1e-6, equal_nan=True
        )


def test_the_function_gives_a_frame() -> None:
    source, data = paths("vit-digits")
    options = replace(DOUBLE, data=DataOptions(limit=4))
    frame = headscope.similarity(source, data, measures=["output", "qk"], top=3, options=options)
    assert list(frame.columns) == ["a", "b", "same_layer", "shared_kv", "output", "qk", "verdict"]
    assert len(frame) == 3 and frame["output"].is_monotonic_decreasing
    assert headscope.similarity(source, matrix="qk").shape == (32, 33)
    assert set(headscope.similarity(source, by="qk", clusters=3)["cluster"]) == {1, 2, 3}
    with pytest.raises(UsageError, match="not measured"):
        headscope.similarity(source, measures=["qk"], by="ov")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--measures", "outptu"), "did you mean 'output'"),
        (("--measures", "output"), "cannot be measured without data"),
        (("--importance",), "importance cannot be measured without data"),
        (("--matrix", "qk", "--clusters", "2"), "two reports"),
        (("--matrix", "all"), "one measure"),
        (("--clusters", "2", "--threshold", "0.5"), "--threshold is about pairs"),
        (("--clusters", "0"), "expected a positive whole number or 'auto'"),
        (("--clusters", "99"), "the model has 32 heads"),
        (("--clusters", "2", "--with", "."), "--clusters are of one model"),
        (("--pairs", "some"), "no such choice"),
        (("--threshold", "much"), "expected a number"),
        (("--head", "9.9"), "no head vision.self.9.9"),
        (("--head", "0.1,0.2"), "names 2 heads"),
        (("--columns", "a,nothing"), "no column 'nothing'"),
        (("--sort", "importance_a"), "no column 'importance_a'"),
        (("--measures", ","), "--measures names none"),
    ],
)
def test_what_cannot_be_meant_is_one_line(words: tuple[str, ...], said: str, run: Run) -> None:
    ran = run("similarity", paths("vit-digits")[0], *words)
    assert ran.code == 2 and ran.out == ""
    assert said in ran.err and len(ran.err.splitlines()) <= 3


def test_models_that_read_other_inputs_are_not_compared(run: Run) -> None:
    source, data = paths(SENTIMENT)
    ran = run("similarity", source, "--with", paths("llama-gqa-web")[0], "--data", data, "--limit", 4)
    assert ran.code == 2 and "causal-lm" in ran.err


def test_every_column_is_explained(run: Run) -> None:
    for column in every_column():
        ran = run("explain", column.name)
        assert ran.code == 0 and column.meaning in ran.out


def test_a_dry_run_compares_nothing(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(likeness.pairing, "run", lambda *_: pytest.fail("ran"))
    source, data = paths(SENTIMENT)
    ran = run("similarity", source, "--data", data, "--dry-run", "--top", 3, "-o", tmp_path / "x.csv")
    assert ran.code == 0, ran.err
    values = {row[0]: row[1] for row in ran.rows[1:] if len(row) == 3}
    assert values["pairs"] == "2556" and values["passes"] == "2.0" and not (tmp_path / "x.csv").exists()


def test_a_sample_of_tokens_says_so(
    sentiment: Party, whole: dict[str, PairValues], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where exact moments do not fit, values are estimates with an error, and the report has a note."""
    monkeypatch.setattr("headscope.moments.MOMENT_BYTES", 0)
    found = compare_heads(sentiment, Question(("output",)))
    assert any("estimated" in note for note in pair_table(found).notes)
    one = found.values["output"]
    assert one.error is not None and bool((one.error[one.values.isfinite()] >= 0).all())
    assert float((one.values - whole["output"].values).nanmean().abs()) < 0.2


def test_one_study_serves_both_models_of_a_party() -> None:
    """Ids of the second model's sites differ from the first one's, labels do not."""
    study = Study.open(*paths("vit-digits"), replace(DOUBLE, data=DataOptions(limit=4)))
    both = Party((study, study))
    assert len({site.id for site in both.space.sites}) == 8
    assert [str(head) for head in both.heads[:32]] == [str(head) for head in both.heads[32:]]
    assert int(both.candidates().sum()) == 32 * 32 and int(both.same_layer().sum()) == 4 * 16 * 16
