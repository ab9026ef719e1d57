"""Image classification: one of several classes for an image, given as a file, as bytes or as pixel columns."""

from __future__ import annotations

from headscope.tasks import Task, logits
from headscope.tasks._images import encode

TASK = Task(
    auto_class="AutoModelForImageClassification",
    mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    required=("image",),
    optional=("label",),
    encode=encode,
    rows=logits,
    reads="images",
)
