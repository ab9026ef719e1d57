"""Why transformers could not load something, in one line; and transformers kept quiet meanwhile."""

from __future__ import annotations

import contextlib
import difflib
import io
import pickle
import re
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging

from headscope.errors import ModelError
from headscope.foreign import RAISED, NoBareErrors, first_line, hushed
from headscope.headers import read_config
from headscope.jsonfiles import quote
from headscope.location import Location

__all__ = ["PACKED", "RAISED", "NoBareErrors", "configuration_error", "first_line", "no_bars", "quiet", "reason"]

PACKED = "dequantise it first: load it with its own library and save it in bfloat16"
"""What to do about weights that are packed."""


def configuration_error(location: Location, error: BaseException) -> ModelError:
    """Why a configuration cannot be used: code of its own, a type that transformers lacks, or a field."""
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{location.name}: this model needs code that comes with it",
            hint="read that code, then pass --trust-remote-code to run it",
        )
    if not location.gguf:
        from transformers import CONFIG_MAPPING

        model_type = read_config(location.folder).get("model_type")
        known = sorted(map(str, CONFIG_MAPPING.keys()))
        if not isinstance(model_type, str) or model_type not in known:
            what = "no model_type" if model_type is None else f"the unknown model_type {quote(model_type)}"
            close = difflib.get_close_matches(model_type, known, n=3) if isinstance(model_type, str) else []
            near = f"near it: {', '.join(close)}; " if close else ""
            hint = f"{near}known: the {len(known)} types of transformers, such as bert, gpt2, llama, t5, vit, whisper"
            return ModelError(f"{location.name}: config.json has {what}", hint=hint)
    return ModelError(f"{location.name}: its configuration cannot be used: {first_line(error)}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what transformers and what is below it print off both streams: what matters becomes a note or an error."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with hushed():
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def no_bars(location: Location) -> contextlib.AbstractContextManager[object]:
    """The conversion of GGUF files draws a bar that transformers' switch does not reach."""
    return contextlib.redirect_stderr(io.StringIO()) if location.gguf else contextlib.nullcontext()


def reason(error: BaseException) -> str:
    """Why weights could not be loaded: other shapes, a pickle with more than tensors, or what transformers says."""
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it names {quote(found[1])}" if found else "it is no plain one"
        return f"its pickle is refused, since only tensors may be in it: {what}"
    if "ignore_mismatched_sizes" in str(error) or "size mismatch" in str(error):
        return "its weights have other shapes than config.json says (`headscope inspect MODEL --check` names them)"
    return first_line(error)
