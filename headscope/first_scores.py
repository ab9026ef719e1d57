"""First scores: those of the whole model, with which a choice of heads begins, made by several processes or kept."""

from __future__ import annotations

from collections.abc import Mapping

from headscope.criteria import candidates, choose_criterion, load_criterion
from headscope.examples import HELD_OUT
from headscope.heads import HeadId
from headscope.mending import Mender
from headscope.request import Request
from headscope.shares import Share
from headscope.study import Study

FirstScores = Mapping[str, Mapping[HeadId, float]]
"""A score for every head of the whole model, by criterion."""


def criteria_of(study: Study, request: Request) -> tuple[str, ...]:
    """The criteria that a choice by scores begins with: those that `auto` compares, else the only one.

    Raises:
        UsageError: there is no such criterion.
    """
    examples = study.examples
    usual = choose_criterion(request.criterion, examples is not None and examples.labelled)
    if request.criterion != "auto" or examples is None or len(examples) < HELD_OUT:
        return (usual,)
    return candidates(examples.labelled)


def scored_on(study: Study, request: Request, mender: Mender | None) -> Study:
    """What scores are measured on: `auto`, which promises none by name, takes the mender's noisy copies too."""
    return mender.study if mender is not None and request.criterion == "auto" else study


def shared_scores(study: Study, request: Request, share: Share, *, mender: Mender | None) -> FirstScores:
    """The first scores, as far as their passes can be shared out; empty where nothing is chosen by a criterion.

    Raises:
        HeadscopeError: they cannot be measured, or another process has ended.
        WorkError: the folder holds work of another run.
    """
    if not request.chosen:
        return {}
    scored, found = scored_on(study, request, mender), dict[str, Mapping[HeadId, float]]()
    scored.share = share
    for criterion in criteria_of(study, request):
        if load_criterion(criterion).shared:
            found[criterion] = load_criterion(criterion).scores(scored, study.options.seed)
    scored.share = Share()  # later passes depend on what was chosen, which stands in no fingerprint
    return found
