"""A request: what `prune` is to remove and how it is to choose, checked for what cannot be meant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headscope.counts import check_ratio
from headscope.errors import UsageError


@dataclass(frozen=True)
class Request:
    """What to remove (exactly one of the first seven) and how to choose it; defaults are those of the command line."""

    ratio: float | None = None
    heads: str | None = None
    plan: Path | None = None
    keep_metric: float | None = None
    max_loss_increase: float | None = None
    target_parameters: int | None = None
    merge_kv: int | None = None
    """Key/value heads that each site is left with, merged from those that it has; no query head goes."""
    criterion: str = "auto"
    scores: Path | None = None
    by: str | None = None
    scope: str = "model"
    unit: str = "auto"
    rounds: int = 1
    min_heads: int = 1
    masked: bool = False
    """Heads are only silenced, so that any set of them can go."""

    WAYS = ("ratio", "heads", "plan", "keep_metric", "max_loss_increase", "target_parameters", "merge_kv")

    def __post_init__(self) -> None:
        given = [name for name in self.WAYS if getattr(self, name) is not None]
        options = [f"--{name.replace('_', '-')}" for name in given or self.WAYS]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(options)} each say what to remove", hint="give one of them")
        if not given:
            raise UsageError("nothing says what to remove", hint=f"give one of {', '.join(options)}")
        if (self.scores is None) != (self.by is None):
            raise UsageError("--scores FILE and --by COLUMN belong together")
        if self.scores is not None and self.criterion != "auto":
            raise UsageError("--criterion and --scores both say what goes first", hint="give one of them")
        if self.rounds < 1:
            raise UsageError(f"--rounds {self.rounds}: expected 1 or more")
        if self.rounds > 1 and self.ratio is None:
            raise UsageError("--rounds scores anew on the way to a number of heads", hint="give it with --ratio")
        if self.rounds > 1 and self.scores is not None:
            raise UsageError("--rounds scores anew, and --scores are scores that stay", hint="give one of them")
        if self.heads is not None or self.plan is not None:
            self._require_no_choice()
        if self.merge_kv is not None:
            self._require_merge_alone()
        if self.min_heads < 0:
            raise UsageError(f"--min-heads {self.min_heads}: expected 0 or more")
        self._check_limits()

    def _require_no_choice(self) -> None:
        """What is named needs no choosing: options about it were meant otherwise."""
        chosen = {"criterion": self.criterion != "auto", "scores": self.scores is not None}
        chosen |= {"scope": self.scope != "model", "unit": self.unit != "auto"}
        for name in (name for name, given in chosen.items() if given):
            raise UsageError(f"--{name} chooses heads, and --{'plan' if self.heads is None else 'heads'} names them")

    def _require_merge_alone(self) -> None:
        """Merging removes no query head: options about which ones go were meant otherwise."""
        if self.masked:
            raise UsageError("--layout masked keeps all shapes, and --merge-kv makes them smaller")
        chosen = {"criterion": self.criterion != "auto", "scores": self.scores is not None}
        chosen |= {"scope": self.scope != "model", "unit": self.unit == "head", "min-heads": self.min_heads != 1}
        for name in (name for name, given in chosen.items() if given):
            raise UsageError(f"--{name} is about heads that are removed, and --merge-kv removes none")

    def _check_limits(self) -> None:
        if self.ratio is not None:
            check_ratio(self.ratio)
        if self.keep_metric is not None and not 0 < self.keep_metric <= 1:
            raise UsageError(f"--keep-metric {self.keep_metric:g} is no share of a metric, such as 0.99")
        if self.max_loss_increase is not None and not 0 <= self.max_loss_increase < float("inf"):
            raise UsageError(f"--max-loss-increase {self.max_loss_increase:g}: expected 0 or more nats")
        if self.target_parameters is not None and self.target_parameters < 1:
            raise UsageError(f"--target-parameters {self.target_parameters}: expected 1 or more")
        if self.target_parameters is not None and self.masked:
            raise UsageError("--layout masked removes no parameters, so --target-parameters cannot be met")

    @property
    def judged(self) -> bool:
        """Whether the choice is judged on held-out data."""
        return self.keep_metric is not None or self.max_loss_increase is not None

    @property
    def chosen(self) -> bool:
        """Whether a criterion chooses the heads."""
        return self.heads is None and self.plan is None and self.merge_kv is None and self.scores is None
