"""Made-up time series: past and future values, with the features of their times."""

from __future__ import annotations

from typing import Any

import torch

from headscope.made_up._asked import BATCH, Asked, size


def made(asked: Asked) -> dict[str, Any]:
    """The series that a model asks for; nothing where it asks for none."""
    if not asked.takes("past_values"):
        return {}
    config = asked.config
    lags: list[int] = getattr(config, "lags_sequence", None) or [0]
    length = int(size(config, ("context_length",), 32)) + max(lags)
    many = int(size(config, ("num_input_channels", "input_size"), 1))
    wide = (many,) if many > 1 or hasattr(config, "num_input_channels") else ()
    found: dict[str, Any] = {"past_values": asked.draw(BATCH, length, *wide)}
    if asked.takes("past_observed_mask"):
        found["past_observed_mask"] = torch.ones(BATCH, length, *wide)
    if asked.takes("past_values_padding"):
        found["past_values_padding"] = torch.zeros(BATCH, length)
    if asked.takes("freq"):
        found["freq"] = torch.zeros(BATCH, 1, dtype=torch.long)
    if asked.takes("past_time_features"):
        future = int(config.prediction_length)
        features = int(config.num_time_features)
        found["past_time_features"] = asked.draw(BATCH, length, features)
        found["future_values"] = asked.draw(BATCH, future, *wide)
        found["future_time_features"] = asked.draw(BATCH, future, features)
    return found
