"""Selection: what a request means for a model, the limits that it keeps, and what is refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import bert, llama

from headscope.criteria import candidates
from headscope.data import DataOptions, load_examples
from headscope.errors import InvalidPlan, ThresholdError, UsageError
from headscope.evaluation import Judgement
from headscope.examples import held_out
from headscope.mending import Mender, divergence
from headscope.metrics import METRICS
from headscope.models import LoadOptions, load
from headscope.plan import Plan, SiteHeads
from headscope.request import Request
from headscope.selection import LOOK_AHEAD, most, select
from headscope.study import Study, StudyOptions
from headscope.surgery import parameters_left, prune
from headscope.trials import Trials


def study_of(folder: Path, data: Path | None = None, limit: int = 24) -> Study:
    """A study in float64; the sample's data where a test needs some."""
    options = StudyOptions(load=LoadOptions(dtype="float64"), data=DataOptions(limit=limit))
    loaded = load(str(folder), options.load)
    return Study(loaded, None if data is None else load_examples(str(data), loaded, options.data), options)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({}, "nothing says what to remove"),
        ({"ratio": 0.3, "heads": "0:1"}, "--ratio and --heads"),
        ({"ratio": 0.3, "scores": Path("a.csv")}, "belong together"),
        ({"ratio": 0.3, "by": "importance"}, "belong together"),
        ({"ratio": 0.3, "scores": Path("a.csv"), "by": "x", "criterion": "fisher"}, "both say what goes first"),
        ({"heads": "0:1", "rounds": 3}, "--rounds"),
        ({"ratio": 0.3, "min_heads": -1}, "--min-heads"),
        ({"keep_metric": 1.5}, "no share"),
        ({"max_loss_increase": -0.1}, "0 or more"),
        ({"target_parameters": 0}, "1 or more"),
        ({"target_parameters": 9, "masked": True}, "removes no parameters"),
    ],
)
def test_requests_that_cannot_be_meant(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Request(**request_)


def labels(study: Study, request: Request, trials: Trials | None = None) -> list[str]:
    """The removed heads of a selection."""
    return [str(head) for head in select(study, request, trials).plan.removed]


@pytest.fixture(scope="module")
def sentiment(samples: Path) -> Study:
    return study_of(samples / "sentiment-minilm", samples / "sentiment-minilm" / "test.jsonl")


@pytest.fixture(scope="module")
def digits(samples: Path) -> Study:
    return study_of(samples / "vit-digits", samples / "vit-digits" / "test.csv", limit=36)


def test_heads_by_name_and_by_number(tmp_path: Path) -> None:
    study = study_of(bert(tmp_path))
    assert labels(study, Request(heads="0:1,3;1:0")) == ["encoder.self.0.1", "encoder.self.0.3", "encoder.self.1.0"]
    assert labels(study, Request(heads="encoder.self.1.4")) == ["encoder.self.1.4"]
    with pytest.raises(UsageError, match="no head encoder.self.0.9"):
        select(study, Request(heads="0:9"), None)


def test_heads_that_are_gone_are_passed_over_with_a_note(tmp_path: Path) -> None:
    """Field bug: prune {0: [1]}, then {0: [1, 2]}: the second run takes head 2 and says so."""
    study = study_of(bert(tmp_path))
    prune(study.loaded.model, study.sites, select(study, Request(heads="0:1"), None).plan)
    again = Study(study.loaded, None, study.options)
    found = select(again, Request(heads="0:1,2"), None)
    assert [str(head) for head in found.plan.removed] == ["encoder.self.0.2"]
    assert any("encoder.self.0.1: removed before" in note for note in found.notes)
    with pytest.raises(InvalidPlan, match="nothing is left"):
        select(again, Request(heads="0:1"), None)


def test_groups_and_the_floor_are_kept(tmp_path: Path) -> None:
    study = study_of(llama(tmp_path))
    with pytest.raises(InvalidPlan, match="--layout masked|groups"):
        select(study, Request(heads="0:1"), None)
    assert labels(study, Request(heads="0:1", masked=True)) == ["decoder.causal.0.1"]
    with pytest.raises(InvalidPlan, match="--min-heads 0"):
        select(study, Request(heads="0:0,1,2,3,4,5"), None)
    assert len(labels(study, Request(heads="0:0,1,2,3,4,5", min_heads=0))) == 6
    with pytest.raises(InvalidPlan, match="every head"):
        select(study, Request(heads="0:0,1,2,3,4,5;1:0,1,2,3,4,5", min_heads=0), None)


def test_a_number_that_groups_do_not_make_names_the_nearest(tmp_path: Path) -> None:
    study = study_of(llama(tmp_path))
    with pytest.raises(InvalidPlan, match="2.*4|nearest"):
        select(study, Request(ratio=0.25, criterion="random"), None)  # 3 of 12 heads
    assert len(labels(study, Request(ratio=0.33, criterion="random"))) == 4


def test_criteria_need_data_and_say_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs data"):
        select(study_of(bert(tmp_path)), Request(ratio=0.3), None)
    with pytest.raises(UsageError, match="judged on data"):
        select(study_of(bert(tmp_path)), Request(max_loss_increase=0.1, criterion="random"), None)


def test_the_lowest_scores_go(sentiment: Study) -> None:
    values = sentiment.scores(["importance"]).values["importance"]
    order = sorted(
        (float(score), head)
        for site in sentiment.sites
        for score, head in zip(values[site.id], site.heads, strict=True)
    )
    assert labels(sentiment, Request(ratio=0.25, criterion="importance")) == [
        str(head) for head in sorted(head for _, head in order[:18])
    ]


@pytest.mark.parametrize("repair", [pytest.param(False, marks=pytest.mark.slow), True])
def test_auto_is_the_candidate_that_diverges_least(digits: Study, repair: bool) -> None:
    """Each one's own plan, with its repair where there is to be one, on examples that choose but do not fit."""
    mender = Mender(digits) if repair else None
    found = select(digits, Request(ratio=0.5), None, mender=mender)
    lost: dict[str, float] = {}
    for name in candidates(labelled=True):
        plan = select(digits, Request(ratio=0.5, criterion=name), None, mender=mender).plan
        lost[name] = divergence(digits, plan) if mender is None else mender.divergence(plan)
    assert (
        set(lost) == {"importance", "sensitivity", "reconstruction", "reconstruction-fisher"}
        and len(set(lost.values())) > 1
    )
    best = min(lost, key=lost.__getitem__)
    assert found.plan.criterion == best
    assert found.plan.removed == select(digits, Request(ratio=0.5, criterion=best), None).plan.removed
    assert any(f"auto is {best}" in note and f"{lost[best]:.4g}" in note for note in found.notes)


def test_auto_without_labels_tries_what_needs_none() -> None:
    assert candidates(labelled=False)[0] == "sensitivity"
    assert not {"importance", "fisher"} & set(candidates(labelled=False))


def test_scores_of_a_file(sentiment: Study, tmp_path: Path) -> None:
    heads = [head for site in sentiment.sites for head in site.heads]
    lines = ["head,mine", *(f"{head},{number % 7}" for number, head in enumerate(heads))]
    (tmp_path / "scores.csv").write_text("\n".join(lines) + "\n")
    found = labels(sentiment, Request(ratio=0.125, scores=tmp_path / "scores.csv", by="mine"))
    assert found == [str(head) for number, head in enumerate(heads) if number % 7 == 0][:9]


def test_rounds_score_what_is_left(digits: Study) -> None:
    """Each round sees the model without the heads of earlier rounds, and the last ends at the number asked for."""
    at_once, in_rounds = (
        select(digits, Request(ratio=0.5, rounds=rounds, criterion="importance"), None) for rounds in (1, 3)
    )
    assert [entry["gone"] for entry in in_rounds.history] == [5, 11, 16]
    assert len(in_rounds.plan.removed) == len(at_once.plan.removed) == 16
    first = set(in_rounds.history[0]["taken"])
    assert first <= {str(head) for head in at_once.plan.removed}
    assert in_rounds.plan.removed != at_once.plan.removed
    taken = [head for entry in in_rounds.history for head in entry["taken"]]
    assert len(taken) == len(set(taken)) == 16
    hooks = sum(len(module._forward_pre_hooks) for module in digits.loaded.model.modules())
    assert hooks == 0


def test_a_plan_is_fed_back(sentiment: Study, tmp_path: Path) -> None:
    plan = select(sentiment, Request(ratio=0.2, criterion="random"), None, seed=3).plan
    (tmp_path / "plan.json").write_text(json.dumps(plan.as_dict()))
    assert select(sentiment, Request(plan=tmp_path / "plan.json"), None).plan == plan


def test_target_parameters_are_met_by_as_few_heads_as_can_be(tmp_path: Path) -> None:
    study = study_of(bert(tmp_path))
    model = study.loaded.model
    total = sum(parameter.numel() for parameter in model.parameters())
    head = 4 * 4 * 20 + 3 * 4  # query, key, value and output matrices of one head, and three biases
    plan = select(study, Request(target_parameters=total - 2 * head - 1, criterion="random"), None).plan
    assert len(plan.removed) == 3
    prune(model, study.sites, plan)
    assert sum(parameter.numel() for parameter in model.parameters()) == total - 3 * head
    study = study_of(tmp_path)
    assert parameters_left(study.loaded.model, study.sites, plan) == total - 3 * head
    with pytest.raises(ThresholdError, match="cannot be met"):
        select(study, Request(target_parameters=10, criterion="random"), None)
    with pytest.raises(InvalidPlan, match="has only"):
        select(study, Request(target_parameters=total, criterion="random"), None)


def test_limits_are_judged_on_held_out_examples(digits: Study) -> None:
    trials = Trials(digits, None)
    for limit in (0.02, 0.2):
        plan = select(digits, Request(max_loss_increase=limit, criterion="importance"), trials).plan
        found = trials.judged(plan)
        assert found.final.loss - found.whole.loss <= limit
    loose = select(digits, Request(max_loss_increase=0.2, criterion="importance"), trials).plan
    tight = select(digits, Request(max_loss_increase=0.02, criterion="importance"), trials).plan
    assert len(loose.removed) > len(tight.removed) > 0
    kept = select(digits, Request(keep_metric=0.9, criterion="importance"), trials).plan
    found = trials.judged(kept)
    assert found.final is found.pruned and found.repair is None
    assert found.pruned.metric >= 0.9 * found.whole.metric
    assert found.pruned.divergence > 0 == found.whole.divergence


def test_a_limit_that_no_head_keeps(digits: Study, tmp_path: Path) -> None:
    """The most important head of every site goes in the first step, and the loss may not rise."""
    values = digits.scores(["importance"]).values["importance"]
    rows = [
        (str(head), -float(score))
        for site in digits.sites
        for score, head in zip(values[site.id], site.heads, strict=True)
    ]
    (tmp_path / "scores.csv").write_text("head,upside\n" + "".join(f"{head},{score}\n" for head, score in rows))
    request = Request(max_loss_increase=0.0, scores=tmp_path / "scores.csv", by="upside", scope="uniform")
    with pytest.raises(ThresholdError, match="raises the held-out loss"):
        select(digits, request, Trials(digits, None))


def test_what_no_scores_make_possible_is_refused_before_any(digits: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that spare all heads, and limits on what examples without labels cannot tell."""
    monkeypatch.setattr(Study, "scores", None)
    for asked in ({"ratio": 0.5}, {"max_loss_increase": 1.0}, {"keep_metric": 0.9}, {"target_parameters": 160_000}):
        with pytest.raises(InvalidPlan, match="no head can be removed with --scope model and --min-heads 8"):
            select(digits, Request(min_heads=8, **asked), Trials(digits, None))
    assert digits.examples is not None
    bare = [replace(one, labelled=False) for one in digits.examples.items]
    trials = Trials(digits.on(replace(digits.examples, items=tuple(bare))), None)
    with pytest.raises(UsageError, match="--max-loss-increase needs labels"):
        select(digits, Request(max_loss_increase=1.0), trials)
    with pytest.raises(UsageError, match="--keep-metric needs a metric"):
        select(digits, Request(keep_metric=0.9), trials)


def test_a_limit_leaves_the_model_a_head(digits: Study) -> None:
    """However loose it is, and whatever --min-heads allows."""
    request = Request(max_loss_increase=1e6, min_heads=0, criterion="random")
    assert len(labels(digits, request, Trials(digits, None))) == 31
    every = Plan(tuple(map(SiteHeads.of, digits.sites)), tuple(head for site in digits.sites for head in site.heads))
    least = parameters_left(digits.loaded.model, digits.sites, every)
    with pytest.raises(ThresholdError, match="cannot be met"):
        select(digits, Request(target_parameters=least, min_heads=0, criterion="random"), None)


def test_a_lone_group_goes_head_by_head_and_the_hint_says_so(tmp_path: Path) -> None:
    study = study_of(llama(tmp_path, num_key_value_heads=1))
    with pytest.raises(InvalidPlan, match="no head can be removed") as caught:
        select(study, Request(ratio=0.25, criterion="random"), None)
    assert caught.value.hint is not None and "--unit head" in caught.value.hint
    assert len(labels(study, Request(ratio=0.25, criterion="random", unit="head"))) == 3


def test_a_perplexity_may_not_rise(digits: Study) -> None:
    trials = Trials(digits, None)
    none = torch.zeros(0)
    trials.__dict__["whole"] = Judgement(none, none, 40.0, "perplexity", 1, measure=METRICS["perplexity"])
    said = trials.why_not(Request(keep_metric=0.8))
    assert said == "the first to go already raises the held-out perplexity above 50 (40 / 0.8)"


@pytest.mark.parametrize(("name", "value"), [("exact-match", 0.0), ("r2", -0.2)])
def test_no_share_is_kept_of_nothing(digits: Study, name: str, value: float) -> None:
    """Else every head that may go would: the model without it is right as often, never."""
    trials = Trials(digits, None)
    none = torch.zeros(0)
    trials.__dict__["whole"] = Judgement(none, none, value, name, 1, measure=METRICS[name])
    with pytest.raises(UsageError, match=f"the held-out {name} of the whole model is {value:g}, of which"):
        select(digits, Request(keep_metric=0.9, criterion="random"), trials)


@pytest.mark.parametrize("good", [[0], [0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 4], [0, 1, 2, 3, 5]])
def test_most_finds_the_last_good_number_near_the_limit(good: list[int]) -> None:
    asked: list[int] = []

    def bears(number: int) -> bool:
        asked.append(number)
        return number in good

    found = most(8, bears)
    assert found in good
    assert found == 0 or found in asked, "only what was seen to be bearable counts"
    assert not any(number in good for number in range(found + 1, min(found + 1 + LOOK_AHEAD, 8)))


def test_a_quarter_is_held_out(sentiment: Study) -> None:
    assert sentiment.examples is not None
    choosing, judging = held_out(sentiment.examples, seed=0)
    numbers = [{example.number for example in part.items} for part in (choosing, judging)]
    assert (len(choosing), len(judging)) == (18, 6)
    assert not numbers[0] & numbers[1]
    assert held_out(sentiment.examples, seed=0)[1].items == judging.items
    assert held_out(sentiment.examples, seed=1)[1].items != judging.items
    few = replace(sentiment.examples, items=sentiment.examples.items[:3])
    assert held_out(few, seed=0) == (few, few)
