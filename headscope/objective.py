"""The objective runs a model on a batch and pulls the loss of each example back to every head's gate.

One forward pass serves the task's loss and any number of drawn labels, each with a backward pass of its own. The batch
loss is the sum of the examples' losses, so examples do not mix and the batch size changes nothing but rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.capture import Watch, gate
from headscope.checkpointed import layerwise, offloaded_layers
from headscope.errors import DataError
from headscope.examples import Batch, sent
from headscope.heads import Site, SiteId
from headscope.inputs import probe_inputs
from headscope.losses import Distribution, choices, draw, losses, normals, scores, uniforms, wide
from headscope.offload import home
from headscope.outcomes import Outcome, Wanted
from headscope.tasks import Task
from headscope.vocabulary import VocabularyHead, split

CHUNK_VALUES = 2**23
"""Logits held at once, as numbers: 32 MiB in float32."""
SMOOTH_CLASSES = 1024
"""With more classes than this, labels are drawn even where random scores would do: those take a number a class."""


@dataclass(frozen=True)
class Said:
    """What a model said on one batch: the `loss` of each example, `[example]`; of each predicted position, in row
    order, the loss `lost` and, if asked for, the class or number that was predicted, `[row]` each; on the host.
    """

    loss: Tensor
    lost: Tensor
    predicted: Tensor | None = None


Distance = Callable[[Tensor, Tensor], Tensor]
"""How far predictions are from the first ones, `[row]` in float64, both `[row class]`; it must have a gradient."""


@dataclass(frozen=True)
class Apart:
    """How far gates move what a model says: `distance` `[example]`, and its gradient towards each example's gates,
    `[example head]` of each site; in float64 on the host.
    """

    distance: Tensor
    pulls: dict[SiteId, Tensor]


@dataclass
class _Rows:
    """Predicted positions as rows: their states (with the graph below), example, target and noise of each draw.

    `positions` counts those of a row's example: an example's loss is the mean over its positions. `example` is on the
    host, where losses are summed; nothing here is asked of a GPU, so that the host never waits inside a batch.
    """

    states: Tensor
    example: Tensor
    targets: Tensor
    positions: Tensor
    finish: Callable[[Tensor], Tensor]
    noise: list[Tensor]


class Objective:
    """A model with its task, ready to be run on batches."""

    def __init__(self, model: PreTrainedModel, task: Task, sites: Sequence[Site]) -> None:
        self.model, self.task, self.sites = model, task, sites
        self._home, self._layers = home(model), offloaded_layers(model, sites)
        self.head: VocabularyHead | None = None
        self.on_inputs: Callable[[dict[str, Any], Batch], None] | None = None
        if task.vocabulary:
            self.head = split(model, sites, probe_inputs(model))

    def forward(self, batch: Batch) -> Tensor:
        """Run the model for its predictions only: outputs of the predicted positions, `[row class]`, in row order."""
        rows = self._rows(batch, Wanted())
        return torch.cat([rows.finish(rows.states[part]) for part in self._parts(rows)])

    def body(self, batch: Batch) -> None:
        """Run the model for those who watch it; a vocabulary head that can be run apart is left out."""
        with torch.no_grad():
            self._rows(batch, Wanted())

    def losses(self, batch: Batch) -> Tensor:
        """The loss of each example without gradients, `[example]` in float64; empty without labels.

        Raises:
            DataError: a loss is not finite.
        """
        with torch.no_grad():
            rows = self._rows(batch, Wanted())
            lost, _ = self._pull(rows, batch, Wanted())
        return self._summed(rows, lost, batch)

    def say(
        self, batch: Batch, during: AbstractContextManager[Any] | None = None, *, predictions: bool = False
    ) -> Said:
        """What the model says on a labelled batch, without gradients; `during` is entered only while its body runs.

        Raises:
            DataError: a loss is not finite.
        """
        kind = self.task.distribution
        with torch.no_grad():
            with during or nullcontext():
                rows = self._rows(batch, Wanted())
            lost, predicted = [], []
            for part in self._parts(rows):
                outputs = rows.finish(rows.states[part])
                lost.append(losses(outputs, rows.targets[part], kind))
                if predictions:
                    predicted.append(choices(outputs, kind))
        each = torch.cat(lost).cpu().double()
        loss = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, rows.example, each) / batch.positions
        self._require_finite(batch, torch.isfinite(loss), "the loss")
        return Said(loss, each, torch.cat(predicted).cpu() if predictions else None)

    def run(self, batch: Batch, seen: Watch, wanted: Wanted) -> Outcome:
        """Run a batch under `watch` and make the backward passes that are wanted.

        Raises:
            DataError: a loss or a gradient is not finite.
        """
        seen.batch = len(batch)
        with torch.set_grad_enabled(bool(wanted.gradient or wanted.draws)):
            rows = self._rows(batch, wanted)
            lost, pulls = self._pull(rows, batch, wanted)
            outcome = Outcome(torch.zeros(0))
            for index, pull in enumerate(pulls):
                rows.states.backward(pull, retain_graph=index + 1 < len(pulls))
                self._collect(outcome, seen, own=wanted.gradient and index == 0)
        finite = [values.isfinite().flatten(1).all(dim=1) for values in outcome.gate.values()]
        finite += [values.isfinite().all(dim=-1).all(dim=0) for values in outcome.sampled.values()]
        outcome.loss = self._summed(rows, lost, batch)  # here the host waits for a GPU
        if finite:
            every = torch.stack([one.to(finite[0].device) for one in finite]).all(dim=0)
            self._require_finite(batch, every.cpu(), "a gradient")
        return outcome

    def apart(self, batch: Batch, gates: Mapping[SiteId, Tensor], distance: Distance) -> Apart:
        """Run a batch as it is and with gates, `[example head]` of each site; the distance is a mean over positions.

        Weights get no gradient, whether or not they ask for one.

        Raises:
            DataError: a distance or a gradient is not finite.
        """
        wide = torch.promote_types(self.model.dtype, torch.float32)
        leaves = [gates[site.id].to(wide).to(self._home).requires_grad_(True) for site in self.sites]
        placed = {site.id: leaf[:, None, :, None] for site, leaf in zip(self.sites, leaves, strict=True)}
        with torch.no_grad():
            whole = self._rows(batch, Wanted())
        with gate(self.model, placed, self.sites):  # until the gradient is through: layers may run again for it
            with torch.enable_grad():
                rows = self._rows(batch, Wanted())
            return self._apart(batch, whole, rows, leaves, distance)

    def _apart(self, batch: Batch, whole: _Rows, rows: _Rows, leaves: Sequence[Tensor], distance: Distance) -> Apart:
        narrow = self._home.type == "mps"  # which has no float64
        total = torch.zeros(len(batch), dtype=torch.float64)
        pull = torch.zeros_like(rows.states)
        for part in self._parts(rows):
            with torch.no_grad():
                first = whole.finish(whole.states[part])
            states = rows.states[part].detach().requires_grad_(True)
            with torch.enable_grad():
                outputs = rows.finish(states)
                each = distance(first.cpu(), outputs.cpu()) if narrow else distance(first, outputs)
            each = each / rows.positions[part].to(each.device)
            total.index_add_(0, rows.example[part], each.detach().cpu())
            (pull[part],) = torch.autograd.grad(each.sum(), states)
        self._require_finite(batch, total.isfinite(), "the divergence")
        found = torch.autograd.grad(rows.states, leaves, pull, allow_unused=True, materialize_grads=True)
        pulls = {site.id: one.cpu().double() for site, one in zip(self.sites, found, strict=True)}
        finite = torch.stack([one.isfinite().all(dim=1) for one in pulls.values()])
        self._require_finite(batch, finite.all(dim=0), "a gradient")
        return Apart(total, pulls)

    def _collect(self, outcome: Outcome, seen: Watch, *, own: bool) -> None:
        for site in self.sites:
            found = seen.records[site.id].gate_gradient
            if found is None:
                found = torch.zeros(seen.batch, 1, site.n_heads, device=self._home)  # no loss depends on it
            if own:
                outcome.gate[site.id] = found
            else:
                one = found.double().sum(dim=1) if found.device.type != "mps" else found.sum(dim=1)
                before = outcome.sampled.get(site.id)
                outcome.sampled[site.id] = one[None] if before is None else torch.cat([before, one[None]])

    def _rows(self, batch: Batch, wanted: Wanted) -> _Rows:
        placed = batch.to(self._home, self.model.dtype)
        inputs = model_inputs(self.model, self.task, placed)
        if self.on_inputs is not None:
            self.on_inputs(inputs, placed)
        with layerwise(self._layers):
            if self.head is not None:
                shown, finish = self.head.body(self.model, inputs), self.head.logits
            else:
                shown, finish = self.task.rows(self.model(**inputs), placed), torch.nn.Identity()
        assert shown.shape[:2] == batch.targets.shape
        example, position = batch.predicted.nonzero(as_tuple=True)
        states = shown[sent(example, shown.device), sent(position, shown.device)]
        targets, positions = batch.targets[example, position], batch.positions[example]
        noise = [self._noise(batch, states, index, wanted) for index in range(wanted.draws)]
        return _Rows(states, example, sent(targets, shown.device), sent(positions, shown.device), finish, noise)

    def _noise(self, batch: Batch, states: Tensor, index: int, wanted: Wanted) -> Tensor:
        """Numbers keyed by seed, example and draw, so that batching changes nothing; one per row, in row order."""
        kind, seed = self.task.distribution, wanted.seed
        classes = states.shape[-1] if self.head is None else int(self.model.config.get_text_config().vocab_size)
        parts: list[Tensor] = []
        for number, count in zip(batch.numbers, batch.positions.tolist(), strict=True):
            if kind is Distribution.CATEGORICAL and wanted.smooth and classes <= SMOOTH_CLASSES:
                parts.append(normals((count, classes), seed=seed, example=number, draw=index))
            elif kind is Distribution.CATEGORICAL:
                parts.append(uniforms(count, seed=seed, example=number, draw=index))
            else:
                shape = (count,) if kind is Distribution.GAUSSIAN else (count, states.shape[-1])
                parts.append(normals(shape, seed=seed, example=number, draw=index))
        return sent(torch.cat(parts), states.device)

    def _parts(self, rows: _Rows) -> list[slice]:
        """Pieces of rows whose logits may be held at once."""
        count = len(rows.states)
        if self.head is None:
            return [slice(0, count)]
        width = int(self.model.config.get_text_config().vocab_size)
        size = max(16, CHUNK_VALUES // width)
        return [slice(start, start + size) for start in range(0, count, size)]

    def _pull(self, rows: _Rows, batch: Batch, wanted: Wanted) -> tuple[list[Tensor], list[Tensor]]:
        """What rows add to the losses of their examples, if these have any, `[row]` in parts, and the gradient of each
        wanted loss with respect to the rows' states.
        """
        kind = self.task.distribution
        lost: list[Tensor] = []
        pulls = [torch.zeros_like(rows.states) for _ in range(int(wanted.gradient) + wanted.draws)]
        for part in self._parts(rows):
            states = rows.states[part].detach().requires_grad_(True)
            outputs = rows.finish(states)
            totals: list[Tensor] = []
            if self._judges(batch):
                each = losses(outputs, rows.targets[part], kind) / rows.positions[part]
                lost.append(each.detach())
                totals += [each.sum()] if wanted.gradient else []
            for noise in rows.noise:
                if kind is Distribution.CATEGORICAL and noise.dim() == 2:
                    totals.append((wide(outputs) * scores(outputs, noise[part])).sum())
                else:
                    totals.append(losses(outputs, draw(outputs, noise[part], kind), kind).sum())
            for index, total in enumerate(totals):
                (gradient,) = torch.autograd.grad(total, states, retain_graph=index + 1 < len(totals))
                pulls[index][part] = gradient
        return lost, pulls

    def _judges(self, batch: Batch) -> bool:
        return batch.labelled and self.task.distribution is not Distribution.DIRECTION

    def _summed(self, rows: _Rows, lost: list[Tensor], batch: Batch) -> Tensor:
        """The loss of each example, `[example]` in float64 on the host; empty without labels."""
        loss = torch.zeros(len(batch) if self._judges(batch) else 0, dtype=torch.float64)
        if lost:
            loss.index_add_(0, rows.example, torch.cat(lost).cpu().double())
            self._require_finite(batch, torch.isfinite(loss), "the loss")
        return loss

    def _require_finite(self, batch: Batch, finite: Tensor, what: str) -> None:
        """Refuse NaN and infinity, which would make the whole ranking meaningless; `finite` is `[example]`."""
        if not bool(finite.all()):
            worst = batch.numbers[int((~finite).nonzero()[0])]
            raise DataError(
                f"{what} of example {worst} is not finite in {str(self.model.dtype).removeprefix('torch.')}",
                hint="use --dtype float32 or bfloat16",
            )


def model_inputs(model: PreTrainedModel, task: Task, batch: Batch) -> dict[str, Any]:
    """What `model.forward` takes for a batch on its device: with what only the model can make, and no cache kept."""
    inputs = task.prepare(model, batch) if task.prepare else batch.inputs
    accepted = inspect.signature(model.forward).parameters
    unread = {"token_type_ids"} - set(accepted)  # tokenizers may make them for models without
    cache = {"use_cache": False} if "use_cache" in accepted else {}
    return {name: value for name, value in inputs.items() if name not in unread} | cache
