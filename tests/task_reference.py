"""Scores of the definitions by a loop over examples: no batches, no padding, gates as tensors, transformers' loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import zoo
from task_cases import Opened, Row
from torch import Tensor, nn

from headscope.examples import Example
from headscope.losses import normals, uniforms

IGNORED = -100


@dataclass(frozen=True)
class Alone:
    """What one example gives by itself: `gradients` are `[token head]` of each site, `squares` `[draw head]` over T."""

    loss: float
    gradients: dict[str, Tensor]
    squares: dict[str, Tensor]


def reference(opened: Opened, *, draws: int = 1, seed: int = 0) -> list[Alone]:
    """Every row of a case by itself, in file order."""
    return [_alone(opened, row, draws, seed) for row in opened.case.rows]


def means(found: list[Alone]) -> dict[str, dict[str, Tensor]]:
    """The columns as the definitions write them, by name and site."""
    columns: dict[str, dict[str, Tensor]] = {}
    for site in found[0].squares:
        columns.setdefault("sensitivity", {})[site] = torch.stack(
            [one.squares[site].mean(dim=0) for one in found]
        ).mean(0)
        if not found[0].gradients:
            continue
        whole = torch.stack([one.gradients[site].sum(dim=0) for one in found])
        token = torch.stack([one.gradients[site].abs().sum(dim=0) for one in found])
        importance = whole.abs().mean(dim=0)
        for name, value in {
            "importance": importance,
            "importance_se": whole.abs().std(dim=0) / len(found) ** 0.5,
            "importance_layer_norm": importance / importance.square().sum().sqrt(),
            "importance_token": token.mean(dim=0),
            "gradient_mean": whole.mean(dim=0),
            "fisher": whole.square().mean(dim=0),
        }.items():
            columns.setdefault(name, {})[site] = value
    for site, value in columns.get("gradient_mean", {}).items():
        columns.setdefault("effect", {})[site] = columns["sensitivity"][site] / 2 - value
    return columns


def item_of(opened: Opened, row: Row) -> Example:
    """The study's example made of a row, found by what the model reads."""
    assert opened.study.examples is not None
    inputs = opened.case.ask(opened.companion, row)
    name = next(name for name in ("pixel_values", "input_values", "input_features", "input_ids") if name in inputs)
    (found,) = [item for item in opened.study.examples.items if _same(_unhidden(item, name), inputs[name][0])]
    return found


def asked(opened: Opened, row: Row) -> dict[str, Any]:
    """The arguments of transformers' forward for a row; which tokens masked-lm hides is taken from the example."""
    arguments = opened.case.ask(opened.companion, row)
    if opened.case.task == "masked-lm":
        item = item_of(opened, row)
        arguments["input_ids"] = torch.tensor([item.inputs["input_ids"]])
        arguments["labels"] = torch.tensor([item.targets])
    if opened.case.task in ("seq2seq-lm", "automatic-speech-recognition"):
        # else transformers would feed the decoder the labels that it is asked for
        start = torch.tensor([[opened.model.config.decoder_start_token_id]])
        arguments["decoder_input_ids"] = torch.cat([start, arguments["labels"][:, :-1]], dim=1)
    if "pixel_values" in arguments:  # compared in `item_of`; rounded in float32 in the order of the processor
        arguments["pixel_values"] = item_of(opened, row).inputs["pixel_values"][None].double()
    return arguments


def _unhidden(item: Example, name: str) -> Any:
    values = item.inputs[name]
    if len(item.targets) != len(values) or 4 not in values:  # 4 is the mask token
        return values
    return [token if target == IGNORED else target for token, target in zip(values, item.targets, strict=True)]


def _same(values: Any, wanted: Tensor) -> bool:
    values = torch.as_tensor(values)
    return values.shape == wanted.shape and bool(torch.allclose(values.double(), wanted.double(), atol=1e-4))


def _alone(opened: Opened, row: Row, draws: int, seed: int) -> Alone:
    model, arguments = opened.model, asked(opened, row)
    number = item_of(opened, row).number
    heads = {site: zoo.at(opened.case.recipe.n_heads, site.rpartition(".")[0]) for site in opened.case.paths()}
    squares: dict[str, list[Tensor]] = {site: [] for site in heads}
    loss, gradients = float("nan"), {}
    with _gates(model, opened.case.paths(), heads) as gates:
        output = model(**arguments)
        if opened.case.task != "embedding":
            loss = float(output.loss.detach())
            gradients = dict(zip(gates, torch.autograd.grad(output.loss, list(gates.values())), strict=True))
        for draw in range(draws):
            with torch.no_grad():
                output = model(**arguments)
            total, positions = _drawn_loss(opened, arguments, output, number=number, draw=draw, seed=seed)
            for site, gradient in zip(gates, torch.autograd.grad(total, list(gates.values())), strict=True):
                squares[site].append(gradient.sum(dim=0).square() / positions)
    return Alone(loss, gradients, {site: torch.stack(values) for site, values in squares.items()})


@contextlib.contextmanager
def _gates(model: nn.Module, paths: dict[str, str], heads: dict[str, int]) -> Iterator[dict[str, Tensor]]:
    """Multiply each head at each token by a gate of 1; a forward pass makes new gates, `[token head]`."""
    gates: dict[str, Tensor] = {}
    handles = []
    for site, path in paths.items():

        def scale(module: nn.Module, args: tuple[Tensor, ...], site: str = site) -> tuple[Tensor, ...]:
            gates[site] = torch.ones(args[0].shape[1], heads[site], dtype=torch.float64, requires_grad=True)
            split = args[0].unflatten(-1, (heads[site], -1))
            return ((split * gates[site][None, :, :, None]).flatten(-2),)

        handles.append(model.get_submodule(path).register_forward_pre_hook(scale))
    try:
        yield gates
    finally:
        for handle in handles:
            handle.remove()


def _drawn_loss(
    opened: Opened, arguments: dict[str, Any], output: Any, *, number: int, draw: int, seed: int
) -> tuple[Tensor, int]:
    """The summed loss of labels drawn from the prediction, and how many were drawn."""
    model, task = opened.model, opened.case.task
    key = {"seed": seed, "example": number, "draw": draw}
    if task == "embedding":
        (direction,) = normals((1, output.last_hidden_state.shape[-1]), **key)
        pooled = model(**arguments).last_hidden_state[0].mean(dim=0)
        return direction @ (pooled / pooled.square().sum().sqrt()), 1
    if task == "regression":
        drawn = output.logits[0].detach() + normals((1,), **key) / 2**0.5
        return model(**arguments | {"labels": drawn}).loss, 1
    if task == "question-answering":
        noise = uniforms(2, **key)
        start, end = _pick(output.start_logits[0], noise[0]), _pick(output.end_logits[0], noise[1])
        places = {"start_positions": torch.tensor([start]), "end_positions": torch.tensor([end])}
        return 2 * model(**arguments | places).loss, 2
    labels = arguments["labels"].clone()
    if labels.is_floating_point():  # several yes/no labels: yes where the noise passes the chance of no
        drawn = uniforms(labels.shape[1], **key) >= 1 - output.logits[0].sigmoid()
        return labels.numel() * model(**arguments | {"labels": drawn.double()[None]}).loss, labels.numel()
    logits = output.logits[0]
    if labels.dim() == 1:
        labels, places = labels[None], [0]
        logits = logits[None]
    elif task == "causal-lm":
        places = list(range(1, labels.shape[1]))
        logits = logits[:-1]
    else:
        places = [place for place in range(labels.shape[1]) if int(labels[0, place]) != IGNORED]
        logits = logits[places]
    noise = uniforms(len(places), **key)
    labels = labels.clone()
    labels[0, places] = torch.tensor([_pick(row, one) for row, one in zip(logits, noise, strict=True)])
    labels = labels if arguments["labels"].dim() == 2 else labels[0]
    return len(places) * model(**arguments | {"labels": labels}).loss, len(places)


def _pick(logits: Tensor, noise: Tensor) -> int:
    """The class whose stretch of [0, 1), in class order, holds the noise."""
    edge = 0.0
    for place, chance in enumerate(logits.softmax(dim=-1).tolist()):
        edge += chance
        if float(noise) < edge:
            return place
    return len(logits) - 1
