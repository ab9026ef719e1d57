"""Audio classification: one of several classes for a sound, given as a file, as bytes or as samples."""

from __future__ import annotations

from headscope.tasks import Task, logits
from headscope.tasks._sounds import encode

TASK = Task(
    auto_class="AutoModelForAudioClassification",
    mapping="MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    required=("audio",),
    optional=("label",),
    encode=encode,
    rows=logits,
    reads="sounds",
)
