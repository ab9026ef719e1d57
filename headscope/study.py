"""A study is the library's front door: one model, its heads, its data, and one pass that serves all scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from headscope import gated, registry
from headscope.ablated import Ablation, Bench, GatedPass, exact, removals_of, sampled
from headscope.data import DataOptions, load_examples
from headscope.discovery import Discovery, find_sites
from headscope.errors import UsageError
from headscope.examples import Batch, Example, Examples
from headscope.fingerprints import Fingerprint, of_data, of_measures, of_model, of_versions
from headscope.gated_rows import GatedRows
from headscope.heads import HeadId, Site, SiteId
from headscope.matrices import head_weights
from headscope.metrics import choose_metric
from headscope.models import LoadedModel, LoadOptions, load
from headscope.objective import Objective, Wanted
from headscope.offload import give_back, home, is_offloaded
from headscope.pair_sums import PairSums
from headscope.provenance import Provenance
from headscope.replay import Removal
from headscope.score_pass import ScorePass, reads_rows
from headscope.scores import GATED, LABELS, Means, Need, Score, Scores
from headscope.shares import Progress, Share
from headscope.stand_in import in_memory
from headscope.sums import ScoreSums
from headscope.tallies import Tally

CPU_TOKENS = 512
"""Padded tokens in a batch on a CPU, where 256 to 1,024 are fastest."""
GPU_TOKENS = 16_384
EAGER_ROWS = "attention rows are computed as eager attention does, since other implementations show none"


@dataclass(frozen=True)
class StudyOptions:
    """How to run a study; the defaults are those of the command line."""

    load: LoadOptions = field(default_factory=LoadOptions)
    data: DataOptions = field(default_factory=DataOptions)
    batch_size: int | None = None
    draws: int = 1
    seed: int = 0
    budget: int | None = None
    """Examples that an ablated head is run on, on average; None: all."""
    steps: int | None = None
    """Steps of training for the criterion gates; None: its own number."""


class Study:
    """One model on one set of examples (or on none)."""

    def __init__(self, loaded: LoadedModel, examples: Examples | None, options: StudyOptions) -> None:
        self.loaded, self.examples, self.options = loaded, examples, options
        self.progress: Progress | None = None
        """Told of passes for which no other is given."""
        self.share = Share()
        """What this process does of a pass: all of it, unless there are other processes or finished work."""

    @classmethod
    def open(cls, model: str, data: str | None = None, options: StudyOptions | None = None) -> Study:
        """Load a model and, if given, data for its task.

        Raises:
            HeadscopeError: the model or the data cannot be used; the message says what to do.
        """
        options = options or StudyOptions()
        loaded = load(model, options.load)
        return cls(loaded, None if data is None else load_examples(data, loaded, options.data), options)

    @cached_property
    def discovery(self) -> Discovery:
        """The model's sites, found by a probe when first asked for."""
        found = find_sites(in_memory(self.loaded.model))
        if is_offloaded(self.loaded.model):
            give_back()
        return found

    def on(self, examples: Examples | None) -> Study:
        """A study of the same model, whose heads are known already, on other examples."""
        other = Study(self.loaded, examples, self.options)
        other.discovery = self.discovery
        return other

    @property
    def sites(self) -> tuple[Site, ...]:
        """The model's sites in reporting order."""
        return self.discovery.sites

    def default_measures(self) -> tuple[str, ...]:
        """What `inspect` measures unless told: as much as the data allows."""
        if self.examples is None:
            return ("weights",)
        wanted = ("weights", "importance" if self.examples.labelled else "sensitivity", "attention")
        return tuple(name for name in wanted if name in registry.names("scores"))

    def scores(
        self,
        measures: Sequence[str] | None = None,
        *,
        pairs: PairSums | None = None,
        progress: Progress | None = None,
    ) -> Scores:
        """Every column of the measures for every head, from one pass over the data (and one a head for `only`).

        The same pass fills the sums of `pairs`, which must be over the sites of this study.

        Raises:
            UsageError: a measure is unknown, or needs data or labels that are not there.
        """
        names = tuple(self.default_measures() if measures is None else measures)
        chosen = load_scores(names)
        needs = frozenset(need for score in chosen.values() for need in score.needs)
        self._allow(chosen, needs)
        sums, loss, notes = ScoreSums(chosen), None, ()
        if needs - {Need.WEIGHTS}:
            loss, notes = self._pass(sums, chosen, pairs, progress or self.progress)
        values: dict[str, dict[SiteId, Tensor]] = {
            column.name: {} for score in chosen.values() for column in score.columns
        }
        for site in self.sites:
            weights = head_weights(self.loaded.model, site) if Need.WEIGHTS in needs else None
            means = Means(sums.count, sums.means(site.id), weights)
            for score in chosen.values():
                for column, found in score.finish(site, means).items():
                    values[column][site.id] = found.double().cpu()
        halved = [one for one in chosen.values() if one.ranks and not (self._samples and Need.ABLATED in one.needs)]
        stability = {score.ranks: sums.stability(score, self.sites) for score in halved}
        return Scores(names, values, stability, loss, sums.count, notes)

    def _allow(self, chosen: Mapping[str, Score], needs: frozenset[Need]) -> None:
        if self.examples is None and needs - {Need.WEIGHTS}:
            hungry = ", ".join(name for name, score in chosen.items() if score.needs - {Need.WEIGHTS})
            raise UsageError(f"{hungry} cannot be measured without data", hint="give --data FILE")
        if self.examples is not None and needs & LABELS and not self.examples.labelled:
            hungry = ", ".join(name for name, score in chosen.items() if score.needs & LABELS)
            raise UsageError(
                f"{hungry} needs labels, and {self.examples.name} has none for this model",
                hint="name their column with --label-column, or use --measures sensitivity",
            )

    def _pass(
        self, sums: ScoreSums, chosen: Mapping[str, Score], pairs: PairSums | None, progress: Progress | None
    ) -> tuple[float | None, tuple[str, ...]]:
        """One pass over all batches; returns the mean loss (None without labels) and what happened on the way.

        Passes with gated heads come first, while nothing watches the model; progress is then told of them, which take
        nearly all of the time.
        """
        assert self.examples is not None
        model, options = self.loaded.model, self.options
        needs = {need for score in chosen.values() for need in score.needs}
        objective = Objective(model, self.loaded.task, self.sites)
        wanted = Wanted(Need.GRADIENT in needs, options.draws if Need.SAMPLED in needs else 0, options.seed)
        notes: list[str] = []
        if objective.head is None and self.loaded.task.vocabulary:
            notes.append("the language-model head cannot be run apart from this model: its logits are held whole")
        rows = GatedRows()
        if needs & GATED:
            rows, progress = self._gated(objective, sums, needs, progress), None
            notes += rows.notes
        total = Tally(sums, pairs)
        total.notes += notes
        if options.load.attention not in ("auto", "eager") and reads_rows(chosen.values(), pairs):
            total.notes.append(EAGER_ROWS)
        cut, unit = batches(self), total.fresh()
        running = ScorePass(self.loaded, self.sites, objective, wanted, unit, rows.alone, rows.ablated)
        with running.ready() as add:
            self.share.pool(
                cut,
                add,
                unit,
                total=total,
                fingerprint=lambda: self.fingerprint(cut) | of_measures(total.measures, draws=options.draws),
                progress=progress,
            )
        return (total.loss / total.labelled if total.labelled else None), tuple(total.notes)

    def fingerprint(self, cut: Sequence[Batch]) -> Fingerprint:
        """All that sums over these batches depend on, but what is measured."""
        origin = self.provenance()
        sizes = {"seed": str(self.options.seed), "batch_size": str(self.options.batch_size or "auto")}
        return of_model(self.loaded, origin) | sizes | of_data(cut, self.options.data, origin) | of_versions(origin)

    def ablate(self, groups: Sequence[Collection[HeadId]], *, progress: Progress | None = None) -> Ablation:
        """What removing each group of heads at once does to loss and metric; with a budget, an estimate.

        Raises:
            UsageError: there are no data or no labels, a group is empty or names a head that is not there, or the
                budget is too small.
        """
        if self.examples is None or not self.examples.labelled:
            raise UsageError("ablation needs data with labels for this model")
        objective = Objective(self.loaded.model, self.loaded.task, self.sites)
        removals = removals_of(groups, self.sites)
        if self._samples:
            return self._sampled(objective, removals, progress or self.progress)
        rows = self._gated_rows(objective, removals, alone=False, progress=progress or self.progress)
        return exact(rows, self.examples.items)

    @property
    def _samples(self) -> bool:
        """Whether a budget lets ablation run on a part of the examples only."""
        return self.options.budget is not None and self.options.budget < len(self.examples or ())

    def _sampled(self, objective: Objective, removals: Sequence[Removal], progress: Progress | None) -> Ablation:
        """An estimate within the budget, by one process: what is drawn next depends on what was found."""
        assert self.examples is not None and self.options.budget is not None
        if not self.share.alone:
            raise UsageError(
                f"--budget {self.options.budget} draws from all examples as it goes, which is not shared out or kept",
                hint="leave it out for exact ablation, or run it in one process without --work",
            )
        bench = Bench(objective, self.examples.items, lambda some: batches(self, some), progress=progress)
        return sampled(bench, removals, self.options.budget, seed=self.options.seed)

    def _gated(
        self, objective: Objective, sums: ScoreSums, needs: Collection[Need], progress: Progress | None
    ) -> GatedRows:
        """What passes with gated heads say of each example; under a budget only the means of ablations are known."""
        removals, whole, rows, notes = None, dict[str, Tensor](), GatedRows(), list[str]()
        if Need.ABLATED in needs:
            removals = removals_of([[head] for site in self.sites for head in site.heads], self.sites)
        if removals is not None and self._samples:  # before `only`: a budget that is too small is refused at once
            found, removals, progress = self._sampled(objective, removals, progress), None, None
            whole = {"change": found.change, "change_error": found.error, "metric_change": found.metric}
            notes += found.notes
        if removals is not None or Need.ALONE in needs:
            rows = self._gated_rows(objective, removals, alone=Need.ALONE in needs, progress=progress)
            whole |= {} if removals is None else {"metric_change": rows.quality.changes()}
        for name, values in whole.items():
            for id, part in gated.by_site([values], self.sites).items():
                sums.whole.setdefault(id, {})[name] = part[0]
        rows.notes = notes + rows.notes
        return rows

    def _gated_rows(
        self, objective: Objective, removals: Sequence[Removal] | None, *, alone: bool, progress: Progress | None
    ) -> GatedRows:
        """One pass of exact runs with gated heads on every example: without each of `removals`, with heads `alone`."""
        cut = batches(self)
        named = {"changes without heads": str(removals)} if removals is not None else {}
        metric = choose_metric(None, self.loaded.task, self.loaded.task_name, cut) if named else None
        named |= {"losses with one head alone": ""} if alone else {}
        total = GatedRows(metric, len(removals or ()))
        unit = total.fresh()
        objective.on_inputs = lambda *_: self.share.step()  # one batch may take thousands of runs
        self.share.pool(
            cut,
            GatedPass(objective, unit, removals, alone=alone, notes=total.notes).add,
            unit,
            total=total,
            fingerprint=lambda: self.fingerprint(cut) | of_measures(named, metric=metric.name if metric else None),
            progress=progress,
        )
        return total

    def provenance(self) -> Provenance:
        """What the numbers of this study rest on."""
        loaded, examples = self.loaded, self.examples
        return Provenance(
            model=loaded.location.name,
            revision=loaded.location.revision,
            weights_digest=loaded.location.digest(),
            data=examples.name if examples else "",
            data_digest=examples.digest if examples else "",
            task=loaded.task_name,
            examples=len(examples) if examples else 0,
            skipped=examples.skipped if examples else 0,
            truncated=sum(example.truncated for example in examples.items) if examples else 0,
            seed=self.options.seed,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            device=str(home(loaded.model)),
            attention=str(loaded.model.config._attn_implementation),
        )


def batches(study: Study, some: Sequence[Example] | None = None) -> list[Batch]:
    """The batches of a study, or of some of its examples, cut once in a fixed order."""
    assert study.examples is not None
    tokens = CPU_TOKENS if home(study.loaded.model).type == "cpu" else GPU_TOKENS
    examples = study.examples if some is None else replace(study.examples, items=tuple(some))
    return examples.batches(study.options.batch_size, tokens=tokens)


def load_scores(names: Sequence[str]) -> dict[str, Score]:
    """The measures by name; `all` stands for every one.

    Raises:
        UsageError: a name is unknown.
    """
    return registry.chosen("scores", "SCORE", names, "measure")
