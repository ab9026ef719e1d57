"""Curves: every row is a trial of its plan, plans grow along one order, and a report and a picture come of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Ran, command, refused
from pruning_cases import gates, plan_of
from task_cases import CASES, open_case

import headscope
from headscope import curve_outlay, curves
from headscope.capture import gate
from headscope.choice import choose
from headscope.criteria import load_criterion
from headscope.curve_columns import CURVE_COLUMNS, FURTHEST
from headscope.curve_report import curve_table, lines, panels, summary
from headscope.curves import RANDOM, Curve, Series, Tracing, trade_off
from headscope.data import DataOptions, load_examples
from headscope.errors import InvalidPlan, UsageError
from headscope.examples import held_out
from headscope.heads import HeadId
from headscope.mending import Mender
from headscope.models import LoadOptions, load
from headscope.objective import Objective
from headscope.plan import Plan, SiteHeads
from headscope.pruning import PruneOptions
from headscope.reports._curve import Line, Panel, curve_figure
from headscope.reports._picture import save_picture
from headscope.request import Request
from headscope.stored import stored_format
from headscope.study import Study, StudyOptions, batches
from headscope.trials import Trials

Run = Callable[..., Ran]
LIMIT = 32
LABELLED = ("importance", "importance-layer-norm", *RANDOM)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return command(monkeypatch, capsysbinary)


def options(
    limit: int | None = LIMIT, *, ratio: float = FURTHEST, compensate: bool | None = None, **request: Any
) -> PruneOptions:
    """Options of a curve in float64."""
    study = StudyOptions(load=LoadOptions(dtype="float64"), data=DataOptions(limit=limit))
    layout = "masked" if request.get("masked") else "auto"
    return PruneOptions(Request(ratio=ratio, **request), study, layout=layout, compensate=compensate)


class Sample:
    """The digits, with their curve by the criterion fisher, and studies of the same two parts of the data.

    Repairs take time, so only the first part of the curve has them.
    """

    def __init__(self, folder: Path) -> None:
        self.model, self.data = str(folder), str(folder / "test.csv")
        self.found = trade_off(self.model, self.data, options(criterion="fisher", compensate=False))
        self.start = trade_off(self.model, self.data, options(criterion="fisher", ratio=0.4))
        loaded = load(self.model, LoadOptions(dtype="float64"))
        chosen = options().study
        choosing, judging = held_out(load_examples(self.data, loaded, chosen.data), 0)
        self.study = Study(loaded, choosing, chosen)
        self.judging = self.study.on(judging)
        self.sites = tuple(SiteHeads.of(site) for site in self.study.sites)

    def series(self, criterion: str, *, repair: bool = False) -> Series:
        """One series of the curve, or of its first part."""
        whole = self.start if repair else self.found
        (one,) = (one for one in whole.series if (one.criterion, one.repair) == (criterion, repair))
        return one

    def scores(self, criterion: str) -> dict[HeadId, float]:
        """The scores behind a series, each asked for alone."""
        if criterion.startswith("random-"):
            return dict(load_criterion("random").scores(self.study, int(criterion[-1])))
        if criterion != "importance-layer-norm":
            return dict(load_criterion(criterion).scores(self.study, 0))
        importance = load_criterion("importance").scores(self.study, 0)
        norms = {
            site.id: sum(importance[HeadId(site.id, head)] ** 2 for head in site.heads) ** 0.5 for site in self.sites
        }
        return {head: value / norms[head.site] for head, value in importance.items()}

    def plan(self, criterion: str, count: int) -> Plan:
        """What `--ratio` removes."""
        rules = curves.Rules("model", "auto")
        return Plan(self.sites, choose(self.sites, self.scores(criterion), count, rules) if count else ())


@pytest.fixture(scope="module")
def digits(samples: Path) -> Sample:
    return Sample(samples / "vit-digits")


def test_the_series_and_their_points(digits: Sample) -> None:
    """32 heads, of which each of four sites keeps one: 28 are the nearest to 90 %."""
    found = digits.found
    assert [(one.criterion, one.repair) for one in found.series] == [
        ("fisher", False), *((name, False) for name in LABELLED),
    ]  # fmt: skip
    for series in found.series:
        assert [point.removed for point in series.points] == [0, 3, 6, 10, 13, 16, 19, 22, 26, 28]
    first, second, *rest = digits.start.series
    assert [(one.criterion, one.repair) for one in (first, second)] == [("fisher", True), ("fisher", False)]
    for series, start in zip(found.series, (second, *rest), strict=True):
        assert start == replace(series, points=series.points[:5]), "a repair leaves no trace"
    assert len([note for note in found.notes if "ends at 28 of 32 heads" in note]) == 1
    assert not any("the curve ends" in note for note in digits.start.notes)
    assert (found.heads, found.examples, found.criterion) == (32, LIMIT // 4, "fisher")


@pytest.mark.parametrize("criterion", ["fisher", *LABELLED])
def test_rows_are_trials_of_the_plans_that_a_ratio_means(digits: Sample, criterion: str) -> None:
    """By scores of a criterion alone and the exact choice of a number, not by an order of removal."""
    trials = Trials(digits.judging, None)
    for point in digits.series(criterion).points[1::3]:
        verdict = trials.judged(digits.plan(criterion, point.removed))
        assert (point.quality.loss, point.quality.metric) == pytest.approx(
            (verdict.pruned.loss, verdict.pruned.metric), rel=1e-9
        )
        assert point.quality.divergence == pytest.approx(verdict.pruned.divergence, rel=1e-9)


def test_repaired_rows_are_trials_with_repair(digits: Sample) -> None:
    trials = Trials(digits.judging, None, Mender(digits.study, dtype=stored_format(digits.study.loaded)))
    repaired, bare = digits.series("fisher", repair=True), digits.series("fisher")
    for place in (3, 4):
        verdict = trials.judged(digits.plan("fisher", repaired.points[place].removed))
        assert repaired.points[place].quality.divergence == pytest.approx(verdict.final.divergence, rel=1e-6)
    assert any(one.quality != other.quality for one, other in zip(repaired.points, bare.points, strict=False))
    assert repaired.points[0] == bare.points[0]


def test_a_row_is_what_gates_of_zero_do(digits: Sample) -> None:
    """Loss and divergence from logits, by their formulas."""
    study, point = digits.judging, digits.series("importance").points[5]
    objective = Objective(study.loaded.model, study.loaded.task, study.sites)
    plan = plan_of(study.sites, digits.plan("importance", point.removed).removed)
    losses: list[float] = []
    apart: list[float] = []
    for batch in batches(study):
        with torch.no_grad():
            whole = objective.forward(batch).log_softmax(dim=1)
            with gate(study.loaded.model, gates(study.sites, plan), study.sites):
                less = objective.forward(batch).log_softmax(dim=1)
        labels = batch.targets[batch.predicted]
        losses += (-less[torch.arange(len(labels)), labels]).tolist()
        apart += (whole.exp() * (whole - less)).sum(dim=1).tolist()
    assert point.quality.loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    assert point.quality.divergence == pytest.approx(sum(apart) / len(apart), rel=1e-9)
    assert point.quality.divergence > 0 == digits.found.whole.divergence


def test_plans_lie_within_each_other(digits: Sample) -> None:
    tracing = Tracing.open(digits.model, digits.data, options(8))
    for scope in ("model", "layer", "uniform"):
        tracing.rules = replace(tracing.rules, scope=scope)
        plans = tracing.plans(digits.scores("importance"))
        counts = [len(plan.removed) for plan in plans]
        assert counts == sorted(set(counts)) and counts[0] == 0
        assert all(set(small.removed) < set(large.removed) for small, large in zip(plans, plans[1:], strict=False))
    assert counts == [0, 4, 8, 12, 16, 20, 24, 28], "as many in each of four sites; 3 of 32 is nearest to 4"


def test_one_pass_serves_all_columns_of_a_measure(digits: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    true_scores = Study.scores

    def noted(self: Study, measures: Any = None, **more: Any) -> Any:
        asked.append(list(measures))
        return true_scores(self, measures, **more)

    monkeypatch.setattr(Study, "scores", noted)
    tracing = Tracing.open(digits.model, digits.data, options(8, criterion="fisher"))
    rankings = tracing.rankings()
    assert asked == [["importance"]]
    assert list(rankings) == ["fisher", *LABELLED]
    own = load_criterion("fisher").scores(tracing.study, 0)
    assert rankings["fisher"] == pytest.approx(own) and rankings["importance"] != pytest.approx(own)


def test_the_criterion_of_the_paper_is_not_repeated(digits: Sample) -> None:
    tracing = Tracing.open(digits.model, digits.data, options(8, criterion="importance"))
    assert list(tracing.rankings()) == list(LABELLED)


def test_scores_of_a_file(digits: Sample, tmp_path: Path) -> None:
    heads = [HeadId(site.id, head) for site in digits.sites for head in site.heads]
    rows = [f"{head},{place * 7 % 32}" for place, head in enumerate(heads)]
    (tmp_path / "scores.csv").write_text("\n".join(["head,mine", *rows]) + "\n")
    tracing = Tracing.open(digits.model, digits.data, options(8, scores=tmp_path / "scores.csv", by="mine"))
    name, scores = next(iter(tracing.rankings().items()))
    assert name == "scores"
    assert [scores[head] for head in heads] == [place * 7 % 32 for place in range(32)]


def traced(name: str, folder: Path, rows: list[dict[str, Any]] | None = None, **request: Any) -> Curve:
    """The curve of a tiny model of tests/task_cases.py."""
    case = CASES[name] if rows is None else replace(CASES[name], rows=rows)
    open_case(case, folder)
    return trade_off(str(folder / "model"), str(folder / "rows.jsonl"), options(None, **request))


def test_groups_go_as_a_whole_unless_masked(tmp_path: Path) -> None:
    """Two layers of eight heads in two groups: one of them can go from each."""
    whole = traced("causal-llama", tmp_path / "a", criterion="random", compensate=False)
    heads = whole.heads
    counts = [point.removed for point in whole.series[0].points]
    group = counts[1]
    assert group > 1 and all(count % group == 0 for count in counts)
    masked = traced("causal-llama", tmp_path / "b", criterion="random", compensate=False, masked=True)
    single = [point.removed for point in masked.series[0].points]
    assert any(count % group for count in single) and single[-1] == heads - 2 > counts[-1]
    table = curve_table(whole)
    assert [row["ratio"] for row in table.rows[: len(counts)]] == [count / heads for count in counts]


def test_without_labels_the_stand_ins_are_drawn(tmp_path: Path) -> None:
    rows = [{"text": row["text"]} for row in CASES["single"].rows]
    found = traced("single", tmp_path, rows, compensate=False)
    assert [one.criterion for one in found.series if one.criterion not in RANDOM][-1:] == ["sensitivity"]
    assert not {"importance", "importance-layer-norm"} & {one.criterion for one in found.series}
    table = curve_table(found)
    assert all(row["loss"] is None and row["metric"] is None for row in table.rows)
    assert all((row["divergence"] > 0) is (row["heads_removed"] > 0) for row in table.rows)
    assert [panel.name for panel in panels(found)] == ["divergence"]
    assert not any("loss" in line for line in summary(found))


def test_embeddings_have_a_divergence_of_directions(tmp_path: Path) -> None:
    found = traced("embedding", tmp_path, compensate=False)
    assert found.unit == "1 - cos" and "1 - cos" in summary(found)[0]


def test_a_model_that_can_lose_no_head(digits: Sample) -> None:
    tracing = Tracing.open(digits.model, digits.data, options(8, min_heads=8))
    with pytest.raises(InvalidPlan, match="no head can be removed with .*--min-heads 8"):
        tracing.plans(digits.scores("importance"))


def test_the_last_heads_of_a_model_stay(tmp_path: Path) -> None:
    """A group of four in each of two layers at once is 8 of 16 heads, and 16 are nearest to 90 %: but 8 go at most."""
    open_case(CASES["causal-llama"], tmp_path)
    given = options(None, min_heads=0, scope="uniform")
    tracing = Tracing.open(str(tmp_path / "model"), str(tmp_path / "rows.jsonl"), given)
    assert curves.total_heads(tracing.sites) == 16
    plans = tracing.plans(load_criterion("random").scores(tracing.study, 0))
    assert [len(plan.removed) for plan in plans] == [0, 8]
    assert any("the curve ends at 8 of 16 heads" in note for note in tracing.notes)


def test_of_two_numbers_as_near_the_larger_is_taken() -> None:
    """As `--ratio` rounds: half of 3 heads is 2."""
    assert curves._nearest([0, 1, 2, 3], Fraction(3, 2)) == 2
    assert curves._nearest([0, 2, 4], Fraction(27, 10)) == 1


def test_a_metric_that_does_not_fit_is_refused_before_any_score(
    digits: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Study, "scores", None)
    with pytest.raises(UsageError, match="metric pearson does not fit"):
        trade_off(digits.model, digits.data, replace(options(8), metric="pearson"))
    with pytest.raises(UsageError, match="judged on data"):
        trade_off(digits.model, None, options())


def test_progress_ends_when_all_is_judged(digits: Sample) -> None:
    told: list[tuple[int, int]] = []
    given = options(8, criterion="random", compensate=False)
    trade_off(digits.model, digits.data, given, lambda done, total: told.append((done, total)))
    assert told[-1] == (6 * 10 * 2, 6 * 10 * 2), "series, points, judged examples"
    assert [done for done, total in told if total == 120] == [20, 40, 60, 80, 100, 120]


FEW = ("--limit", 16, "--criterion", "random", "--seed", 5)


def test_the_command(run: Run, samples: Path, tmp_path: Path) -> None:
    source, file, other = samples / "vit-digits", tmp_path / "a.csv", tmp_path / "b.json"
    words = ("prune", source, "--data", source / "test.csv", *FEW)
    ran = run(*words, "--curve", file)
    assert ran.code == 0 and ran.out == "", ran
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert list(rows[0]) == [column.name for column in CURVE_COLUMNS]
    assert [(row["criterion"], row["repair"]) for row in rows[::10]] == [
        ("random", "true"), ("random", "false"), *((name, "false") for name in LABELLED),
    ]  # fmt: skip
    assert len([line for line in ran.err.splitlines() if "without 50.0% (16 heads): loss" in line]) == 7
    assert {path.name for path in tmp_path.iterdir()} == {"a.csv", "a.csv.json"}

    bare = rows[10:]
    more = ("--no-compensate", "--columns", "ratio,loss", "--top", 4, "--quiet")
    ran = run(*words, "--curve", other, "--plot", tmp_path / "b.png", *more)
    assert ran.code == 0 and ran.err == ran.out == "", ran
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    short = [(row["ratio"], row["loss"]) for row in json.loads(other.read_text())["rows"]]
    assert short == [(float(row["ratio"]), float(row["loss"])) for row in bare[:4]]

    given = StudyOptions(data=DataOptions(limit=16, seed=5), seed=5)
    data = str(source / "test.csv")
    frame = headscope.curve(str(source), data, criterion="random", compensate=False, options=given)
    found = frame[["criterion", "repair", "heads_removed", "loss"]].itertuples(index=False)
    assert [tuple(row) for row in found] == [
        (row["criterion"], False, int(row["heads_removed"]), float(row["loss"])) for row in bare
    ]
    with pytest.raises(UsageError, match="writes no checkpoint"):
        headscope.curve(str(source), data, layout="native")


def test_a_dry_run_runs_nothing(run: Run, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objective, "forward", None)
    source = samples / "vit-digits"
    words = ("prune", source, "--data", source / "test.csv", *FEW, "--curve", tmp_path / "a.csv", "--dry-run")
    ran = run(*words)
    assert ran.code == 0, ran
    items = {row[0]: row[1] for row in ran.rows}
    assert items["heads_removed"] == "0 3 6 10 13 16 19 22 26 28"
    assert (items["criterion"], items["series"], items["examples"], items["judged_examples"]) == (
        "random", "7", "12", "4",
    )  # fmt: skip
    assert items["judged_passes"] == str(1 + 6 * 11 + 2 * 10)
    assert float(items["seconds"]) > 0 and float(items["peak_bytes"]) > 0
    assert list(tmp_path.iterdir()) == []
    assert curve_outlay.RANDOM == RANDOM


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--curve", "x.csv"), ["--curve is judged on data", "--data FILE"]),
        (("--data", "d", "--curve", "x.csv", "-o", "x"), ["--curve writes a report and --output a checkpoint"]),
        (("--data", "d", "--curve", "x.csv", "--ratio", "0.3"), ["--ratio says how much"]),
        (("--data", "d", "--curve", "x.csv", "--heads", "0:1"), ["--heads says how much"]),
        (("--data", "d", "--curve", "x.csv", "--max-loss-increase", "1"), ["--max-loss-increase says how much"]),
        (("--data", "d", "--curve", "x.csv", "--rounds", "2"), ["--rounds is about a checkpoint"]),
        (("--data", "d", "--curve", "x.csv", "--layout", "native"), ["--layout is about a checkpoint"]),
        (("--data", "d", "--curve", "x.csv", "--keep-extra"), ["--keep-extra is about a checkpoint"]),
        (("--data", "d", "--curve", "x.csv", "--max-shard-size", "1GB"), ["--max-shard-size is about a checkpoint"]),
        (("--data", "d", "--curve", "x.csv", "--columns", "los"), ["no column 'los'", "did you mean 'loss'?"]),
        (("--data", "d", "--curve", "x.csv", "--metric", "acuracy"), ["did you mean 'accuracy'?"]),
        (("--data", "d", "--curve", "x.svg", "--plot", "x.svg"), ["--curve and --plot are both x.svg"]),
        (("--data", "d", "--curve", "x.xlsx"), ["no format has suffix '.xlsx'"]),
        (("--data", "d", "--curve", "x.csv", "--plot", "x.gif"), [".png or .svg"]),
        (("--data", "d", "--curve", "old.csv"), ["old.csv exists already", "--force"]),
        (("--data", "d", "--curve", "x.csv", "--plot", "old.png"), ["old.png exists already", "--force"]),
        (("--ratio", "0.3", "-o", "x", "--plot", "x.gif"), [".png or .svg"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_what_cannot_be_meant_is_refused_before_a_model_is_opened(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], parts: list[str]
) -> None:
    """There is no model m: it is not looked for yet."""
    monkeypatch.chdir(tmp_path)
    for name in ("old.csv", "old.png"):
        Path(name).write_text("old")
    assert refused(run("prune", "m", *words), 2, *parts)
    assert Path("old.csv").read_text() == Path("old.png").read_text() == "old"


def test_every_column_is_explained(run: Run) -> None:
    for column in CURVE_COLUMNS:
        assert f"{column.name} [{column.unit}]: {column.meaning}\n" in run("explain", column.name).out


def test_the_picture_shows_the_curve(digits: Sample, tmp_path: Path) -> None:
    """Each panel has every series over percent of heads; the band runs from the least to the largest random order."""
    found = replace(digits.found, series=digits.start.series[:1] + digits.found.series)
    figure = curve_figure(lines(found), panels(found), title="a title")
    assert [axes.get_title().split("\n")[0] for axes in figure.axes] == [
        "loss", "accuracy", "divergence from the whole model",
    ]  # fmt: skip
    loss, accuracy, divergence = figure.axes
    assert divergence.get_yscale() == "log" and accuracy.get_yscale() == "linear"
    shown = {line.get_label(): line for line in loss.get_lines()}
    assert set(shown) == {
        "fisher, repaired", "fisher, not repaired", "importance (Michel et al. 2019)",
        "importance, normalised by layer", "random: mean", "whole model",
    }  # fmt: skip
    points = digits.series("importance").points
    michel = shown["importance (Michel et al. 2019)"]
    assert list(michel.get_xdata()) == [100 * point.removed / 32 for point in points]
    assert list(michel.get_ydata()) == [point.quality.loss for point in points]
    assert list(shown["whole model"].get_ydata()) == [digits.found.whole.loss] * 2
    random = torch.tensor([[point.quality.loss or 0.0 for point in digits.series(name).points] for name in RANDOM])
    assert list(shown["random: mean"].get_ydata()) == pytest.approx(random.mean(dim=0).tolist())
    (band,) = loss.collections
    outline = band.get_paths()[0].vertices
    for place, point in enumerate(points):
        heights = [high for share, high in outline if share == pytest.approx(100 * point.removed / 32)]
        assert (min(heights), max(heights)) == pytest.approx(
            (float(random[:, place].min()), float(random[:, place].max()))
        )


def test_a_picture_is_the_same_twice_and_kept_from_odd_names(tmp_path: Path) -> None:
    shares = (0.0, 0.25, 0.75)
    drawn = [
        Line("a\x1b[31m $x^2$", "asked", shares, {"loss": (1.0, 2.0, 150.0)}),
        Line("random-0", "random", shares, {"loss": (1.0, 3.0, 4.0)}),
        Line("random-1", "random", (0.0, 0.5, 0.8), {"loss": (1.0, 5.0, 6.0)}),
    ]
    hostile = partial(curve_figure, drawn, [Panel("loss", "loss", "nats")], title="t\x1b[2J")
    for suffix in ("svg", "png"):
        pages = [tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"]
        for page in pages:
            save_picture(hostile, page)
        assert pages[0].read_bytes() == pages[1].read_bytes()
    assert b"\x1b" not in (tmp_path / "a.svg").read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        save_picture(hostile, pages[0])
    (axes,) = hostile().axes
    assert axes.get_yscale() == "log", "150 is more than 100 times 1"
    (mean,) = (line for line in axes.get_lines() if line.get_label() == "random: mean")
    assert list(mean.get_xdata()) == [0, 25, 50, 75], "up to where the shorter one ends"
    assert list(mean.get_ydata())[2] == pytest.approx((3.5 + 5.0) / 2)
