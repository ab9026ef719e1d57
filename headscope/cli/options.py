"""Options that commands share, each a named type, so that it reads and behaves the same everywhere."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headscope import registry
from headscope.errors import UsageError, nearest

_MOST_DIGITS = 18
ON_LONG = ("chunk", "truncate", "error")
_FORMATS = ", ".join(registry.names("reports"))
_TASKS = ", ".join(registry.names("tasks"))

_DATA = "Data"
_MODEL = "Model"
_REPORT = "Report"
RESUME = ("auto", "never")

ModelArg = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, Hub id (owner/name) or GGUF file.")]
DataOpt = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="Data file (also .gz, .zst), folder of images or sounds, - for stdin, or Hub id.",
    ),
]
RevisionOpt = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a Hub model.")]
TrustOpt = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
PickleOpt = Annotated[bool, typer.Option("--allow-pickle", help="Read pickled weights where there are no safetensors.")]
ConfigOpt = Annotated[str | None, typer.Option("--config", help="Configuration of a Hub data set.")]
SplitOpt = Annotated[str | None, typer.Option("--split", help="Split of a Hub data set.")]
EncodingOpt = Annotated[str, typer.Option("--encoding", help="Encoding of text files.")]
SkipBadOpt = Annotated[bool, typer.Option("--skip-bad", help="Skip and count rows that cannot be used.")]
TextColumnOpt = Annotated[str | None, typer.Option("--text-column", help="Column of the text, question or words.")]
PairColumnOpt = Annotated[str | None, typer.Option("--pair-column", help="Column of the second text of a pair.")]
LabelColumnOpt = Annotated[str | None, typer.Option("--label-column", help="Column of the label or labels.")]
TargetColumnOpt = Annotated[str | None, typer.Option("--target-column", help="Column of the text to be produced.")]
ImageColumnOpt = Annotated[str | None, typer.Option("--image-column", help="Column of image files or bytes.")]
AudioColumnOpt = Annotated[str | None, typer.Option("--audio-column", help="Column of sound files or bytes.")]
ContextColumnOpt = Annotated[str | None, typer.Option("--context-column", help="Column of the text with the answer.")]
AnswerColumnOpt = Annotated[str | None, typer.Option("--answer-column", help="Column of the answer.")]
TaskOpt = Annotated[str, typer.Option("--task", help=f"auto, {_TASKS}.")]
LimitOpt = Annotated[
    str, typer.Option("--limit", metavar="N|all", help="Examples used, the first after a seeded shuffle.")
]
MaxLengthOpt = Annotated[
    str | None, typer.Option("--max-length", metavar="N", help="Longest text in tokens; default the model's limit.")
]
OnLongOpt = Annotated[
    str | None, typer.Option("--on-long", help="chunk, truncate or error; default chunk for causal-lm, else truncate.")
]
BatchSizeOpt = Annotated[
    str, typer.Option("--batch-size", metavar="N|auto", help="Examples at once; auto goes by tokens.")
]
DeviceOpt = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N, mps or balanced.")]
DtypeOpt = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16 or float64.")]
AttentionOpt = Annotated[str, typer.Option("--attn-implementation", help="auto, eager, sdpa, flash_attention_2, ...")]
FormatOpt = Annotated[str, typer.Option("--format", help=f"auto, {_FORMATS}; auto: table on a terminal, else csv.")]
OutputOpt = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the report here, format by suffix.")
]
ForceOpt = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
PlotOpt = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Picture of the report (.png or .svg).")]
SortOpt = Annotated[
    str | None, typer.Option("--sort", metavar="COLUMN", help="Order rows, largest first; -COLUMN smallest first.")
]
TopOpt = Annotated[str | None, typer.Option("--top", metavar="N", help="Only the first N rows.")]
ColumnsOpt = Annotated[str | None, typer.Option("--columns", metavar="A,B", help="Only these columns, in this order.")]
DryRunOpt = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done, for how long and in how much memory.")
]
SeedOpt = Annotated[int, typer.Option("--seed", help="Seed of shuffling, masking and drawing.")]
QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="No notes or summary on stderr.")]
VerboseOpt = Annotated[bool, typer.Option("--verbose", "-v", help="Also say what the numbers rest on.")]
NoProgressOpt = Annotated[bool, typer.Option("--no-progress", help="No progress bar.")]
ParseSpecialOpt = Annotated[
    bool, typer.Option("--parse-special", help="Read special-token strings in the data as tokens.")
]
ProcessesOpt = Annotated[
    str | None, typer.Option("--processes", metavar="N", help="Processes on this machine that share the data.")
]
WorkOpt = Annotated[Path | None, typer.Option("--work", metavar="DIR", help="Keep finished units here, to resume.")]
ResumeOpt = Annotated[str, typer.Option("--resume", help="auto: go on from the units in --work; never: start anew.")]
TimeoutOpt = Annotated[
    str | None,
    typer.Option("--timeout", metavar="S", help="Seconds without a step that a process may take; default 600."),
]


SHARED: dict[str, tuple[Any, Any]] = {
    "task": (TaskOpt, "auto"),
    "text_column": (TextColumnOpt, None),
    "pair_column": (PairColumnOpt, None),
    "label_column": (LabelColumnOpt, None),
    "target_column": (TargetColumnOpt, None),
    "image_column": (ImageColumnOpt, None),
    "audio_column": (AudioColumnOpt, None),
    "context_column": (ContextColumnOpt, None),
    "answer_column": (AnswerColumnOpt, None),
    "config": (ConfigOpt, None),
    "split": (SplitOpt, None),
    "encoding": (EncodingOpt, "utf-8"),
    "skip_bad": (SkipBadOpt, False),
    "limit": (LimitOpt, "512"),
    "max_length": (MaxLengthOpt, None),
    "on_long": (OnLongOpt, None),
    "batch_size": (BatchSizeOpt, "auto"),
    "parse_special": (ParseSpecialOpt, False),
    "revision": (RevisionOpt, None),
    "trust_remote_code": (TrustOpt, False),
    "allow_pickle": (PickleOpt, False),
    "device": (DeviceOpt, "auto"),
    "dtype": (DtypeOpt, "auto"),
    "attn_implementation": (AttentionOpt, "auto"),
    "processes": (ProcessesOpt, None),
    "work": (WorkOpt, None),
    "resume": (ResumeOpt, "auto"),
    "timeout": (TimeoutOpt, None),
    "format": (FormatOpt, "auto"),
    "output": (OutputOpt, None),
    "force": (ForceOpt, False),
    "plot": (PlotOpt, None),
    "sort": (SortOpt, None),
    "top": (TopOpt, None),
    "columns": (ColumnsOpt, None),
    "dry_run": (DryRunOpt, False),
    "seed": (SeedOpt, 0),
    "quiet": (QuietOpt, False),
    "verbose": (VerboseOpt, False),
    "no_progress": (NoProgressOpt, False),
}
"""The options on model, data and report of every command that runs a model, each with its default."""


def sharing(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the `SHARED` options behind its own; it takes them all together as its last argument, `shared`.

    Those named in `without` do not exist for it, and have the value of an option that was not given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
        added = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=option)
            for name, (option, default) in SHARED.items()
            if name not in without
        ]

        def run(**given: Any) -> None:
            values = {name: given.pop(name, default) for name, (_, default) in SHARED.items()}
            command(**given, shared=values)

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        return run

    return decorate


def positive(option: str, value: str | None, *, word: str | None = None) -> int | None:
    """A whole number from 1, or None for `word` (such as auto).

    Raises:
        UsageError: it is neither.
    """
    if value is None or value == word:
        return None
    if (number := _whole(value)) is not None and number > 0:
        return number
    wanted = "a positive whole number" + (f" or {word!r}" if word else "")
    raise UsageError(f"{option} {value}: expected {wanted}")


def natural(option: str, value: str) -> int:
    """A whole number from 0.

    Raises:
        UsageError: it is none.
    """
    if (number := _whole(value)) is not None:
        return number
    raise UsageError(f"{option} {value}: expected 0 or a positive whole number")


def _whole(value: str) -> int | None:
    """The number in plain digits; None where there is none, or one so large that nothing has so many."""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS else None


def real(option: str, value: str | None, *, wanted: str = "a number") -> float | None:
    """A number; `wanted` says of what kind in the error.

    Raises:
        UsageError: it is none, or infinite.
    """
    if value is None:
        return None
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"{option} {value}: expected {wanted}")
    return found


def one_of(option: str, value: str | None, known: tuple[str, ...]) -> str | None:
    """The value if it is one of the known ones.

    Raises:
        UsageError: it is not.
    """
    if value is not None and value not in known:
        raise UsageError(f"{option} {value}: no such choice", hint=nearest(value, known))
    return value


def listed(value: str | None) -> list[str] | None:
    """The parts of a comma list."""
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]
