"""What a pruning works with: a model with examples to choose by, others to judge on, and what repairs it."""

from __future__ import annotations

from dataclasses import dataclass

from headscope.data import load_examples
from headscope.errors import UsageError
from headscope.examples import HELD_OUT, Examples, held_out
from headscope.mending import Mender
from headscope.models import LoadedModel
from headscope.offload import is_offloaded, require_in_memory
from headscope.stored import stored_format
from headscope.study import Study, StudyOptions


@dataclass(frozen=True)
class Prepared:
    """Two studies of one model: `study` on the examples that choose and repair, `judging` on those that judge.

    Both are without examples where there is no data; `mender` is None where nothing is to be repaired.
    """

    study: Study
    judging: Study
    mender: Mender | None
    notes: tuple[str, ...] = ()


def prepare(
    loaded: LoadedModel, data: str | None, options: StudyOptions, *, eval_data: str | None, compensate: bool | None
) -> Prepared:
    """Read the data for a model; without `eval_data`, a seeded quarter judges and chooses nothing.

    `compensate` says whether the heads that stay are repaired; None: where there is data to do it by.

    Raises:
        HeadscopeError: the data cannot be used.
        UsageError: a repair was asked for, and there is no or too little data for one.
    """
    notes: list[str] = []
    choosing = judged = None
    if data is not None:
        choosing = load_examples(data, loaded, options.data)
        notes += choosing.notes
        if eval_data is not None:
            judged = load_examples(eval_data, loaded, options.data)
        else:
            if len(choosing) < HELD_OUT:
                notes.append(f"{len(choosing)} examples are too few to hold any out: all choose and judge")
            choosing, judged = held_out(choosing, options.seed)
    study = Study(loaded, choosing, options)
    judging = study.on(judged)
    repairing = None
    if compensate or (compensate is None and choosing is not None):
        repairing = _mender(study, choosing, notes, asked=compensate is True)
    return Prepared(study, judging, repairing, tuple(notes))


def mender(study: Study) -> Mender:
    """What repairs by a study's examples, in the format in which the weights are stored; where the model reads images
    and has learned them by heart, by noisy copies too.
    """
    return Mender(study, dtype=stored_format(study.loaded), noise=None)


def _mender(study: Study, choosing: Examples | None, notes: list[str], *, asked: bool) -> Mender | None:
    """What repairs, by examples that choose and never by those that judge; None, and a note, where they are too few."""
    if asked:
        require_in_memory(study.loaded.model, "--compensate")
    elif is_offloaded(study.loaded.model):
        notes.append("no repair was tried: it takes the whole model in memory, and a part of it is offloaded")
        return None
    count = 0 if choosing is None else len(choosing)
    if count >= HELD_OUT:
        return mender(study)
    if asked:
        raise UsageError(f"--compensate needs {HELD_OUT} examples to choose by, and there are {count}")
    notes.append(f"no repair was tried: {count} examples are too few for one")
    return None
