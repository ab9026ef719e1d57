"""Losses of single predictions, and labels drawn from the model's own prediction; float32 or wider throughout."""

from __future__ import annotations

from enum import StrEnum

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor


class Distribution(StrEnum):
    """What a row of model outputs parametrises."""

    CATEGORICAL = "categorical"
    """Logits of a choice among classes or tokens."""
    GAUSSIAN = "gaussian"
    """The mean of a number with variance one half, whose negative log-likelihood is the squared error."""
    DIRECTION = "direction"
    """A point on the sphere (a normalised embedding): it has no loss, only a random direction to be pushed in."""


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or as it is if wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def losses(rows: Tensor, targets: Tensor, distribution: Distribution) -> Tensor:
    """The loss of each row, `[row]`, in nats (squared units for a Gaussian).

    `rows` is `[row class]`; `targets` is `[row]` (class numbers, or numbers), or `[row class]` directions.
    """
    if distribution is Distribution.CATEGORICAL:
        return F.cross_entropy(wide(rows), targets.long(), reduction="none")
    if distribution is Distribution.GAUSSIAN:
        return (wide(rows)[:, 0] - targets.to(wide(rows))) ** 2
    return (wide(rows) * targets).sum(dim=-1)


def choices(rows: Tensor, distribution: Distribution) -> Tensor:
    """What each row predicts, `[row]`: its likeliest class, or the number itself."""
    return wide(rows)[:, 0] if distribution is Distribution.GAUSSIAN else rows.argmax(dim=1)


def draw(rows: Tensor, noise: Tensor, distribution: Distribution) -> Tensor:
    """Targets drawn from the model's own prediction; `noise` comes from `uniforms` or `normals` for these rows."""
    if distribution is Distribution.CATEGORICAL:
        precise = torch.float32 if rows.device.type == "mps" else torch.float64
        chances = rows.detach().to(precise).softmax(dim=-1).cumsum(dim=-1)
        aim = noise.to(chances)[:, None] * chances[:, -1:]
        return torch.searchsorted(chances, aim, right=True)[:, 0].clamp_max(rows.shape[-1] - 1)
    if distribution is Distribution.GAUSSIAN:
        return wide(rows.detach())[:, 0] + noise.to(wide(rows)) * 0.5**0.5
    return noise.to(wide(rows))


def scores(rows: Tensor, noise: Tensor) -> Tensor:
    """Random directions for logits with the covariance `diag(p) − p pᵀ` of a drawn label's score, `[row class]`.

    `noise` is standard normal, `[row class]`. Their squared pull has the mean of that of drawn labels (the Fisher
    information), and varies much less where the prediction is nearly certain.
    """
    chance = wide(rows.detach()).softmax(dim=-1)
    spread = chance.sqrt() * noise.to(chance)
    return spread - chance * spread.sum(dim=-1, keepdim=True)


def uniforms(count: int, *, seed: int, example: int, draw: int) -> Tensor:
    """Numbers in [0, 1) that depend on seed, example and draw only, `[count]`, float64."""
    return torch.from_numpy(_stream(seed, example, draw).random(count))


def normals(shape: tuple[int, ...], *, seed: int, example: int, draw: int) -> Tensor:
    """Standard normal numbers that depend on seed, example and draw only, float64."""
    return torch.from_numpy(_stream(seed, example, draw).standard_normal(shape))


def _stream(seed: int, example: int, draw: int) -> numpy.random.Generator:
    """A counter-based generator: any example's numbers can be made without those of the others."""
    key = numpy.array([seed % 2**64, example], dtype=numpy.uint64)
    return numpy.random.Generator(numpy.random.Philox(key=key, counter=[0, 0, 0, draw]))
