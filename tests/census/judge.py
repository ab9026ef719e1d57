"""Judges one model type: builds it, lets headscope find, mask, prune and reload its heads, and compares."""

from __future__ import annotations

import copy
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headscope import verify
from headscope.discovery import Discovery, find_sites
from headscope.errors import HeadscopeError, UnsupportedModel
from headscope.forms import choose_form
from headscope.heads import Site
from headscope.layouts import save_native, save_portable
from headscope.models import LoadOptions, load
from headscope.plan import Plan
from headscope.reasons import RAISED, first_line, quiet
from headscope.surgery import is_separable, prune, silence_heads

from . import plans
from .build import build, default_format, inputs_of
from .classes import attention_modules
from .rows import EXACT, NOT_RUN, REFUSED, WRONG, Row

EFFECT = 1e-7
"""Heads whose removal changes less than this, relative to what the model says, prove nothing."""
STOPS = (*RAISED, NotImplementedError, ArithmeticError, NameError, MemoryError)
LONGEST = 160


def judged(model_type: str) -> Row:
    """The row of one model type."""
    start = time.monotonic()
    with default_format(model_type):
        row = _started(model_type)
    return replace(row, reason=" ".join(row.reason.split()), seconds=round(time.monotonic() - start, 1))


def _started(model_type: str) -> Row:
    """Build and run the model, then judge it."""
    row = Row(model_type)
    try:
        with quiet():
            model = build(model_type)
            inputs = inputs_of(model)
            said = verify.run(model, [inputs])
    except STOPS as error:
        return replace(row, reason=_told(error))
    if not said[0]:
        return replace(row, reason="what the model says holds no tensor")
    if not all(bool(value.isfinite().all()) for value in said[0].values()):
        return replace(row, reason="what the tiny model says is not finite")
    if verify.compared(said, verify.run(model, [inputs])) != 0.0:
        return replace(row, reason="draws at random in its forward pass")
    expected = attention_modules(model)
    row = replace(row, started="yes", sites_expected=len(expected))
    try:
        found = find_sites(model)
    except UnsupportedModel as error:
        return replace(row, reason=_told(error) if expected else "no softmax attention")
    return _Judge(model_type, model, inputs).row(row, found, expected)


class _Judge:
    """One model that runs, and what was noticed about it."""

    def __init__(self, model_type: str, model: PreTrainedModel, inputs: dict[str, Any]) -> None:
        self.model_type, self.model, self.inputs = model_type, model, inputs
        self.notes: list[str] = []

    def row(self, row: Row, found: Discovery, expected: dict[str, str]) -> Row:
        """The row with everything judged."""
        sites = found.sites
        missing = [path for path in expected if not any(_covers(site.module, path) for site in sites)]
        if missing:
            self.notes.append(f"not found: {', '.join(f'{path} ({expected[path]})' for path in missing[:3])}")
        self.notes += [f"not resolved: {problem}" for problem in found.problems[:1]]
        verdicts = {
            "masked": self.masked(sites),
            "pruned_uniform": self.pruned(sites, plans.same_everywhere),
            "pruned_uneven": self.pruned(sites, plans.other_everywhere),
            "pruned_query_in_group": self.pruned(sites, plans.one_of_each_group),
        }
        verdicts["reloaded"] = self.reloaded(sites, verdicts)
        kinds = Counter(str(site.id.kind) for site in sites)
        return replace(
            row,
            sites_found=len(expected) - len(missing),
            kinds=" ".join(f"{kind}:{kinds[kind]}" for kind in sorted(kinds)),
            coupled=" ".join(_ties(sites)),
            reason="; ".join(dict.fromkeys(self.notes)),
            **verdicts,
        )

    def masked(self, sites: Sequence[Site]) -> str:
        """Gates of 0 on the running model say what the model says whose weights are zeroed."""
        plan = plans.plan_of(sites, lambda site, turn: [site.heads[turn % site.n_heads].index])
        expected = verify.run_masked(self.model, sites, plan, [self.inputs])
        if verify.compared(verify.run(self.model, [self.inputs]), expected) < EFFECT:
            self.notes.append("gates change nothing")
            return WRONG
        silent = copy.deepcopy(self.model)
        try:
            silence_heads(silent, sites, plan)
        except HeadscopeError as error:
            self.notes.append(_told(error))
            return REFUSED
        return self.compare(expected, silent, "masked")

    def pruned(self, sites: Sequence[Site], choose: plans.Choice) -> str:
        """Heads taken out say what the gated model says. Sites that are refused leave the others to be judged."""
        verdict = self._pruned(sites, plans.plan_of(sites, choose))
        separable = {site.module for site in sites if is_separable(site)}
        if verdict == REFUSED and 0 < len(separable) < len({site.module for site in sites}):
            rest = plans.plan_of(sites, lambda site, turn: choose(site, turn) if site.module in separable else [])
            return WRONG if self._pruned(sites, rest) == WRONG else REFUSED
        return verdict

    def _pruned(self, sites: Sequence[Site], plan: Plan) -> str:
        if not plan.removed:
            return NOT_RUN
        expected = verify.run_masked(self.model, sites, plan, [self.inputs])
        smaller = copy.deepcopy(self.model)
        try:
            prune(smaller, sites, plan)
        except HeadscopeError as error:
            self.notes.append(_told(error))
            return REFUSED
        except STOPS as error:
            self.notes.append(f"prune stops: {_told(error)}")
            return WRONG
        return self.compare(expected, smaller, "pruned")

    def compare(self, expected: list[verify.Said], model: PreTrainedModel, what: str) -> str:
        """Exact or wrong; refused where the smaller model cannot run, as `headscope prune` then says by name."""
        try:
            gap = verify.compared(expected, verify.run(model, [self.inputs]))
        except STOPS as error:
            self.notes.append(f"does not run with fewer heads: {_told(error)}")
            return REFUSED
        if gap <= verify.EXACT:
            return EXACT
        if gap <= verify.SINGLE and verify.computes_in_single(self.model):
            self.notes.append("computes in float32 inside")
            return EXACT
        self.notes.append(f"{what} differs by {gap:.1g}")
        return WRONG

    def reloaded(self, sites: Sequence[Site], verdicts: dict[str, str]) -> str:
        """What headscope's own writer wrote says the same when headscope loads it: the uneven plan as a portable
        checkpoint, the uniform one in the form that `--layout auto` takes, where that is another.
        """
        choices = {"pruned_uneven": plans.other_everywhere, "pruned_uniform": plans.same_everywhere}
        ways = [choose for name, choose in choices.items() if verdicts[name] == EXACT]
        if not ways:
            return NOT_RUN
        with tempfile.TemporaryDirectory(prefix="headscope-") as scratch, quiet():
            try:
                self.model.save_pretrained(scratch)
                whole = _loaded(Path(scratch))  # number formats and tables as a loader makes them
                verify.run(whole, [self.inputs])
            except (HeadscopeError, *STOPS) as error:
                self.notes.append(f"does not survive transformers' own writer: {_told(error)}")
                return NOT_RUN
        found = [
            self._reloaded(whole if choose is ways[-1] else copy.deepcopy(whole), choose, second=choose is not ways[0])
            for choose in ways
        ]
        return next((verdict for verdict in (WRONG, REFUSED, EXACT) if verdict in found), NOT_RUN)

    def _reloaded(self, model: PreTrainedModel, choose: plans.Choice, *, second: bool) -> str:
        with tempfile.TemporaryDirectory(prefix="headscope-") as scratch, quiet():
            try:
                sites = find_sites(model).sites
                prune(model, sites, plans.plan_of(sites, choose))
                expected = verify.run(model, [self.inputs])
                if not _written(model, sites, Path(scratch), native_only=second):
                    return NOT_RUN
                again = _loaded(Path(scratch))
                gap = verify.compared(expected, verify.run(again, [self.inputs]))
            except HeadscopeError as error:
                self.notes.append(f"reload: {_told(error)}")
                return REFUSED
            except STOPS as error:
                self.notes.append(f"reload stops: {_told(error)}")
                return WRONG
        if gap <= verify.EXACT:
            return EXACT
        self.notes.append(f"reloaded differs by {gap:.1g}")
        return WRONG


def _loaded(folder: Path) -> PreTrainedModel:
    return load(str(folder), LoadOptions(dtype="float64", device="cpu", task="embedding")).model


def _written(model: PreTrainedModel, before: Sequence[Site], folder: Path, *, native_only: bool) -> bool:
    """Write the model in the form that `--layout auto` takes; with `native_only` not where that is the portable one."""
    form = choose_form(model, find_sites(model).sites, "auto", before=before[0])
    if form.config is not None:
        save_native(model, form.config, folder)
    elif not native_only:
        save_portable(model, folder)
    return form.config is not None or not native_only


def _covers(found: str, expected: str) -> bool:
    """Whether a site is the expected module, or lies in it (a part that attends for it)."""
    return found == expected or found.startswith(f"{expected}.")


def _ties(sites: Sequence[Site]) -> list[str]:
    """What keeps heads together, named as in the first layer that shows it."""
    ties = [path.removeprefix(f"{site.module}.") for site in sites for path in site.coupled]
    ties += [f"input of {site.output.rpartition('.')[2]}" for site in sites if site.mixes_heads]
    return list(dict.fromkeys(ties))


def _told(error: BaseException) -> str:
    """An error's kind and first line, without where a module lies; of a package that is absent only that."""
    if isinstance(error, ImportError):
        words = str(error).split()
        name = next((words[place - 1] for place, word in enumerate(words) if word == "library"), "a package")
        return f"needs the package {name}"
    told = re.sub(r"(<module '[^']*') from '[^']*'", r"\1", first_line(error))
    return (told if isinstance(error, HeadscopeError) else f"{type(error).__name__}: {told}")[:LONGEST]


torch.set_num_threads(1)
