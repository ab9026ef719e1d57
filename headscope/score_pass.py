"""One pass of a model that serves all scores, and measures of pairs of heads with them: what each batch adds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headscope import gated
from headscope.capture import Watch, watch
from headscope.examples import Batch
from headscope.heads import Site
from headscope.memory import in_halves
from headscope.models import LoadedModel
from headscope.objective import Objective, Wanted
from headscope.offload import home
from headscope.pair_sums import PairSums
from headscope.parallel import of_all, shards_of
from headscope.reading import RowReader
from headscope.scores import RowBlock, Score
from headscope.tallies import Tally
from headscope.texts import Texts


def reads_rows(scores: Iterable[Score], pairs: PairSums | None) -> list[Callable[[RowBlock], dict[str, Tensor]]]:
    """What of these scores and measures of pairs is made from attention rows."""
    found = [score.rows for score in scores if score.rows is not None]
    return found + ([] if pairs is None else list(pairs.readers))


@dataclass(frozen=True)
class ScorePass:
    """A model with what is wanted of it; `unit` takes the sums.

    `alone` and `ablated` are what passes with gated heads have found before, by the number of the example.
    """

    loaded: LoadedModel
    sites: Sequence[Site]
    objective: Objective
    wanted: Wanted
    unit: Tally
    alone: Mapping[int, Tensor] = field(default_factory=dict)
    ablated: Mapping[int, Tensor] = field(default_factory=dict)

    @contextlib.contextmanager
    def ready(self) -> Iterator[Callable[[Batch], None]]:
        """A function that runs the model on a batch and adds what it shows, while the model is watched for that."""
        pairs = self.unit.pairs
        with contextlib.ExitStack() as stack:
            seen = stack.enter_context(watch(self.loaded.model, self.sites))
            reader = self._reader()
            if reader is not None:
                stack.enter_context(reader.reading())
            if pairs is not None:
                stack.enter_context(pairs.watching(self.loaded.model, self.sites))
            yield partial(self._add, seen, reader)

    def _add(self, seen: Watch, reader: RowReader | None, batch: Batch) -> None:
        unit, objective = self.unit, self.objective
        split = shards_of(self.loaded.model).size > 1  # then the others wait for this process in the midst of theirs
        halves = in_halves(lambda part: objective.run(part, seen, self.wanted), batch, unit.notes, together=split)
        for part, outcome in halves:
            if self.alone:
                outcome.alone = gated.by_site([self.alone[number] for number in part.numbers], self.sites)
            if self.ablated:
                outcome.ablated = gated.by_site([self.ablated[number] for number in part.numbers], self.sites)
            unit.scores.add(part, outcome, self.sites, {} if reader is None else reader.sums)
            while unit.pairs is not None and unit.pairs.end(seen):
                objective.body(part)
            unit.loss += float(outcome.loss.sum())
            unit.labelled += len(outcome.loss)

    def _reader(self) -> RowReader | None:
        """What reads attention rows while the objective runs, if a score or a measure of pairs wants them."""
        model, pairs = self.loaded.model, self.unit.pairs
        readers = reads_rows(self.unit.scores.scores.values(), None)
        if pairs is not None:
            readers += [of_all(one, self.sites, shards_of(model)) for one in pairs.readers]
        replace = not (self.wanted.gradient or self.wanted.draws)
        reader = RowReader(model, self.sites, readers, replace=replace) if readers else None
        special: Tensor | None = None
        if readers and self.loaded.reads == "text":
            special = torch.tensor(sorted(self.loaded.tokenizer().all_special_ids), device=home(model))

        def begin(inputs: dict[str, Any], batch: Batch) -> None:
            texts = Texts.of(inputs, batch, special)
            if reader is not None:
                reader.start(texts, len(batch))
            if pairs is not None:
                pairs.start(texts, batch.numbers)

        self.objective.on_inputs = begin
        return reader
