"""Importance as criterion (Michel et al. 2019): the mean size of the loss's gradient towards a head's gate."""

from __future__ import annotations

from headscope.criteria import Criterion, column_of

CRITERION = Criterion(
    title="importance",
    meaning="heads towards whose gates the loss of an example has the smallest mean absolute gradient go first",
    needs_labels=True,
    needs_data=True,
    scores=column_of("importance", "importance"),
    cheap=True,
)
