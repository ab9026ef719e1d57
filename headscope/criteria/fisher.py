"""Fisher information as criterion: the mean square of the loss's gradient towards a head's gate."""

from __future__ import annotations

from headscope.criteria import Criterion, column_of

CRITERION = Criterion(
    title="fisher",
    meaning="heads towards whose gates the loss of an example has the smallest mean squared gradient go first",
    needs_labels=True,
    needs_data=True,
    scores=column_of("importance", "fisher"),
)
