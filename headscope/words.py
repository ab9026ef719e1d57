"""A model's tokens aligned to the words of a sentence, and the part of the model that reads them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.conllu import Sentence
from headscope.errors import ModelError
from headscope.models import LoadedModel
from headscope.offload import home
from headscope.tasks import Encoder


@dataclass(frozen=True)
class Aligned:
    """A sentence for the model: inputs of one example, and per token the word it belongs to (None: special)."""

    sentence: Sentence
    inputs: dict[str, Tensor]
    word: list[int | None]

    def unread(self, unknown: int | None) -> int:
        """How many words consist of unknown tokens only."""
        tokens = zip(self.word, self.inputs["input_ids"][0].tolist(), strict=True)
        read = {word for word, token in tokens if word is not None and token != unknown}
        return len({word for word in self.word if word is not None} - read)


class Aligner:
    """Turns words into the model's tokens, and runs the part of the model that reads the text."""

    def __init__(self, loaded: LoadedModel, *, parse_special: bool) -> None:
        self.tokenizer, name = loaded.tokenizer(), loaded.location.name
        if not getattr(self.tokenizer, "is_fast", False):
            raise ModelError(f"{name}: aligning words and tokens needs a fast tokenizer (tokenizer.json)")
        self.device = home(loaded.model)
        self.encoder = Encoder(loaded.model.config, self.tokenizer, parse_special=parse_special)
        self.body = _body(loaded.model)
        self.accepted = inspect.signature(self.body.forward).parameters
        self.spaced = self._runs_together()

    def align(self, sentence: Sentence) -> Aligned:
        """The tokens of a sentence's words; words are parted by spaces."""
        forms = [word.form for word in sentence.words]
        if self.spaced:
            forms = [forms[0], *(f" {form}" for form in forms[1:])]
        tokens = self.encoder.tokens(forms, is_split_into_words=True)
        words = self.encoder.encoded(forms, is_split_into_words=True, verbose=False).word_ids()
        known = {name: values for name, values in tokens.items() if name in ("input_ids", "attention_mask")}
        if "token_type_ids" in tokens and "token_type_ids" in self.accepted:
            known["token_type_ids"] = tokens["token_type_ids"]
        inputs = {name: torch.tensor([values], device=self.device) for name, values in known.items()}
        return Aligned(sentence, inputs, words)

    def run(self, aligned: Aligned) -> None:
        """Let the model read the sentence."""
        if aligned.word:
            self.body(**aligned.inputs, **({"use_cache": False} if "use_cache" in self.accepted else {}))

    def _runs_together(self) -> bool:
        """Whether the tokenizer reads given words as if no space stood between them, and a space in front mends it."""

        def ids(text: Any, **options: Any) -> list[int]:
            return self.encoder.tokens(text, **options)["input_ids"]

        apart = ids("a a")
        glued = ids(["a", "a"], is_split_into_words=True) != apart
        return glued and ids(["a", " a"], is_split_into_words=True) == apart


def _body(model: Any) -> nn.Module:
    """The model without its head; of a pair of stacks the encoder."""
    return model.get_encoder() if model.config.is_encoder_decoder else model.base_model
