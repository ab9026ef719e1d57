"""The language-model head in pieces: the body's last hidden states once, then logits for a few tokens at a time.

A `[batch token vocabulary]` tensor is the largest thing that most language models ever make, and scores need it only
row by row. The model's own code computes every row: its body is replaced by what it has already returned, so scales,
soft caps, transforms and biases around the head come out as the model has them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.heads import Site


class _Reached(BaseException):
    """The head is about to run: the body is done."""


class VocabularyHead:
    """Splits a language model in front of its head; `body_parts` are what runs before it, outermost modules only."""

    def __init__(self, container: nn.Module, head: nn.Module, body_parts: Sequence[nn.Module]) -> None:
        self.container, self.head, self.body_parts = container, head, body_parts
        self._outputs: list[tuple[nn.Module, Any]] = []
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def body(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Run the model up to its head and return the last hidden states, `[batch token d_model]`, with their graph."""
        self._outputs.clear()
        with contextlib.ExitStack() as stack:
            stack.callback(self.head.register_forward_pre_hook(self._stop).remove)
            for part in self.body_parts:
                stack.callback(part.register_forward_hook(self._remember).remove)
            stack.callback(self.container.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            with contextlib.suppress(_Reached):
                model(**inputs)
        return _hidden(self._outputs[-1][1])

    def logits(self, rows: Tensor) -> Tensor:
        """Logits `[row vocabulary]` of hidden states `[row d_model]`, by the model's own code after its body."""
        args, kwargs = self._call
        last = len(self._outputs) - 1
        with contextlib.ExitStack() as stack:
            for index, (child, output) in enumerate(self._outputs):
                answer = _with_hidden(output, rows.unsqueeze(0)) if index == last else output
                stack.enter_context(answering(child, answer))
            result = self.container(*args, **kwargs)
        return _first(result)[0]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = (args, kwargs)
        self._outputs.clear()

    def _remember(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._outputs.append((module, output))

    def _stop(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        raise _Reached


def split(model: PreTrainedModel, sites: Sequence[Site], inputs: dict[str, Any]) -> VocabularyHead | None:
    """The model's head if it can be run apart from the body; proved on `inputs`, None where it cannot.

    The proof: logits made in pieces equal those of a whole forward pass.
    """
    embeddings = model.get_output_embeddings()
    path = next((name for name, module in model.named_modules() if module is embeddings), "")
    if embeddings is None or not path:
        return None
    container, head = _find(model, path, sites)
    if container is None or head is None:
        return None
    with torch.no_grad():
        whole, ran = _whole(model, container, inputs)
        candidate = VocabularyHead(container, head, list(_outermost(container, head, ran)))
        try:
            hidden = candidate.body(model, inputs)
            pieces = candidate.logits(hidden.flatten(0, 1)).view(whole.shape)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
            return None  # a tail that needs more than hidden states: the caller runs it whole
    tolerance = 64 * torch.finfo(whole.dtype).eps * float(whole.abs().max())
    return candidate if bool((whole - pieces).abs().max() <= tolerance) else None


def _find(model: nn.Module, path: str, sites: Sequence[Site]) -> tuple[nn.Module | None, nn.Module | None]:
    """The module that holds body and head side by side, and the child on the way to the head."""
    container, prefix = model, ""
    for part in path.split("."):
        child = getattr(container, part)
        prefix = f"{prefix}{part}."
        if not any(site.module.startswith(prefix) for site in sites):
            return container, child
        container = child
    return None, None


def _whole(model: nn.Module, container: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, set[nn.Module]]:
    """The logits of a whole forward pass, and the modules inside the container that ran."""
    ran: set[nn.Module] = set()
    with contextlib.ExitStack() as stack:
        for module in container.modules():
            stack.callback(module.register_forward_pre_hook(lambda module, args: ran.add(module)).remove)
        return _first(model(**inputs)), ran


def _outermost(module: nn.Module, head: nn.Module, ran: set[nn.Module]) -> Iterator[nn.Module]:
    """What ran inside a module, without the head: children, or where the code reaches through a child, theirs."""
    for child in module.children():
        if child is head:
            continue
        if child in ran:
            yield child
        else:
            yield from _outermost(child, head, ran)


@contextlib.contextmanager
def answering(module: nn.Module, answer: Any) -> Iterator[None]:
    """Let a module return a prepared answer in the block; a `forward` set on the instance before is put back."""
    before = module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: answer  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.forward = before


def _first(output: Any) -> Tensor:
    """A model's logits, or else its first output."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output[0]


def _hidden(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """The same output with other last hidden states."""
    if isinstance(output, Tensor):
        return hidden
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    changed = copy.copy(output)
    changed[next(iter(output.keys()))] = hidden
    return changed
