"""One pass over the data that serves all measures of pairs of heads: what each batch shows goes to each measure's sums.

A pass looks like this; a batch with more attention rows than may be held is run again for its further queries.

    sums = PairSums(space, load_measures(["attention", "output"]))
    reader = RowReader(model, space.sites, sums.readers, replace=True)
    with watch(model, space.sites, gradients=False) as seen, sums.watching(model, space.sites), reader.reading():
        for batch in batches:
            again = True
            while again:
                model(**batch)                      # after reader.start(texts, n) and sums.start(texts, numbers)
                again = sums.end(seen)
    values = sums.finish()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headscope import registry
from headscope.capture import Watch
from headscope.examples import sent
from headscope.heads import Site, SiteId
from headscope.measures import Evidence, Measure, Outputs, PairSum, PairValues
from headscope.pairs import HeadSpace
from headscope.row_store import RowStore
from headscope.scores import RowBlock
from headscope.states import State, under, within
from headscope.texts import Texts


def load_measures(names: Sequence[str]) -> dict[str, Measure]:
    """The measures by name; `all` stands for every one.

    Raises:
        UsageError: a name is unknown.
    """
    return registry.chosen("measures", "MEASURE", names, "measure")


class PairSums:
    """The sums of some measures over the batches of one pass."""

    def __init__(self, space: HeadSpace, measures: Mapping[str, Measure]) -> None:
        self.space, self.measures = space, measures
        self._rows = RowStore(space)
        self._windowed: dict[SiteId, int] = {}
        self._apart = torch.zeros_like(self._rows.apart)
        self.clear()
        self.start(Texts({}, None, None), ())

    def clear(self) -> None:
        """Begin anew, for those who watch a model already."""
        self.sums = {name: measure.begin(self.space) for name, measure in self.measures.items()}
        self._rows.apart.zero_()
        self._apart.zero_()

    def state(self) -> State:
        """What was summed so far, measure by measure, and which sites were seen to differ in their queries or keys."""
        found: State = {"apart/rows": self._rows.apart.clone(), "apart/outputs": self._apart.clone()}
        for name, one in self.sums.items():
            found |= under(f"measure/{name}", one.state())
        return found

    def absorb(self, state: State) -> None:
        """Add what was summed over other batches."""
        self._rows.apart |= state["apart/rows"]
        self._apart |= state["apart/outputs"]
        for name, one in self.sums.items():
            one.absorb(within(state, f"measure/{name}"))

    @property
    def size(self) -> int:
        """Bytes that the state takes, at most."""
        return sum(one.size for one in self.sums.values())

    def of(self, evidence: Evidence) -> list[PairSum]:
        """The sums of the measures that look at this evidence."""
        return [self.sums[name] for name, measure in self.measures.items() if measure.evidence is evidence]

    @property
    def readers(self) -> list[Callable[[RowBlock], dict[str, Tensor]]]:
        """What must see the attention rows of the model, if anything."""
        return [self._rows.see] if self.of(Evidence.ROWS) else []

    def start(self, texts: Texts, numbers: Sequence[int]) -> None:
        """Begin a batch: what stands in it, and the numbers of its examples in the data. Nothing is added before its
        `end`, so a batch that failed can be begun again in parts.
        """
        if self._rows.again and tuple(numbers) == self._numbers:
            return
        self._texts, self._numbers = texts, tuple(numbers)
        self._rows.start(len(numbers))

    @contextlib.contextmanager
    def watching(self, model: nn.Module, sites: Sequence[Site]) -> Iterator[None]:
        """Note while the block runs into how many sequences (windows) each site of a model cuts an example."""
        handles = [
            model.get_submodule(site.output).register_forward_pre_hook(self._note(site))
            for site in sites
            if not site.call
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, site: Site) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].dim() > 2:  # else tokens of all sequences lie end to end
                for one in (site.id, *site.shared_with):
                    self._windowed[one] = args[0].shape[site.batch_axis] // max(1, len(self._numbers))

        return note

    def end(self, seen: Watch) -> bool:
        """Add what the batch showed, after the model has run; True if it must be run once more."""
        for part in self._rows.parts() if self.readers else ():
            for one in self.of(Evidence.ROWS):
                one.add(part)
        if not self._rows.again and self.of(Evidence.OUTPUTS):
            for part in self._outputs(seen):
                for one in self.of(Evidence.OUTPUTS):
                    one.add(part)
        for record in seen.records.values():
            record.output = None  # a site that the next batch does not run shows nothing
        return bool(self.readers) and self._rows.more()

    def _outputs(self, seen: Watch) -> Iterator[Outputs]:
        """Outputs at real tokens for each group of sites with the same queries."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, site in enumerate(self.space.sites):
            values = seen.records[site.id].output
            if values is not None and not site.mixes_heads:  # else a head's slice of W_o is not what it writes by
                windows = number if self._windowed.get(site.id, 1) > 1 else None
                groups.setdefault((site.id.stack, windows, values.shape[1]), []).append(number)
        together = torch.zeros_like(self._apart)
        for sites in groups.values():
            index = torch.tensor(sites)
            together[index[:, None], index] = True
            yield self._tokens(tuple(sites), seen)
        self._apart |= ~together

    def _tokens(self, sites: tuple[int, ...], seen: Watch) -> Outputs:
        outputs = [seen.records[self.space.sites[site].id].output for site in sites]
        whole = [values for values in outputs if values is not None]
        real = self._texts.real(self.space.sites[sites[0]], whole[0])
        example, position = map(torch.from_numpy, real.cpu().numpy().nonzero())
        chosen = tuple(values[sent(example, values.device), sent(position, values.device)] for values in whole)
        return Outputs(sites, chosen, torch.tensor(self._numbers)[example], position)

    def finish(self) -> dict[str, PairValues]:
        """The values of every measure, symmetric to the last bit."""
        apart = {Evidence.ROWS: self._rows.apart, Evidence.OUTPUTS: self._apart}
        found: dict[str, PairValues] = {}
        for name, measure in self.measures.items():
            given = self.sums[name].finish()
            values = (given.values + given.values.T) / 2
            if measure.evidence in apart:
                values[self.space.spread(apart[measure.evidence])] = torch.nan
            found[name] = PairValues(values, given.error, given.notes)
        return found
