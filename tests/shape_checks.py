"""Checks of shapes that are run, by beartype, and made once for each signature.

jaxtyping wraps every function of a module, also one inside another, each time that the other runs, and asks for checks
of a stub which has that function's signature and nothing else of it. To make them takes longer than most hooks run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import beartype

_KNOWN: dict[tuple[object, ...], Callable[..., Any]] = {}


def checked(stub: Callable[..., Any]) -> Callable[..., Any]:
    """The stub with checks of its annotations; one with defaults, which would be kept alive, is not remembered."""
    code: Any = getattr(stub, "__code__", None)
    if code is None or stub.__defaults__ or stub.__kwdefaults__:
        return beartype(stub)
    count = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    key = (stub.__module__, stub.__qualname__, code.co_varnames, count, repr(stub.__annotations__))
    if key not in _KNOWN:  # annotations are names of the module: what reads the same is the same
        _KNOWN[key] = beartype(stub)
    return _KNOWN[key]
