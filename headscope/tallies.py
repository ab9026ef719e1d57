"""All that one pass over the data sums: scores, pairs of heads, the loss, and what happened on the way."""

from __future__ import annotations

import torch

from headscope.pair_sums import PairSums
from headscope.states import State, noted, packed, under, within
from headscope.sums import ScoreSums


class Tally:
    """The sums of a pass, or of one unit of it."""

    def __init__(self, scores: ScoreSums, pairs: PairSums | None = None) -> None:
        self.scores, self.pairs = scores, pairs
        self.loss, self.labelled = 0.0, 0
        """The summed loss, and of how many examples it is."""
        self.notes: list[str] = []

    def fresh(self) -> Tally:
        """Empty sums of the same kind, for the units of the pass."""
        pairs = None if self.pairs is None else PairSums(self.pairs.space, self.pairs.measures)
        return Tally(ScoreSums(self.scores.scores), pairs)

    def clear(self) -> None:
        """Begin the next unit; what watches a model for these sums goes on doing so."""
        self.scores, self.loss, self.labelled, self.notes = ScoreSums(self.scores.scores), 0.0, 0, []
        if self.pairs is not None:
            self.pairs.clear()

    def state(self) -> State:
        """Everything that was summed, and the notes as bytes of JSON."""
        found = under("scores", self.scores.state())
        found["loss"] = torch.tensor([self.loss, self.labelled], dtype=torch.float64)
        found["notes"] = packed(self.notes)
        return found if self.pairs is None else found | under("pairs", self.pairs.state())

    def absorb(self, state: State) -> None:
        """Add a unit's state, which is used up."""
        self.scores.absorb(within(state, "scores"))
        if self.pairs is not None:
            self.pairs.absorb(within(state, "pairs"))
        loss, labelled = state["loss"].tolist()
        self.loss, self.labelled = self.loss + loss, self.labelled + int(labelled)
        noted(self.notes, state["notes"])

    @property
    def size(self) -> int:
        """Bytes that the sums over pairs take, at most; those of scores are small."""
        return 0 if self.pairs is None else self.pairs.size

    @property
    def measures(self) -> dict[str, str]:
        """What is measured, by name; of pairs of heads also which, where it is not every one."""
        found = dict.fromkeys(self.scores.scores, "")
        pairs = {} if self.pairs is None else self.pairs.measures
        return found | {f"{name} of pairs": one.pairs for name, one in pairs.items()}
