"""What a command was told, checked before anything slow, and turned into the library's options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headscope import registry
from headscope.cli import options as opt
from headscope.cli.talk import Talk
from headscope.errors import UsageError, nearest
from headscope.launching import Standing, standing
from headscope.reports import FORMATS, check_report, choose_format, emit

if TYPE_CHECKING:
    from headscope.models import LoadOptions
    from headscope.reports._picture import Picture
    from headscope.study import StudyOptions
    from headscope.tables import Table

_ROLES = ("text", "pair", "label", "target", "image", "audio", "context", "answer")
_ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Settings:
    """The checked options of one command."""

    model: str
    data: str | None
    revision: str | None
    columns: dict[str, str]
    limit: int | None
    max_length: int | None
    on_long: str | None
    batch_size: int | None
    draws: int
    budget: int | None
    steps: int | None
    top: int | None
    shown: list[str] | None
    processes: int
    timeout: float | None
    standing: Standing
    raw: dict[str, Any]

    @property
    def dry_run(self) -> bool:
        return bool(self.raw["dry_run"])

    @property
    def format(self) -> str:
        """The format of the report, `auto` resolved."""
        return choose_format(self.raw["format"], self.raw["output"], sys.stdout.isatty())

    @property
    def first(self) -> bool:
        """Whether this process reports: the only one, or rank 0 of several."""
        return self.standing.rank == 0

    @property
    def talk(self) -> Talk:
        """How much to say on stderr; rank 0 speaks for all."""
        return Talk(
            quiet=self.raw["quiet"] or not self.first, verbose=self.raw["verbose"], bars=not self.raw["no_progress"]
        )

    def require_columns(self, names: Sequence[str]) -> None:
        """Refuse to show or sort by columns that the report will not have: a run may take hours.

        Raises:
            UsageError: there is no such column.
        """
        sort = self.raw["sort"]
        for name in [*(self.shown or []), *([sort.removeprefix("-")] if sort else [])]:
            if name not in names:
                raise UsageError(f"no column {name!r} in this report", hint=nearest(name, names))

    def load_options(self) -> LoadOptions:
        """How to load the model."""
        from headscope.devices import device_of_rank
        from headscope.models import LoadOptions

        raw, place = self.raw, self.standing
        return LoadOptions(
            revision=self.revision,
            trust_remote_code=raw["trust_remote_code"],
            allow_pickle=raw["allow_pickle"],
            task=raw["task"],
            device=raw["device"] if place.world == 1 else device_of_rank(raw["device"], place.local_rank),
            dtype=raw["dtype"],
            attention=raw["attn_implementation"],
        )

    def study_options(self) -> StudyOptions:
        """How to run a study."""
        from headscope.data import DataOptions
        from headscope.study import StudyOptions

        raw = self.raw
        data = DataOptions(
            columns=self.columns,
            config=raw["config"],
            split=raw["split"],
            encoding=raw["encoding"],
            skip_bad=raw["skip_bad"],
            limit=self.limit,
            max_length=self.max_length,
            on_long=self.on_long,
            seed=raw["seed"],
            parse_special=raw["parse_special"],
        )
        return StudyOptions(
            load=self.load_options(),
            data=data,
            batch_size=self.batch_size,
            draws=self.draws,
            seed=raw["seed"],
            budget=self.budget,
            steps=self.steps,
        )

    def check_model(self) -> None:
        """Refuse what is no model, or has an impossible config.json, before torch is imported."""
        from headscope.headers import check_config, read_config
        from headscope.location import locate

        raw = self.raw
        found = locate(
            self.model, revision=self.revision, allow_pickle=raw["allow_pickle"], code=raw["trust_remote_code"]
        )
        if not found.gguf:
            check_config(read_config(found.folder))

    def check_outputs(self) -> None:
        """Refuse outputs that cannot be written before anything is computed; rank 0 alone writes them."""
        if not self.first:
            return
        output, plot, force = self.raw["output"], self.raw["plot"], self.raw["force"]
        check_report(self.raw["format"], output, force)
        if plot is not None and plot == output:
            raise UsageError(f"--output and --plot are both {plot}")
        if plot is not None:
            from headscope.reports._picture import check_picture

            check_picture(plot, force)

    def report(self, table: Table, talk: Talk, *, picture: Picture | None = None, on_screen: str | None = None) -> None:
        """Shape a table as asked and write it, with its picture where that is wanted.

        `on_screen` names a column of heads that is also shown as a map under a table in the terminal.
        """
        if not self.first:
            return
        raw = self.raw
        picture = None if self.dry_run else picture
        shaped = table if self.dry_run else self.shaped(table)
        talk.notes(table)
        output = None if self.dry_run else raw["output"]
        emit(shaped, format=raw["format"], output=output, force=raw["force"], picture=picture)
        if on_screen is not None and self.format == "table" and raw["output"] is None:
            from headscope.inspection import heat_map

            talk.heat_map(heat_map(table, on_screen), on_screen)
        if raw["plot"] is not None and picture is not None:
            from headscope.reports._picture import save_picture

            save_picture(picture, raw["plot"], raw["force"])

    def shaped(self, table: Table) -> Table:
        """The rows and columns that were asked for."""
        table = table.sorted(self.raw["sort"]) if self.raw["sort"] else table
        table = table.top(self.top) if self.top else table
        return table.select(self.shown) if self.shown else table


def settings(raw: dict[str, Any]) -> Settings:
    """The checked form of a command's options.

    Raises:
        UsageError: one cannot be meant that way.
    """
    opt.one_of("--dtype", raw["dtype"], _DTYPES)
    if "/" not in raw["attn_implementation"]:  # a kernel of the Hub, which takes consent
        opt.one_of("--attn-implementation", raw["attn_implementation"], _ATTENTION)
    opt.one_of("--format", raw["format"], ("auto", *FORMATS))
    opt.one_of("--on-long", raw["on_long"], opt.ON_LONG)
    opt.one_of("--resume", raw["resume"], opt.RESUME)
    tasks = ["auto", *registry.names("tasks")]
    if raw["task"] not in tasks:
        raise UsageError(f"--task {raw['task']}: no such task", hint=nearest(raw["task"], tasks))
    if not 0 <= raw["seed"] < 2**63:
        raise UsageError(f"--seed {raw['seed']}: expected 0 or more, below 2^63")
    if opt.listed(raw["columns"]) == []:
        raise UsageError("--columns names none")
    columns = {role: raw[f"{role}_column"] for role in _ROLES if raw[f"{role}_column"] is not None}
    _data_only(raw, columns)
    return Settings(
        model=raw["model"],
        data=raw["data"],
        revision=raw["revision"],
        columns=columns,
        limit=opt.positive("--limit", raw["limit"], word="all"),
        max_length=opt.positive("--max-length", raw["max_length"]),
        on_long=raw["on_long"],
        batch_size=opt.positive("--batch-size", raw["batch_size"], word="auto"),
        draws=opt.positive("--draws", raw.get("draws")) or 1,
        budget=opt.positive("--budget", raw.get("budget")),
        steps=opt.positive("--steps", raw.get("steps")),
        top=opt.positive("--top", raw["top"]),
        shown=opt.listed(raw["columns"]),
        processes=opt.positive("--processes", raw["processes"]) or 1,
        timeout=_seconds(raw["timeout"]),
        standing=standing(),
        raw=raw,
    )


def _seconds(value: str | None) -> float | None:
    found = opt.real("--timeout", value)
    if found is not None and found <= 0:
        raise UsageError(f"--timeout {value}: expected a positive number")
    return found


def _data_only(raw: dict[str, Any], columns: dict[str, str]) -> None:
    """Options about data are a mistake without data."""
    if raw["data"] is not None:
        return
    given = [f"--{role}-column" for role in columns]
    names = ("config", "split", "on_long", *(() if raw.get("text") is not None else ("max_length",)))
    given += [f"--{name.replace('_', '-')}" for name in names if raw[name]]
    if given:
        raise UsageError(f"{given[0]} is about data, and there is none", hint="give --data FILE")
