"""What a pruning works with: a model with examples to choose by, others to judge on, and what repairs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from headscope.data import load_examples
from headscope.errors import UsageError
from headscope.examples import HELD_OUT, Examples, collate, held_out, stackable
from headscope.inputs import probe_inputs
from headscope.mending import Mender
from headscope.metrics import choose_metric
from headscope.models import LoadedModel
from headscope.objective import model_inputs
from headscope.offload import home, is_offloaded, require_in_memory
from headscope.stored import stored_format
from headscope.study import Study, StudyOptions, batches
from headscope.verify import Inputs

PROOF_EXAMPLES, PROOF_TOKENS = 4, 128
"""Examples of the data that are part of the proof, and how many of their tokens."""


@dataclass(frozen=True)
class Prepared:
    """Two studies of one model: `study` on the examples that choose and repair, `judging` on those that judge.

    Both are without examples where there is no data; `mender` is None where nothing is to be repaired.
    """

    study: Study
    judging: Study
    mender: Mender | None
    notes: tuple[str, ...] = ()

    def require_metric(self, name: str | None) -> None:
        """Refuse a metric before anything is scored for it, which may take hours.

        Raises:
            UsageError: there is no such metric, or it does not fit the task or its data.
        """
        if name is not None and self.judging.examples is not None:
            loaded = self.judging.loaded
            choose_metric(name, loaded.task, loaded.task_name, batches(self.judging))


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
            notes += [f"--eval-data: {note}" for note in judged.notes]
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


def proof_inputs(model: PreTrainedModel, judging: Study) -> list[Inputs]:
    """Made-up inputs of a model, and a few examples of the data side by side."""
    found: list[Inputs] = [probe_inputs(model)]
    examples = judging.examples
    if examples is not None:
        some = [one for one in examples.items[:PROOF_EXAMPLES] if stackable(examples.items[0], one)]
        batch = collate(some, examples.pads).to(home(model), model.dtype)
        inputs = model_inputs(model, judging.loaded.task, batch)
        found.append({name: _shortened(name, value) for name, value in inputs.items()})
    return found


def _shortened(name: str, value: Any) -> Any:
    """The first tokens of a text input: a proof needs no long texts, whose logits are large."""
    text = name.removeprefix("decoder_") in ("input_ids", "attention_mask", "token_type_ids")
    return value[:, :PROOF_TOKENS] if text else value
