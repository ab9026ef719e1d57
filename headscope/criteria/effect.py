"""Effect as criterion: the second-order guess of what removing a head does to the loss, with its sign."""

from __future__ import annotations

from headscope.criteria import Criterion, column_of

CRITERION = Criterion(
    title="effect",
    meaning="heads whose removal is guessed to raise the loss least, or to lower it most, go first",
    needs_labels=True,
    needs_data=True,
    scores=column_of("effect", "effect"),
)
