"""How long a text may be by the positions that a model has."""

from __future__ import annotations

from transformers import PreTrainedModel


def most_positions(model: PreTrainedModel) -> int | None:
    """The number of positions the model has; RoBERTa's kin start counting behind the pad token."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")
    names += ("max_target_positions",)  # decoders behind an ear
    declared = next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
    if declared is None or declared <= 0 or config.model_type in ("t5", "mt5", "umt5", "longt5"):
        return None  # relative positions reach as far as the text
    for path, module in model.named_modules():
        if path.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return declared - int(module.padding_idx) - 1  # type: ignore[arg-type]
    return declared
