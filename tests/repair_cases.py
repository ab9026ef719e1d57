"""Models and plans for tests of repair, and a repair done plainly: activations stored, one `lstsq` a projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from pruning_cases import gates, plan_of
from task_cases import CASES, Case, Opened, open_case, pixels, recipe
from tiny_tokenizers import texts
from torch import Tensor

from headscope.capture import gate
from headscope.examples import collate, held_out
from headscope.heads import HeadId, Site
from headscope.objective import Objective
from headscope.plan import Plan
from headscope.repair import Repair, applied

ROWS = 40
_CASES = CASES | {
    "masked-albert": Case("masked-lm", recipe("albert", "AlbertForMaskedLM"), {}, [], CASES["masked"].ask, "bart"),
    "mixed-bitnet": replace(CASES["causal-llama"], recipe=recipe("bitnet", "BitNetForCausalLM", pad_token_id=None)),
}


def opened(name: str, folder: Path, count: int = ROWS) -> Opened:
    """A case on more rows of unequal length than its own, opened as a study in float64."""
    case = _CASES[name]
    lengths = [3 + number * 7 % 10 for number in range(count)]
    rows: list[dict[str, Any]] = [{"text": text} for text in texts(lengths, seed=5)]
    if "label" in (case.rows or [{}])[0]:
        rows = [row | {"label": number % 3} for number, row in enumerate(rows)]
    if "target" in (case.rows or [{}])[0]:
        others = texts([2 + number * 5 % 7 for number in range(count)], seed=6)
        rows = [row | {"target": other} for row, other in zip(rows, others, strict=True)]
    if case.task == "image-classification":
        rows = [pixels(seed) for seed in range(count)]
    return open_case(replace(case, rows=rows), folder)


def one_of_each(sites: Sequence[Site]) -> Plan:
    """A plan that takes the second head or group of every site but the first; layers of a module lose alike."""
    removed: set[HeadId] = set()
    for site in sites[1:] or sites:
        numbers = site.groups[1]
        removed |= {HeadId(label, number) for label in (site.id, *site.shared_with) for number in numbers}
    return plan_of(sites, sorted(removed))


class Plainly:
    """The same repair with everything kept: example by example, so that nothing is padded.

    `stream` names the module, next to an output projection, that reads the sum which the projection writes to; without
    it projections are fitted to what they write. With `everything` no examples are held out.
    """

    def __init__(
        self, case: Opened, plan: Plan, stream: tuple[str, str] | None = None, *, everything: bool = False
    ) -> None:
        study = case.study
        assert study.examples is not None
        self.sites, self.model = study.sites, study.loaded.model
        self.objective = Objective(self.model, study.loaded.task, study.sites)
        self.closed = gates(self.sites, plan)
        self.plan = plan
        fitted, _ = (study.examples, None) if everything else held_out(study.examples, study.options.seed, split=2)
        self.batches = [collate([one], fitted.pads) for one in fitted.items]
        self.stream = stream
        self.whole = self._runs()

    def _reader(self, path: str) -> str:
        """The module that reads the sum behind a projection."""
        assert self.stream is not None
        return path.removesuffix(self.stream[0]) + self.stream[1]

    def _runs(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """What each projection read and wrote, call by call."""
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        handles = [
            self.model.get_submodule(path).register_forward_hook(
                lambda module, args, output, path=path: found.setdefault(path, []).append((args[0], output))
            )
            for path in {site.output for site in self.sites}
        ]
        for path in {site.output for site in self.sites} if self.stream else ():
            place = self._reader(path)
            reader = self.model.get_submodule(place)
            handles.append(
                reader.register_forward_hook(
                    lambda module, args, output, place=place: found.setdefault(place, []).append((args[0], output))
                )
            )
        with torch.no_grad():
            for batch in self.batches:
                self.objective.forward(batch)
        for handle in handles:
            handle.remove()
        return found

    def columns(self, repair: Repair, number: int, ridge: float) -> tuple[Tensor, Tensor | None]:
        """New columns `[head d_value d_model]` and bias of the repaired site at a place, those before it being done."""
        done = replace(repair, sites=repair.sites[:number])
        with gate(self.model, self.closed, self.sites), applied(self.model, self.sites, done):
            less = self._runs()
        site = next(site for site in self.sites if site.id == repair.sites[number].site)
        module: Any = self.model.get_submodule(site.output)
        kept = [place for place, head in enumerate(site.heads) if head.index in self.plan.kept(site.id)]
        channels = [place * site.d_value + step for place in kept for step in range(site.d_value)]
        z = torch.cat([read.flatten(0, -2) for read, _ in less[site.output]])[:, channels]
        y = torch.cat([wrote.flatten(0, -2) for _, wrote in self.whole[site.output]])
        if self.stream is not None:
            sums = [
                torch.cat([read.flatten(0, -2) for read, _ in runs[self._reader(site.output)]])
                for runs in (self.whole, less)
            ]
            y = torch.cat([wrote.flatten(0, -2) for _, wrote in less[site.output]]) + sums[0] - sums[1]
        is_conv = type(module).__name__ == "Conv1D"
        old = (module.weight if is_conv else module.weight.T)[channels]
        penalty = (ridge * z.square().sum(dim=0).mean()).sqrt()
        rows = penalty * torch.eye(len(channels), dtype=z.dtype)
        if module.bias is not None:
            z = torch.cat([z, torch.ones_like(z[:, :1])], dim=1)
            rows = torch.cat([rows, torch.zeros_like(rows[:, :1])], dim=1)
        system, aim = torch.cat([z, rows]), torch.cat([y, penalty * old])
        found = torch.tensor(numpy.linalg.lstsq(system.numpy(), aim.numpy(), rcond=None)[0])
        columns = found[: len(channels)].view(len(kept), site.d_value, -1)
        return columns, None if module.bias is None else found[-1]
