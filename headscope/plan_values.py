"""Values of a plan's JSON, of unknown origin: each is what it should be, or one line says what it is instead."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from headscope.errors import InvalidPlan, nearest
from headscope.jsonfiles import kind, quote

_LONGEST_TEXT = 5000
_MOST = 2**63 - 1


def mapping(value: object, what: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise InvalidPlan(f"{what} must be a JSON object, not {shown(value)}")
    return value


def array(values: Mapping[str, Any], name: str) -> list[object]:
    """The JSON array under a name, empty where there is none."""
    value = values.get(name, [])
    if not isinstance(value, list):
        raise InvalidPlan(f'"{name}" must be a JSON array, not {shown(value)}')
    return value


def whole(values: Mapping[str, Any], name: str, default: int, *, least: int = -_MOST) -> int:
    """The whole number of at most 64 bits under a name."""
    value = values.get(name, default)
    if type(value) is not int or not least <= value <= _MOST:
        raise InvalidPlan(
            f'"{name}" must be a whole number{f" from {least} on" if least > 0 else ""}, not {shown(value)}'
        )
    return value


def finite(value: object, what: str) -> float:
    """A number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise InvalidPlan(f"{what} must be a finite number, not {shown(value)}")
    return float(value)


def text(values: Mapping[str, Any], name: str, default: str, known: Sequence[str] = ()) -> str:
    """The short printable text under a name, one of the `known` where there are any."""
    value = values.get(name, default)
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not value.isprintable():
        raise InvalidPlan(f'"{name}" must be a short text, not {shown(value)}')
    if known and value not in known:
        raise InvalidPlan(f'"{name}" is {quote(value)}', hint=nearest(value, known))
    return value


def shown(value: object) -> str:
    """A JSON value for a message: texts and numbers themselves, of others only what they are."""
    if isinstance(value, dict):
        return "an object"
    return quote(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else kind(value)
