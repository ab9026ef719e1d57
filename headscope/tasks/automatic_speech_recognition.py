"""Automatic speech recognition: each token of a transcript, given the sound and the tokens before it."""

from __future__ import annotations

from headscope.errors import DataError
from headscope.examples import Example
from headscope.tasks import Encoder, Row, Task, token_logits
from headscope.tasks._decoding import prepare
from headscope.tasks._sounds import hear


def encode(encoder: Encoder, row: Row, number: int) -> list[Example]:
    """One example; its targets are the transcript's tokens behind the decoder's start, as transformers trains them."""
    heard = hear(encoder, row)
    tokens, cut = encoder.cut(None, text_target=encoder.text(row, "target"))
    targets = tokens["input_ids"]
    if targets[0] == encoder.config.decoder_start_token_id:
        targets = targets[1:]
    if not targets:
        raise DataError("the transcript has no token")
    length = heard.length + len(targets)
    return [Example(number, heard.inputs, tuple(targets), length, truncated=heard.truncated or cut)]


TASK = Task(
    auto_class="AutoModelForSpeechSeq2Seq",
    mapping="MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    required=("audio", "target"),
    optional=(),
    encode=encode,
    rows=token_logits,
    vocabulary=True,
    reads="sounds",
    prepare=prepare,
)
