"""The proof of a pruned model: masked = pruned = reloaded, on made-up inputs and on examples of the data.

Masked is the original with gates of 0, pruned the smaller model in memory, reloaded what a fresh process makes of the
files. Every check keeps the largest difference that it saw and what it allows, and can say no.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from headscope import reload
from headscope.capture import gate
from headscope.errors import ProofFailed
from headscope.headers import read_headers
from headscope.heads import Site
from headscope.inputs import placed, probe_inputs
from headscope.interrupt import raise_interrupts
from headscope.offload import home, is_offloaded
from headscope.plan import Plan
from headscope.reasons import RAISED
from headscope.surgery import gates

EXACT = 1e-9
"""Relative difference of masked and pruned that float64 arithmetic explains."""
SINGLE = 2e-6
"""The same where the model itself computes in float32 inside."""
LAST_PLACES, PLACES_A_SITE = 8, 2
"""Units in the last place of the largest value that different orders of summation explain: in a shallow model, and more
with every site. 16 layers of a random Llama, half of its heads gone, differ by 14."""
NEW_TOKENS = 12

Said = dict[str, Tensor]
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One comparison: the largest difference seen and the largest allowed."""

    name: str
    difference: float
    allowed: float
    remark: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed  # NaN is no pass


@dataclass(frozen=True)
class Verification:
    """All checks of one checkpoint."""

    checks: tuple[Check, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there are checks, and all passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def __add__(self, other: Verification) -> Verification:
        return Verification(self.checks + other.checks)

    def require(self) -> None:
        """Stop if a check failed.

        Raises:
            ProofFailed: naming the first check, what it saw and what it allows.
        """
        for check in self.checks:
            if not check.passed:
                gap, why = f"{check.difference:.2g}", f" ({check.remark})" if check.remark else ""
                raise ProofFailed(
                    f"the proof failed: {check.name} differ by {gap}, allowed {check.allowed:.2g}{why}",
                    hint="nothing was written; please report the model's class and this line",
                )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return {
            check.name: {"difference": check.difference, "allowed": check.allowed, "passed": check.passed}
            | ({"remark": check.remark} if check.remark else {})
            for check in self.checks
        }


def run(model: PreTrainedModel, inputs: Sequence[Inputs]) -> list[Said]:
    """What a model says on each of the inputs, without gradients."""
    return [reload.outputs(model, placed(one, model)) for one in inputs]


def run_masked(model: PreTrainedModel, sites: Sequence[Site], plan: Plan, inputs: Sequence[Inputs]) -> list[Said]:
    """The same with the plan's heads gated to 0."""
    with gate(model, gates(sites, plan), sites):
        return run(model, inputs)


def compared(first: Sequence[Said], second: Sequence[Said]) -> float:
    """The largest difference relative to the largest value of its kind; infinite where the outputs do not match."""
    worst = 0.0
    for one, other in zip(first, second, strict=True):
        if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
            return float("inf")
        for name, value in one.items():
            a, b = value.cpu().double(), other[name].cpu().double()
            scale = float(a.abs().max()) if a.numel() else 1.0
            gap = float((a - b).abs().max()) if a.numel() else 0.0
            worst = max(worst, gap / scale if scale else gap) if gap == gap else float("inf")
    return worst


def same_arithmetic(
    masked: Sequence[Said],
    pruned: Sequence[Said],
    model: PreTrainedModel,
    *,
    names: str = "masked and pruned",
    sites: int = 1,
) -> Check:
    """Masked = pruned in the model's own number format, where each of its `sites` adds to what rounding explains; in
    float64 to 1e-9, or 2e-6 where it computes in float32.

    Other `names` are of other pairs that must be equal in the same way.
    """
    dtype = model.dtype
    name = f"{names} outputs in {str(dtype).removeprefix('torch.')}"
    difference = compared(masked, pruned)
    if dtype != torch.float64:
        return Check(name, difference, max(LAST_PLACES, PLACES_A_SITE * sites) * torch.finfo(dtype).eps)
    if difference > EXACT and computes_in_single(model):
        return Check(name, difference, SINGLE, "the model computes in float32 inside")
    return Check(name, difference, EXACT)


def computes_in_single(model: PreTrainedModel) -> bool:
    """Whether a float64 model turns numbers into float32 on the way (rotary tables and norms of some models do)."""
    watch, inputs = _Narrowing(), placed(probe_inputs(model), model)
    with torch.no_grad(), watch:
        model(**inputs)
    return watch.seen


class _Narrowing(TorchDispatchMode):
    """Notices when float64 numbers become float32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        narrow = isinstance(output, Tensor) and output.dtype == torch.float32
        if narrow and any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in args):
            self.seen = True
        return output


def masked_tokens(model: PreTrainedModel, sites: Sequence[Site], plan: Plan) -> Tensor | None:
    """What the model generates greedily with the plan's heads gated to 0; None where it generates nothing."""
    prompt = _prompt(model)
    if prompt is None:
        return None
    try:
        with gate(model, gates(sites, plan), sites):
            return _greedy(model, prompt, cache=True)
    except RAISED:
        return None  # what the model cannot do whole, its smaller form need not do


def same_tokens(pruned: PreTrainedModel, masked: Tensor | None, *, names: str = "masked and pruned") -> list[Check]:
    """Greedy generation: the pruned model says with its cache what it says without, and what the masked model says."""
    prompt = _prompt(pruned)
    if prompt is None or masked is None:
        return []
    cached, plain = _greedy(pruned, prompt, cache=True), _greedy(pruned, prompt, cache=False)
    return [
        Check("tokens generated with and without cache", _unequal(cached, plain), 0.0),
        Check(f"tokens generated by {names} model", _unequal(cached, masked), 0.0),
    ]


def _prompt(model: PreTrainedModel) -> Inputs | None:
    if not model.can_generate():
        return None
    unread = ("decoder_input_ids", "use_cache", "decoder_attention_mask")
    return {name: value for name, value in probe_inputs(model).items() if name not in unread}


def _greedy(model: PreTrainedModel, prompt: Inputs, *, cache: bool) -> Tensor:
    limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
    with torch.no_grad():
        return model.generate(**placed(prompt, model), **limits, use_cache=cache)  # type: ignore[operator]


def _unequal(first: Tensor, second: Tensor) -> float:
    """The share of tokens that differ."""
    if first.shape != second.shape:
        return 1.0
    return float((first.cpu() != second.cpu()).double().mean())


def reloaded(
    folder: Path,
    auto_class: str,
    model: PreTrainedModel,
    inputs: Sequence[Inputs],
    *,
    code: bool,
    pad: int | None = None,
) -> list[Check]:
    """Pruned = reloaded, to the last bit: a fresh process loads the folder with plain transformers (and, with `code`,
    the file that the checkpoint carries). `pad` stands in for a pad token that the checkpoint lacks.

    Raises:
        ProofFailed: that process could not load or run it.
    """
    expected = run(reload.own_memory(model), inputs)
    raise_interrupts()
    with tempfile.TemporaryDirectory(prefix="headscope-") as scratch:
        found = _in_new_process(folder, auto_class, model, inputs, code=code, pad=pad, scratch=Path(scratch))
        hashes = json.loads((Path(scratch) / reload.HASHES).read_text())
    return [
        _same_weights(reload.hashes(model), hashes, folder),
        Check("pruned and reloaded outputs", compared(expected, found), 0.0),
    ]


def _same_weights(first: Mapping[str, str], second: Mapping[str, str], folder: Path) -> Check:
    """Every tensor of two models, bit for bit, also those that no input reaches; the remark names one that differs."""
    unlike = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    remark = ""
    if unlike:
        stored = read_headers(folder).get(unlike[0])
        hashes = " and ".join(str(each.get(unlike[0]))[:16] for each in (first, second))
        remark = f"{unlike[0]} of {'no file' if stored is None else stored.file} differs, SHA-256 {hashes}"
    return Check("pruned and reloaded weights", float(len(unlike)), 0.0, remark)


def _in_new_process(
    folder: Path,
    auto_class: str,
    model: PreTrainedModel,
    inputs: Sequence[Inputs],
    *,
    code: bool,
    pad: int | None,
    scratch: Path,
) -> list[Said]:
    dtype, device = str(model.dtype).removeprefix("torch."), "disk" if is_offloaded(model) else str(home(model))
    arguments = [str(folder), auto_class, dtype, device, str(int(code))]
    arguments += ["" if pad is None else str(pad), str(torch.get_num_threads())]
    arguments += [str(model.config._attn_implementation or ""), str(scratch / reload.HASHES)]
    for number, one in enumerate(inputs):
        given, said = scratch / f"inputs-{number}.safetensors", scratch / f"outputs-{number}.safetensors"
        tensors = {name: torch.as_tensor(value).cpu().contiguous() for name, value in placed(one, model).items()}
        save_file(tensors, given)
        arguments += [str(given), str(said)]
    launch(arguments, scratch)
    return [load_file(scratch / f"outputs-{number}.safetensors") for number in range(len(inputs))]


def launch(arguments: list[str], scratch: Path) -> None:
    """Run `reload.py` in a process that knows nothing of this one, offline; code of the checkpoint stays in `scratch`.

    Raises:
        ProofFailed: it failed, with its last words.
    """
    environment = os.environ | {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", reload.__file__, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise ProofFailed(f"the proof failed: a new process cannot load the checkpoint: {last[:300]}")
