"""Sensitivity as criterion: how much of the prediction a head's gate moves, without labels."""

from __future__ import annotations

from headscope.criteria import Criterion, column_of

CRITERION = Criterion(
    title="sensitivity",
    meaning="heads whose removal is guessed to cause the least divergence of the prediction go first; needs no labels",
    needs_labels=False,
    needs_data=True,
    scores=column_of("sensitivity", "sensitivity"),
    cheap=True,
)
