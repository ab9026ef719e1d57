"""Which column of the rows plays which role of a task: the one that the user names, else the one with a known name."""

from __future__ import annotations

import re

from headscope.errors import UsageError, nearest
from headscope.rows import Rows
from headscope.unpack import printable

TEXT = (
    *("text", "sentence", "review", "source", "content", "document", "premise", "question1", "sentence1", "text1"),
    *("sentence_1", "text_1", "texta", "text_a", "review_body", "review_text", "article", "body", "passage", "message"),
    *("comment", "tweet", "utterance", "query", "prompt", "input", "inputs", "src"),
)
PAIR = (
    *("pair", "text_pair", "sentence2", "hypothesis", "question2", "text2", "sentence_2", "text_2", "textb", "text_b"),
    *("second_sentence", "second_text"),
)
LABEL = (
    *("label", "labels", "target", "class", "category", "sentiment", "gold_label", "intent", "emotion", "score"),
    *("ner_tags", "pos_tags", "chunk_tags", "tags", "ner", "pos"),
)
TARGET = (
    *("target", "targets", "summary", "highlights", "translation", "completion", "response", "output", "reference"),
    *("transcription", "transcript", "tgt", "text_target"),
)
IMAGE = ("image", "img", "picture", "photo", "image_path", "image_file", "pixel_values")
AUDIO = ("audio", "speech", "sound", "audio_path", "audio_file", "wav")
CONTEXT = ("context", "passage", "paragraph", "document", "article")
QUESTION = ("question", "query")
ANSWER = ("answers", "answer", "answer_text")
TOKENS = ("tokens", "words", "token")

KNOWN = {
    "text": TEXT,
    "pair": PAIR,
    "label": LABEL,
    "target": TARGET,
    "image": IMAGE,
    "audio": AUDIO,
    "context": CONTEXT,
    "question": QUESTION,
    "answer": ANSWER,
    "tokens": TOKENS,
}
OPTIONS = {role: f"--{role}-column" for role in KNOWN} | {"question": "--text-column", "tokens": "--text-column"}
"""The option that names the column of a role; a question and tokens are the text of their task."""

VERBATIM = frozenset({*TEXT, *PAIR, *CONTEXT, *QUESTION, *ANSWER, *TOKENS})
"""Lower-case names of columns that hold text, even where all of it looks like numbers."""

PIXEL = re.compile(r"(p|pixel|pixel_)(0|[1-9][0-9]*)", re.ASCII | re.IGNORECASE)


def find_column(rows: Rows, role: str, wanted: str | None, *, required: bool) -> str | None:
    """The column of a role: `wanted`, else the only one with a known name, else a lone column for the text, else None.

    Raises:
        UsageError: no such column, none that is known though `required`, or more than one.
    """
    option = OPTIONS[role]
    listing = "known: " + ", ".join(map(printable, rows.columns))
    if wanted is not None:
        if wanted not in rows.columns:
            hint = nearest(wanted, map(printable, rows.columns))
            raise UsageError(f"{option} {wanted!r}: no such column in {printable(rows.name)}", hint=hint)
        return wanted
    by_name = [column for known in KNOWN[role] for column in rows.columns if column.lower() == known]
    if len(by_name) > 1:
        names = " and ".join(map(repr, by_name))
        raise UsageError(
            f"{names} could each be the {role} column of {printable(rows.name)}", hint=f"name it with {option}"
        )
    if by_name:
        return by_name[0]
    if role == "text" and len(rows.columns) == 1:
        return rows.columns[0]
    if required:
        raise UsageError(f"no {role} column found in {printable(rows.name)}", hint=f"name it with {option}; {listing}")
    return None


def pixel_columns(rows: Rows) -> list[str] | None:
    """The columns p0 … pN-1 (or pixel0 …, pixel_0 …) in the order of their numbers, or None unless all are there."""
    families: dict[str, dict[int, str]] = {}
    for column in rows.columns:
        if match := PIXEL.fullmatch(column):
            families.setdefault(match[1].lower(), {})[int(match[2])] = column
    for columns in families.values():
        if sorted(columns) == list(range(len(columns))):
            return [columns[place] for place in range(len(columns))]
    return None
