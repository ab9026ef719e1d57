"""Models larger than a device: the memory they may take, and where accelerate keeps what is not there at the moment.

Under a device map accelerate loads the weights of a module right before it runs and drops them right after. In between
its parameters are empty, on the meta device; `stored` finds their values.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from headscope.errors import DeviceError, UsageError
from headscope.interrupt import raise_interrupts

VARIABLE = "HEADSCOPE_MAX_MEMORY"
"""The environment variable that says how much of each device a balanced model may take."""
NO_MEMORY: dict[int | str, int] = {"cpu": 0}
"""The budget that leaves every weight on the disk, and the model to the CPU."""
_MMAP_THRESHOLD = -3
"""glibc's number for the size from which on memory is mapped, not cut from the heap."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", re.IGNORECASE)


def max_memory(text: str | None = None) -> dict[int | str, int] | None:
    """The bytes of each device in the form of accelerate's `max_memory`, such as `{0: 20_000_000_000, "cpu": 120_000}`.

    It is written `0=20GB,cpu=120KB`; without a text it is read from the environment, and None where nothing is set:
    then accelerate takes what is free. Sizes do not go to accelerate as text: it knows no TB, and reads `20gb` as bits.

    Raises:
        UsageError: it is no such list.
    """
    text = os.environ.get(VARIABLE, "") if text is None else text
    if not text.strip():
        return None
    found: dict[int | str, int] = {}
    for part in text.split(","):
        device, _, size = (piece.strip() for piece in part.partition("="))
        parsed = _SIZE.fullmatch(size)
        if not (device.isdecimal() or device in ("cpu", "mps")) or not parsed:
            raise UsageError(
                f"{VARIABLE}: {part.strip()!r} is no budget", hint=f"for example {VARIABLE}=0=20GB,cpu=16GB"
            )
        number, prefix, binary = parsed.groups()
        unit = (1024 if binary else 1000) ** (1 + "KMGT".index(prefix.upper()))
        found[int(device) if device.isdecimal() else device] = int(float(number) * unit)
    return found


def spread(load: Callable[..., Any], budget: Mapping[int | str, int] | None) -> Any:
    """A model that `load`, given what accelerate needs, spreads over all devices, and what `load` returns with it.

    Weights that can be used as they lie in safetensors files stay there. Others find room in a folder that is removed
    with the model, at the latest when the process ends.
    """
    raise_interrupts()
    _free_at_once()
    with contextlib.ExitStack() as stack:
        folder = mkdtemp(prefix="headscope-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        model, *more = load(device_map="auto", max_memory=budget, offload_folder=folder)
        weakref.finalize(model, stack.pop_all().close)
    return model, *more


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights are loaded only while their module runs."""
    return next(_offloading(model), None) is not None


def _free_at_once() -> None:
    """Let glibc hand every tensor of a mebibyte back when it is freed.

    By itself it keeps holes of up to 32 MiB between smaller tensors that live on, which adds up to many layers.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**20)


def give_back() -> None:
    """Hand back the memory of what is no longer used: models hold themselves in circles, and glibc keeps holes."""
    gc.collect()
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def require_in_memory(model: nn.Module, what: str) -> None:
    """Refuse what would change or compare weights that are not there.

    Raises:
        DeviceError: some are offloaded.
    """
    if is_offloaded(model):
        raise DeviceError(
            f"{what} takes the whole model in memory, and a part of it is offloaded",
            hint=f"allow it more by {VARIABLE}, or use --device cpu on a machine with more memory",
        )


def home(model: nn.Module) -> torch.device:
    """The device that a model takes its inputs on, also where its first weights are not in memory."""
    hook = _aligning(model)
    if hook is not None and hook.execution_device is not None:
        return torch.device(hook.execution_device)
    first = next((hook for hook in _offloading(model)), None)
    if first is not None:
        return torch.device(first.execution_device)
    return next(model.parameters()).device


def stored(module: nn.Module, name: str) -> Tensor:
    """A parameter of a module itself with its values, read from memory or disk if they are not there at the moment.

    The parameter as it is where nobody keeps values for it, as in a model that was made without any.

    Raises:
        DeviceError: it is computed and in no file (Marian's positions), so that accelerate cannot give it back either.
    """
    if not is_kept_away(module, name):
        return getattr(module, name)
    try:
        return _aligning(module).weights_map[name]
    except KeyError:
        raise DeviceError(
            f"the {name} of a {type(module).__name__} is in no file of the model, so it cannot be offloaded",
            hint=f"allow the model more memory by {VARIABLE}, or use --device cpu",
        ) from None


def value(model: nn.Module, path: str) -> Tensor:
    """The same of a parameter or buffer of a model, by its path."""
    return stored(*_owner(model, path))


def is_kept_away(module: nn.Module, name: str) -> bool:
    """Whether a parameter of a module itself is empty at the moment, and accelerate keeps its values."""
    hook = _aligning(module)
    return getattr(module, name).device.type == "meta" and hook is not None and hook.offload


def alter(module: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Let the values of a parameter that is kept away (`is_kept_away`) be changed whenever they are read from now on.

    Nothing is read now. The empty parameter must have the shape of the changed values.
    """
    hook = _aligning(module)
    hook.weights_map = _Altered(hook.weights_map, name, change)


class _Altered(Mapping[str, Tensor]):
    """The values that accelerate keeps for a module, one of them changed on the way out; several stack."""

    def __init__(self, kept: Mapping[str, Tensor], name: str, change: Callable[[Tensor], Tensor]) -> None:
        self._kept, self._name, self._change = kept, name, change

    def __getitem__(self, name: str) -> Tensor:
        values = self._kept[name]
        return self._change(values) if name == self._name else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def retie(model: nn.Module) -> None:
    """Make tied parameters that are kept away one again: accelerate leaves a new empty one for each after every run."""
    tied = getattr(model, "all_tied_weights_keys", {}) if is_offloaded(model) else {}
    for target, source in tied.items():
        (module, name), (other, its) = _owner(model, target), _owner(model, source)
        if is_kept_away(module, name) and is_kept_away(other, its):
            module._parameters[name] = other._parameters[its]


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def _offloading(model: nn.Module) -> Iterator[Any]:
    return (hook for hook in map(_aligning, model.modules()) if hook is not None and hook.offload)


def _aligning(module: nn.Module) -> Any:
    """The hook by which accelerate moves a module's inputs and weights; None where it has none."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return None
    from accelerate.hooks import AlignDevicesHook

    hooks = getattr(hook, "hooks", (hook,))
    return next((one for one in hooks if isinstance(one, AlignDevicesHook)), None)
