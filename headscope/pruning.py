"""Pruning from a request to a verified checkpoint: choose, prove, cut, write, reload, and only then let it appear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headscope import verify
from headscope.alignment import Family
from headscope.discovery import find_sites
from headscope.errors import InvalidPlan, ModelError, UnsupportedModel, UsageError
from headscope.first_scores import FirstScores, shared_scores
from headscope.folder_writing import check_target
from headscope.foresight import foresee
from headscope.forms import choose_form
from headscope.headers import read_config
from headscope.heads import Site
from headscope.layouts import LAYOUTS
from headscope.memory import memory_errors
from headscope.merge_maps import find_merge
from headscope.merging import Merge, aligned, merge_heads, tied
from headscope.models import LoadedModel, load
from headscope.offload import give_back, require_in_memory
from headscope.output_weights import Patch, swapped
from headscope.plan import Plan, SiteHeads
from headscope.prepared import prepare, proof_inputs
from headscope.pruned import Foresight, Pruned, cost
from headscope.publish import Basis, Publication, publish
from headscope.reasons import PACKED, RAISED, first_line
from headscope.repair import Repair, applied, write
from headscope.request import Request
from headscope.selection import Selection, select
from headscope.shares import Share
from headscope.stand_in import in_memory
from headscope.stored import as_stored, pad_token, sparing, stored_format
from headscope.study import Progress, Study, StudyOptions
from headscope.surgery import prune as take_out
from headscope.surgery import silence_heads
from headscope.trials import Trials, Verdict
from headscope.verify import Inputs, Verification
from headscope.widening import widened

NO_REPAIR = "no repair was made: none was found that lowers the divergence on held-out examples"


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
    return Pruning(model, data, options).run(output, progress)


class Pruning:
    """One model on its way to a smaller one."""

    def __init__(self, model: str, data: str | None, options: PruneOptions) -> None:
        self.options, self.name = options, model
        self.load = options.study.load if data is not None else sparing(model, options.study.load)
        self.loaded = load(model, self.load)
        self._require_plain_weights()
        if options.request.merge_kv is not None:
            require_in_memory(self.loaded.model, "--merge-kv")
        self.pad = pad_token(self.loaded.model.config)
        prepared = prepare(self.loaded, data, options.study, eval_data=options.eval_data, compensate=options.compensate)
        prepared.require_metric(options.metric)
        self.study, self.judging, self.mender = prepared.study, prepared.judging, prepared.mender
        self.notes: list[str] = [*self.loaded.notes, *prepared.notes]
        self.merge: Merge | None = None
        self.known: FirstScores = {}

    def share(self, share: Share, progress: Progress | None) -> None:
        """Make the scores that the choice begins with, where several processes share them or work is kept;
        `run` is for one process.

        Raises:
            HeadscopeError: they cannot be measured, or another process has ended.
        """
        if not share.alone:
            self.study.progress = progress
            self.known = shared_scores(self.study, self.options.request, share, mender=self.mender)

    def _require_plain_weights(self) -> None:
        """Refuse a checkpoint that says it is quantised, also where the loaded model no longer does."""
        location = self.loaded.location
        if not location.gguf and read_config(location.folder).get("quantization_config"):
            raise ModelError(
                f"{self.name}: its weights are quantised, and slices of packed weights mean nothing", hint=PACKED
            )

    def _merge(self, *, align: bool) -> Merge | None:
        """The merge that was asked for; None where heads are removed instead."""
        wanted = self.options.request.merge_kv
        if wanted is None:
            return None
        merge = find_merge(self.study, wanted, align_by=None if align else Family.NONE)
        self.notes += merge.notes
        return merge

    def run(self, output: Path | None, progress: Progress | None) -> Pruned:
        """Choose, judge, cut and write."""
        if output is not None:
            check_target(output, self.loaded.location.origin, force=self.options.publication.force)
        self.study.progress = progress
        self.merge = self._merge(align=output is not None)
        selection, verdict = self._choose(judge=output is not None)
        ahead = self._ahead() if output is None else None
        basis = Basis(self.study.provenance(), self.judging.provenance(), chosen=self.options.request.chosen)
        stored = as_stored(self.name, self.loaded, self.load)
        self._let_go_for(stored)
        with memory_errors():
            result, config, inputs = self._cut(
                selection, stored, None if verdict is None else verdict.repair, prove=output is not None
            )
        result = replace(result, verdict=verdict, provenance=basis.choosing, foresight=ahead)
        if output is None:
            return result
        options = self.options.publication
        return publish(result, stored, config, inputs, output, options=options, pad=self.pad, basis=basis)

    def _choose(self, *, judge: bool) -> tuple[Selection, Verdict | None]:
        """What goes, and, if asked, how the model does without it."""
        request, seed = self.options.request, self.options.study.seed
        standing = self._tied(self.loaded.model, dtype=stored_format(self.loaded))
        trials, self.mender = None, None if self.mender is None else self.mender.on(self.study, standing=standing)
        if self.judging.examples is not None and (judge or request.judged):
            trials = Trials(self.judging, self.options.metric, self.mender, standing=standing)
        if self.merge is not None:
            selection = Selection(Plan(tuple(SiteHeads.of(site) for site in self.study.sites), (), seed=seed))
        else:
            selection = select(self.study, request, trials, seed=seed, mender=self.mender, known=self.known)
        verdict = trials.judged(selection.plan) if trials is not None and judge else None
        self.notes += [*selection.notes, *(verdict.notes if verdict is not None else ())]
        self.notes += [f"not analysed: {problem}" for problem in self.study.discovery.problems]
        if verdict is not None and self.mender is not None:
            self.notes += [NO_REPAIR] if verdict.repair is None else verdict.repair.notes
        return selection, verdict

    def _ahead(self) -> Foresight:
        """What the rest of the run would take."""
        form, merged = stored_format(self.loaded), self.merge is not None
        return foresee(self.study, self.judging, self.mender, stored=form, merged=merged)

    def _let_go_for(self, stored: LoadedModel) -> None:
        """Go on with the model as its files store it; one that was measured in another form need not stay in memory."""
        if stored is self.loaded:
            return
        study = Study(stored, self.study.examples, self.options.study)
        study.discovery = self.study.discovery
        self.loaded, self.study, self.judging, self.mender = stored, study, study.on(self.judging.examples), None
        give_back()

    def _cut(
        self, selection: Selection, stored: LoadedModel, repair: Repair | None, *, prove: bool
    ) -> tuple[Pruned, PreTrainedConfig | None, list[Inputs]]:
        """Take the heads out of the stored model, in place, with the proof of that, and repair what is left; and how it
        goes to disk.
        """
        model, plan, sites = stored.model, selection.plan, self.study.sites
        before, inputs = cost(model, sites, stored.value_bytes), proof_inputs(model, self.judging)
        proof, expected = Verification(), []
        if prove:
            proof = self._proved_wide(model, plan, inputs, repair=repair)
            with swapped(self._tied(model)):
                expected = verify.run_masked(model, sites, plan, inputs)
        self._operate(model, plan)
        after = self._left(model)
        form = choose_form(model, after, self.options.layout, before=self.study.sites[0])
        self.notes += [form.note] if form.note else []
        if prove:
            said = self._run(model, inputs)
            proof += Verification((verify.same_arithmetic(expected, said, model, names=self._names, sites=len(sites)),))
            proof.require()
        if repair is not None:
            write(model, after, repair)
        result = Pruned(
            plan=plan,
            layout=form.layout,
            merge=self.merge,
            before=before,
            after=cost(model, after, stored.value_bytes),
            verification=proof,
            notes=tuple(dict.fromkeys(self.notes)),
            history=selection.history,
        )
        return result, form.config, inputs

    @property
    def _names(self) -> str:
        """The models that must say the same: the whole one made to lose what the smaller one lacks, and that one."""
        return "masked and pruned" if self.merge is None else "tied and merged"

    def _tied(self, model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> list[Patch]:
        """Weights with which the whole model computes what the merged one does; none where nothing is merged."""
        return [] if self.merge is None else tied(model, self.study.sites, self.merge, dtype=dtype)

    def _operate(self, model: PreTrainedModel, plan: Plan) -> None:
        """Take the heads out, merge or silence them, in place."""
        if self.merge is not None:
            merge_heads(model, self.study.sites, self.merge)
            return
        (silence_heads if self.options.layout == "masked" else take_out)(model, self.study.sites, plan)

    def _left(self, model: PreTrainedModel) -> tuple[Site, ...]:
        """The sites of the model after its operation."""
        if self.options.layout == "masked":
            return self.study.sites
        try:
            return find_sites(in_memory(model)).sites
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
        copied, sites = widened(model), self.study.sites
        self.notes += [copied.note] if copied.note else []
        if (wide := copied.model) is None:
            return Verification()
        checks = self._alignment(wide, inputs)
        with swapped(self._tied(wide)):
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
        said = self._run(wide, inputs)
        checks.append(verify.same_arithmetic(expected, said, wide, names=self._names, sites=len(sites)))
        try:
            checks += verify.same_tokens(wide, tokens, names=self._names)
        except RAISED as error:
            raise self._refusal(error) from None
        if repair is not None:
            write(wide, self._left(wide), repair)
            check = verify.same_arithmetic(mended, self._run(wide, inputs), wide, names=self._names)
            checks.append(replace(check, name=f"repaired {check.name}"))
        found = Verification(tuple(checks))
        found.require()
        return found

    def _alignment(self, wide: PreTrainedModel, inputs: Sequence[Inputs]) -> list[verify.Check]:
        """The maps of a merge alone, before any mean, leave what the model says as it is."""
        if self.merge is None:
            return []
        whole = verify.run(wide, inputs)
        with swapped(aligned(wide, self.study.sites, self.merge)):
            return [verify.same_arithmetic(whole, verify.run(wide, inputs), wide, names="whole and aligned")]
