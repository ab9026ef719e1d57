"""What is asked of a run of the objective, and what one batch gave."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from headscope.heads import SiteId


@dataclass(frozen=True)
class Wanted:
    """Which backward passes to make: for the task's own loss, and for how many draws from the model's prediction.

    With `smooth`, random scores take the place of drawn labels' where there are few classes: the same mean squares.
    """

    gradient: bool = False
    draws: int = 0
    seed: int = 0
    smooth: bool = False


@dataclass
class Outcome:
    """What one batch gave. `loss` is `[example]`, empty without labels; `gate` is `[batch token head]` of each site,
    `sampled` is `[draw batch head]`, `alone` is the loss `[batch head]` with one head left in the site, `ablated`
    what the loss gains without the head.
    """

    loss: Tensor
    gate: dict[SiteId, Tensor] = field(default_factory=dict)
    sampled: dict[SiteId, Tensor] = field(default_factory=dict)
    alone: dict[SiteId, Tensor] = field(default_factory=dict)
    ablated: dict[SiteId, Tensor] = field(default_factory=dict)
