"""Ablation as criterion: the exact change of the loss when one head alone is gated to 0."""

from __future__ import annotations

from headscope.criteria import Criterion, column_of

CRITERION = Criterion(
    title="ablation",
    meaning="heads go first without which, one at a time, the mean loss rises least or falls most",
    needs_labels=True,
    needs_data=True,
    scores=column_of("ablation", "ablation"),
)
