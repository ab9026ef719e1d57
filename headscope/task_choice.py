"""Which task a checkpoint is measured on: the one asked for, or the one that its architecture was saved for."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from headscope import registry
from headscope.errors import ModelError, UsageError, nearest
from headscope.jsonfiles import quote
from headscope.tasks import Task


def choose_task(config: PreTrainedConfig, wanted: str) -> tuple[str, Task]:
    """The task that was asked for, or the one that the checkpoint's architecture was saved for.

    Raises:
        UsageError: no such task.
        ModelError: the architecture does a task that headscope cannot judge.
    """
    if wanted != "auto":
        if wanted not in registry.names("tasks"):
            raise UsageError(f"no task {wanted!r}", hint=nearest(wanted, ["auto", *registry.names("tasks")]))
        return wanted, registry.load("tasks", wanted, "TASK")
    from transformers.models.auto import modeling_auto

    architectures: Any = config.architectures or [""]
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"config.json: architectures is {quote(architectures)}, expected a list of class names")
    architecture = architectures[0]
    tasks = registry.load_all("tasks", "TASK")
    for name in sorted(tasks, key=lambda name: name != "seq2seq-lm"):  # BART's class also stands in the masked-lm table
        task = tasks[name]
        if architecture in _names(getattr(modeling_auto, task.mapping)):
            if name in ("regression", "text-classification"):
                name = "regression" if _predicts_number(config) else "text-classification"
            return name, registry.load("tasks", name, "TASK")
    if architecture and not architecture.endswith("Model"):
        raise ModelError(
            f"{architecture} does a task that headscope cannot judge",
            hint="--task embedding looks at the model without its head, --task NAME picks another head",
        )
    return "embedding", registry.load("tasks", "embedding", "TASK")


def _names(mapping: Any) -> set[str]:
    return {name for value in mapping.values() for name in ([value] if isinstance(value, str) else value)}


def _predicts_number(config: PreTrainedConfig) -> bool:
    return config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1)
