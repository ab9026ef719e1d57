"""The command line: the app, and the boundary where every error becomes one line on stderr and an exit code.

Nothing heavy is imported here: `headscope --help` needs neither torch nor pandas.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import warnings
from types import TracebackType

import typer

from headscope.cli import env, evaluate, explain, inspect, prune, similarity
from headscope.errors import HeadscopeError, Stopped, nearest
from headscope.interrupt import SUPERVISOR, Terminated, answer_at_once, speaks

app = typer.Typer(
    name="headscope",
    help="Look at the attention heads of pretrained transformers: which matter, which say the same, which can go.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("inspect")(inspect.inspect)
app.command("similarity")(similarity.similarity)
app.command("prune")(prune.prune)
app.command("evaluate")(evaluate.evaluate)
app.command("explain")(explain.explain)
app.command("env")(env.env)

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # the class that Typer raises for every misuse


_LONGEST_HINT = 4000
"""Characters: a hint may list all columns, or hold a path to be copied."""


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"headscope {installed('headscope')}")
        raise typer.Exit


def main() -> None:
    """Run the command line and exit with its code: 0, 1, 2, 3, 130 or 143; 141 where the reader of stdout has gone."""
    answer_at_once()
    _prepare()
    try:
        code = _run()
        answer_at_once()  # nothing is left to be undone, and Python takes a while to leave
        sys.exit(code)
    finally:
        if os.environ.get("HEADSCOPE_DEBUG") != "1":
            sys.excepthook = _bug  # Typer has put its own there meanwhile


def _run() -> int:
    try:
        code = int(app(standalone_mode=False) or 0)
        if code == 130:  # what Typer makes of Ctrl-C, in silence
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code
    except HeadscopeError as error:
        if os.environ.get("HEADSCOPE_DEBUG") == "1" and not isinstance(error, Stopped):
            raise
        return _fail(str(error), error.hint, error.exit_code, lost=getattr(error, "rank", None))
    except _UsageError as error:
        return _misuse(error)
    except (KeyboardInterrupt, typer.Abort):
        _leave_stdout()
        return 130 if _supervised() else _fail("interrupted", None, 130)
    except Terminated:
        _leave_stdout()
        return 143 if _supervised() else _fail("terminated", None, 143)
    except BrokenPipeError:
        _leave_stdout()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        _leave_stdout()  # a report that is written says so itself: this is what `print` and Typer wrote
        return _fail(f"cannot write to standard output: {error.strerror}", None, 1)
    except (MemoryError, RuntimeError) as error:
        from headscope.memory import exhausted, ran_out

        if os.environ.get("HEADSCOPE_DEBUG") == "1" or not ran_out(error):
            raise
        os.environ.pop("WORLD_SIZE", None)  # the others see only that this rank has gone
        told = exhausted()
        return _fail(str(told), told.hint, told.exit_code)


def _leave_stdout() -> None:
    """What is still buffered has no reader either: let it go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _misuse(error: Exception) -> int:
    """One line for wrong use of the command line, with the nearest name for a misspelt one."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error, file=sys.stderr)  # noqa: T201  the help text that Typer made
        return 2
    message, hint = error.format_message(), None  # type: ignore[attr-defined]
    known = getattr(error, "possibilities", None)
    if "No such option" in message:
        message = message.partition(" (Possible")[0]
        folder = next((word for word in sys.argv[1:] if word.startswith("-") and os.path.exists(word)), None)
        if folder is not None:
            return _fail(message, f"for the folder {folder!r} write ./{folder}", 2)
    if known:
        hint = nearest(str(getattr(error, "option_name", "")), sorted(known))
    elif "No such command" in message and context is not None:
        hint = nearest(message.split("'")[1], context.command.list_commands(context))
        message = message.partition(". ")[0].rstrip(".")
    elif context is not None:
        hint = f"{context.command_path} --help"
    return _fail(message.rstrip(".").partition(" Did you mean")[0].rstrip(". "), hint, 2)


def _supervised() -> bool:
    """Whether the process that started this one says how the run ended."""
    return SUPERVISOR in os.environ


def _fail(message: str, hint: str | None, code: int, *, lost: int | None = None) -> int:
    """Say what went wrong: of several processes rank 0 does, for what went wrong in any; where it is `lost`, rank 1."""
    from headscope.reports._cells import safe_line

    if not speaks() and not (os.environ.get("RANK") == "1" and lost == 0):
        return code
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {safe_line(message)}", file=sys.stderr)  # noqa: T201
        if hint:
            print(f"hint: {safe_line(hint, _LONGEST_HINT)}", file=sys.stderr)  # noqa: T201
    return code


def _prepare() -> None:
    """Quiet libraries, one line instead of a traceback for bugs, UTF-8 whatever the locale."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else every rank that outlives another prints a backtrace
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if os.environ.get("HEADSCOPE_DEBUG") != "1":
        warnings.simplefilter("ignore")
        sys.excepthook = _bug


def _bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    first = str(error).strip().split("\n")[0]
    os.environ.pop("WORLD_SIZE", None)  # each rank tells a fault of its own
    _fail(
        f"headscope failed unexpectedly: {kind.__name__}: {first}",
        "HEADSCOPE_DEBUG=1 shows where; please report it with the output of `headscope env`",
        1,
    )
