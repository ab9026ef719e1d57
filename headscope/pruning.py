"""Pruning from a request to a verified checkpoint: choose, prove, cut, write, reload, and only then let it appear."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from headscope import verify
from headscope.devices import free_memory
from headscope.discovery import find_sites
from headscope.errors import InvalidPlan, UnsupportedModel
from headscope.examples import collate
from headscope.folder_writing import check_target
from headscope.heads import Site
from headscope.inputs import probe_inputs
from headscope.layouts import LAYOUTS, auto_classes
from headscope.matrices import total_parameters
from headscope.memory import memory_errors
from headscope.models import LoadedModel, load
from headscope.native import native_config, native_counts
from headscope.objective import model_inputs
from headscope.plan import Plan
from headscope.prepared import prepare
from headscope.pruned import Pruned, cost
from headscope.publish import Basis, Publication, pad_token, publish
from headscope.reasons import RAISED, first_line
from headscope.repair import Repair, applied, write
from headscope.selection import Request, Selection, select
from headscope.stored import as_stored
from headscope.study import Progress, StudyOptions
from headscope.surgery import prune as take_out
from headscope.surgery import silence_heads
from headscope.trials import Trials
from headscope.verify import Inputs, Verification

SHARE = 0.5
"""The share of the free memory that a copy in a wider format may take."""
NO_REPAIR = "no repair was made: none was found that lowers the divergence on held-out examples"
PROOF_EXAMPLES, PROOF_TOKENS = 4, 128
"""Examples of the data that are part of the proof, and how many of their tokens."""


@dataclass(frozen=True)
class PruneOptions:
    """How to prune; the defaults are those of the command line."""

    request: Request
    study: StudyOptions = field(default_factory=StudyOptions)
    layout: str = "auto"
    metric: str | None = None
    eval_data: str | None = None
    compensate: bool | None = None
    """Whether the heads that stay are repaired; None: where there is data to do it by."""
    publication: Publication = field(default_factory=Publication)

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InvalidPlan(f"no layout {self.layout!r}", hint=f"known: {', '.join(LAYOUTS)}")
        if self.request.masked is not (self.layout == "masked"):
            raise InvalidPlan("heads are only silenced with the layout masked, and only there")
        if self.study.steps is not None and self.request.criterion != "gates":
            raise UsageError("--steps trains gates", hint="it goes with --criterion gates")


def prune(
    model: str, data: str | None, output: Path | None, options: PruneOptions, progress: Progress | None = None
) -> Pruned:
    """Remove heads of `model` as requested and write the checkpoint `output`; without it, only foresee what would be.

    Raises:
        HeadscopeError: the request cannot be met, or the proof failed; nothing is left behind then.
    """
    if output is not None:
        check_target(output, None, force=options.publication.force)
    return _Pruning(model, data, options).run(output, progress)


class _Pruning:
    """One model on its way to a smaller one."""

    def __init__(self, model: str, data: str | None, options: PruneOptions) -> None:
        self.options, self.name = options, model
        self.loaded = load(model, options.study.load)
        self.pad = pad_token(self.loaded.model.config)
        prepared = prepare(self.loaded, data, options.study, eval_data=options.eval_data, compensate=options.compensate)
        self.study, self.judging, self.mender = prepared.study, prepared.judging, prepared.mender
        self.notes: list[str] = [*self.loaded.notes, *prepared.notes]

    def run(self, output: Path | None, progress: Progress | None) -> Pruned:
        """Choose, judge, cut and write."""
        if output is not None:
            check_target(output, self.loaded.location.origin, force=self.options.publication.force)
        self.study.progress = progress
        trials = None
        if self.judging.examples is not None and (output is not None or self.options.request.judged):
            trials = Trials(self.judging, self.options.metric, self.mender)
        seed = self.options.study.seed
        selection = select(self.study, self.options.request, trials, seed=seed, mender=self.mender)
        verdict = trials.judged(selection.plan) if trials is not None and output is not None else None
        self.notes += selection.notes
        self.notes += [f"not analysed: {problem}" for problem in self.study.discovery.problems]
        repair = None if verdict is None else verdict.repair
        if verdict is not None and self.mender is not None:
            self.notes += [NO_REPAIR] if repair is None else repair.notes
        stored = as_stored(self.name, self.loaded, self.options.study.load)
        with memory_errors():
            result, config, inputs = self._cut(selection, stored, repair, prove=output is not None)
        result = replace(result, verdict=verdict)
        if output is None:
            return result
        return publish(
            result,
            stored,
            config,
            inputs,
            output,
            options=self.options.publication,
            pad=self.pad,
            basis=Basis(self.study.provenance(), self.judging.provenance()),
        )

    def _cut(
        self, selection: Selection, stored: LoadedModel, repair: Repair | None, *, prove: bool
    ) -> tuple[Pruned, PreTrainedConfig | None, list[Inputs]]:
        """Take the heads out of the stored model, in place, with the proof of that, and repair what is left; and how it
        goes to disk.
        """
        model, plan, sites = stored.model, selection.plan, self.study.sites
        before, inputs = cost(model, sites, stored.value_bytes), self._inputs(model)
        proof, expected = Verification(), []
        if prove:
            proof = self._proved_wide(model, plan, inputs, repair=repair)
            expected = verify.run_masked(model, sites, plan, inputs)
        self._operate(model, plan)
        after = self._left(model)
        layout, config = self._layout(model, after)
        if prove:
            proof += Verification((verify.same_arithmetic(expected, self._run(model, inputs), model),))
            proof.require()
        if repair is not None:
            write(model, after, repair)
        result = Pruned(
            plan=plan,
            layout=layout,
            before=before,
            after=cost(model, after, stored.value_bytes),
            verification=proof,
            notes=tuple(dict.fromkeys(self.notes)),
            history=selection.history,
        )
        return result, config, inputs

    def _operate(self, model: PreTrainedModel, plan: Plan) -> None:
        """Take the heads out, or silence them, in place."""
        operation = silence_heads if self.options.layout == "masked" else take_out
        operation(model, self.study.sites, plan)

    def _left(self, model: PreTrainedModel) -> tuple[Site, ...]:
        """The sites of the model after its operation."""
        if self.options.layout == "masked":
            return self.study.sites
        try:
            return find_sites(model).sites
        except RAISED as error:
            raise self._refusal(error) from None

    def _run(self, model: PreTrainedModel, inputs: Sequence[Inputs]) -> list[verify.Said]:
        try:
            return verify.run(model, inputs)
        except RAISED as error:
            raise self._refusal(error) from None

    def _refusal(self, error: BaseException) -> UnsupportedModel:
        """A module counts its heads in a way that surgery does not follow."""
        return UnsupportedModel(
            f"{type(self.loaded.model).__name__}: its attention does not run with fewer heads: {first_line(error)}",
            hint="--layout masked works",
        )

    def _proved_wide(
        self, model: PreTrainedModel, plan: Plan, inputs: list[Inputs], *, repair: Repair | None
    ) -> Verification:
        """Masked = pruned on a copy in float64, or where memory is short in float32; generated tokens too, and then the
        same of the repaired model.
        """
        size, room = total_parameters(model), SHARE * free_memory()
        if 8 * size > room:
            format = "float32" if 4 * size <= room else str(model.dtype).removeprefix("torch.")
            self.notes.append(f"not proved in float64, for which memory is short, but in {format}")
        if 4 * size > room:
            return Verification()
        sites = self.study.sites
        wide = copy.deepcopy(model).cpu()
        wide = wide.double() if 8 * size <= room else wide.float()
        if wide._can_set_experts_implementation():
            wide.set_experts_implementation("eager")
        expected = verify.run_masked(wide, sites, plan, inputs)
        tokens, mended = verify.masked_tokens(wide, sites, plan), []
        if repair is not None:
            with applied(wide, sites, repair):
                mended = verify.run_masked(wide, sites, plan, inputs)
        if tokens is None and wide.can_generate():
            self.notes.append(
                "generation is not part of the proof: the whole model does not generate from made-up inputs"
            )
        self._operate(wide, plan)
        checks = [verify.same_arithmetic(expected, self._run(wide, inputs), wide)]
        try:
            checks += verify.same_tokens(wide, tokens)
        except RAISED as error:
            raise self._refusal(error) from None
        if repair is not None:
            write(wide, self._left(wide), repair)
            check = verify.same_arithmetic(mended, self._run(wide, inputs), wide)
            checks.append(replace(check, name=f"repaired {check.name}"))
        found = Verification(tuple(checks))
        found.require()
        return found

    def _layout(self, model: PreTrainedModel, after: tuple[Site, ...]) -> tuple[str, PreTrainedConfig | None]:
        """The layout asked for, or the first that fits, with the configuration that a native one needs.

        Raises:
            InvalidPlan: the plan does not fit it.
        """
        wanted = self.options.layout
        if wanted == "masked":
            return wanted, None
        config = "" if wanted == "portable" else native_config(model, after)
        if isinstance(config, PreTrainedConfig):
            return "native", config
        if wanted == "native":
            raise InvalidPlan(f"no native checkpoint: {config}", hint=self._native_hint(model))
        if wanted == "auto":
            self.notes.append(f"portable, since a native checkpoint is impossible: {config}")
        if not auto_classes(model):
            raise UnsupportedModel(
                f"{type(model).__name__} is no class of transformers, so no portable checkpoint can restore it",
                hint="--layout masked",
            )
        return "portable", None

    def _native_hint(self, model: PreTrainedModel) -> str:
        """With which numbers of heads there would be a native checkpoint."""
        first = self.study.sites[0]
        counts = native_counts(model, first, first.n_heads, first.n_kv_heads)
        if not counts:
            return "this architecture has none; use --layout portable"
        listing = ", ".join(map(str, counts))
        return f"possible with the same {listing} heads left in every site (--scope uniform); or --layout portable"

    def _inputs(self, model: PreTrainedModel) -> list[Inputs]:
        """Made-up inputs, and a few examples of the data side by side."""
        found: list[Inputs] = [probe_inputs(model)]
        examples = self.judging.examples
        if examples is not None:
            batch = collate(examples.items[:PROOF_EXAMPLES], examples.pads).to(model.device, model.dtype)
            inputs = model_inputs(model, self.loaded.task, batch)
            found.append({name: _shortened(name, value) for name, value in inputs.items()})
        return found


def _shortened(name: str, value: Any) -> Any:
    """The first tokens of a text input: a proof needs no long texts, whose logits are large."""
    text = name.removeprefix("decoder_") in ("input_ids", "attention_mask", "token_type_ids")
    return value[:, :PROOF_TOKENS] if text else value
