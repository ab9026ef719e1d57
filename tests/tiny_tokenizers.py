"""Tiny tokenizers made on the spot, whose 53 tokens fit the zoo's models, and folders that hold a model with one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
"""Tokens 0 to 4: the zoo's padding, start and end come first."""
SIZE = 53
WORDS = [f"w{number}" for number in range(SIZE - len(SPECIAL))]

FORMS = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "bart": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"),
    "t5": ("$A [SEP]", "$A [SEP] $B [SEP]"),
    "llama": ("[CLS] $A", "[CLS] $A $B"),
    "gpt2": ("$A", "$A $B"),
}
"""Where special tokens go around a text and around a pair."""


def tokenizer(form: str = "bert", *, pieces: bool = False, pad: bool = True, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of the words w0 to w47; with `pieces` of character pairs instead, so that words have several tokens.

    Without `pad` it has no pad token. `options` are those of transformers, such as `padding_side`.
    """
    core = Tokenizer(_pairs() if pieces else models.WordLevel(_numbered([*SPECIAL, *WORDS]), unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    single, pair = FORMS[form]
    core.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")]
    )
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if form == "bert" else [])
    named = {"pad_token": "[PAD]"} if pad else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="[CLS]",
        cls_token="[CLS]",
        eos_token="[SEP]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        **{"model_input_names": names, **named, **options},
    )


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _pairs() -> models.BPE:
    """A word such as w12 becomes w1 and 2, and w7 stays whole."""
    letters = [*"w0123456789"]
    merges = [("w", digit) for digit in "0123456789"]
    return models.BPE(vocab=_numbered([*SPECIAL, *letters, *map("".join, merges)]), merges=merges, unk_token="[UNK]")


def save(folder: Path, model: PreTrainedModel, companion: Any = None) -> str:
    """Write a model, with a tokenizer or image processor beside it, as a checkpoint folder; returns its path."""
    model.save_pretrained(folder)
    if companion is not None:
        companion.save_pretrained(folder)
    return str(folder)


def write(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write rows as JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def texts(lengths: Sequence[int], seed: int = 0) -> list[str]:
    """Texts of as many random words as `lengths` says, no two alike."""
    draw = random.Random(seed)
    made = [" ".join(draw.choice(WORDS) for _ in range(length)) for length in lengths]
    assert len(set(made)) == len(made)
    return made
