"""Checks of shapes are made once a signature, and refuse what they refused before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import shape_checks
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor


def defined(times: float) -> Callable[..., Tensor]:
    """A function of its own at each call, with the same signature."""

    @jaxtyped(typechecker=shape_checks.checked)
    def scaled(rows: Float[Tensor, "token channel"], weights: Float[Tensor, "token"]) -> Float[Tensor, "channel"]:
        return times * (weights @ rows) if times else weights

    return scaled


def test_checks_are_remembered_and_functions_are_not() -> None:
    rows, weights = torch.ones(3, 2), torch.ones(3)
    assert defined(1.0)(rows, weights).tolist() == [3.0, 3.0]
    known = len(shape_checks._KNOWN)
    again = defined(2.0)
    assert again(rows, weights).tolist() == [6.0, 6.0]
    assert len(shape_checks._KNOWN) == known
    with pytest.raises(TypeCheckError, match="parameters"):
        again(rows, torch.ones(2))
    with pytest.raises(TypeCheckError, match="return value"):
        defined(0.0)(rows, weights)


def test_what_has_defaults_is_not_kept() -> None:
    """They may hold a model, which tests watch being let go."""
    known = len(shape_checks._KNOWN)

    @jaxtyped(typechecker=shape_checks.checked)
    def summed(rows: Float[Tensor, "token channel"], start: object = torch.zeros(2)) -> Float[Tensor, "channel"]:  # noqa: B008
        return rows.sum(dim=0) + start

    assert summed(torch.ones(3, 2)).tolist() == [3.0, 3.0]
    with pytest.raises(TypeCheckError):
        summed(torch.ones(3))
    assert len(shape_checks._KNOWN) <= known + 1, "only the stub without its default"
