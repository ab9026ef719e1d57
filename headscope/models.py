"""Loading a pretrained model so that what is measured is what the checkpoint says: complete, finite and on its task."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from headscope import registry
from headscope.devices import resolve_device, resolve_dtype
from headscope.errors import DeviceError, ModelError, UsageError, nearest
from headscope.headers import check_config, check_sizes, has_safetensors, read_config, read_headers, value_bytes
from headscope.location import Location, locate
from headscope.tasks import Task

_RAISED = (OSError, ValueError, RuntimeError, KeyError, ImportError, TypeError, AttributeError, AssertionError)
"""What transformers raises for checkpoints that it cannot load."""


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model; the defaults are those of the command line."""

    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    task: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    tolerate_non_finite: bool = False
    """Keep going with weights that are NaN or infinite (structure checks report them)."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with frozen weights, its task, and where it came from."""

    model: PreTrainedModel
    task_name: str
    task: Task
    location: Location
    notes: tuple[str, ...] = ()
    non_finite: dict[str, int] = field(default_factory=dict)
    trust_remote_code: bool = False

    @property
    def value_bytes(self) -> int:
        """Bytes of one number as the checkpoint stores it."""
        if self.location.gguf or not has_safetensors(self.location.folder):
            return self.model.dtype.itemsize
        return value_bytes(read_headers(self.location.folder).values())

    @property
    def reads(self) -> str:
        """What the model reads: `text` or `images`."""
        return "images" if "pixel" in self.model.main_input_name else "text"

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer.

        Raises:
            ModelError: it has none that can be loaded.
        """
        from transformers import AutoTokenizer

        return self._companion(AutoTokenizer, "tokenizer")

    def image_processor(self) -> Any:
        """The checkpoint's image processor.

        Raises:
            ModelError: it has none that can be loaded.
        """
        from transformers import AutoImageProcessor

        return self._companion(AutoImageProcessor, "image processor")

    def _companion(self, loader: Any, what: str) -> Any:
        options = {"gguf_file": self.location.gguf} if self.location.gguf and what == "tokenizer" else {}
        try:
            with quiet():
                return loader.from_pretrained(
                    self.location.folder, local_files_only=True, trust_remote_code=self.trust_remote_code, **options
                )
        except _RAISED as error:
            raise ModelError(f"{self.location.name}: its {what} cannot be loaded: {first_line(error)}") from None

    def max_length(self) -> int | None:
        """The longest text that positions of the model and its tokenizer allow, in tokens; None where nothing says."""
        limits = [_positions(self.model)]
        declared = getattr(self.tokenizer(), "model_max_length", None)
        limits.append(int(declared) if isinstance(declared, int) and declared < 10**9 else None)
        known = [limit for limit in limits if limit]
        return min(known) if known else None


def load(name: str, options: LoadOptions) -> LoadedModel:
    """Load the model `name` (folder, GGUF file or Hub id) for its task.

    Raises:
        ModelError: the checkpoint is incomplete, unsafe, inconsistent or holds non-finite weights.
        DeviceError: the device is absent or too small.
        UsageError: an option cannot be meant that way.
    """
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    location = locate(
        name, revision=options.revision, allow_pickle=options.allow_pickle, code=options.trust_remote_code
    )
    notes = list(location.notes)
    if not location.gguf:
        config = read_config(location.folder)
        check_config(config)
        if has_safetensors(location.folder):
            check_sizes(config, read_headers(location.folder))
        elif not options.allow_pickle:
            read_headers(location.folder)  # says why not
        if config.get("pruned_heads"):
            raise ModelError(
                f"{location.name}: config.json has pruned_heads, which transformers 5 ignores",
                hint="write a rectangular checkpoint with the transformers 4 that pruned it",
            )
    configuration = _configuration(location, options)
    task_name, task = choose_task(configuration, options.task)
    model, more = _load(location, configuration, task, options, device=device, dtype=dtype)
    bad = non_finite(model)
    if bad and not options.tolerate_non_finite:
        parameter, count = next(iter(bad.items()))
        raise ModelError(
            f"{location.name}: {count} values of {parameter} are NaN or infinite, so every result would be",
            hint="`headscope inspect MODEL --check` lists them all",
        )
    model.eval().requires_grad_(False)
    return LoadedModel(
        model, task_name, task, location, (*notes, *more), bad, trust_remote_code=options.trust_remote_code
    )


def _configuration(location: Location, options: LoadOptions) -> PreTrainedConfig:
    extra = {"gguf_file": location.gguf} if location.gguf else {}
    try:
        with quiet():
            return AutoConfig.from_pretrained(
                location.folder, local_files_only=True, trust_remote_code=options.trust_remote_code, **extra
            )
    except _RAISED as error:
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{location.name}: this model needs code that comes with it",
                hint="read that code, then pass --trust-remote-code to run it",
            ) from None
        raise ModelError(f"{location.name}: its configuration cannot be used: {reason}") from None


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

    architecture = (config.architectures or [""])[0]
    for name, task in registry.load_all("tasks", "TASK").items():
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


def _load(
    location: Location,
    config: PreTrainedConfig,
    task: Task,
    options: LoadOptions,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[PreTrainedModel, list[str]]:
    import transformers

    arguments: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    arguments["trust_remote_code"] = options.trust_remote_code
    if options.attention != "auto":
        arguments["attn_implementation"] = options.attention
    if device == "balanced":
        arguments["device_map"] = "auto"
    if location.gguf:
        arguments |= {"gguf_file": location.gguf, "quantization_config": _dense()}
    else:
        arguments |= {"config": config, "use_safetensors": has_safetensors(location.folder)}
    try:
        with quiet():
            model, info = getattr(transformers, task.auto_class).from_pretrained(location.folder, **arguments)
            if device != "balanced":
                model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"{location.name} does not fit on {device}: {first_line(error)}") from None
    except _RAISED as error:
        raise ModelError(f"{location.name} cannot be loaded as {task.auto_class}: {_reason(error)}") from None
    if location.gguf:
        _undo_quantisation(model)
    return model, _check_keys(location, model, info, task)


def _check_keys(location: Location, model: PreTrainedModel, info: dict[str, Any], task: Task) -> list[str]:
    """Refuse a model with made-up weights; note weights of the file that the model does not use."""
    mismatched, missing = sorted(map(str, info["mismatched_keys"])), sorted(info["missing_keys"])
    if mismatched:
        raise ModelError(f"{location.name}: {mismatched[0]} has another shape than config.json says")
    pooling = [key for key in missing if "pooler" in key] if task.auto_class == "AutoModel" else []
    missing = [key for key in missing if key not in pooling]
    if missing:
        prefix = f"{model.base_model_prefix}."
        if all(not key.startswith(prefix) for key in missing) and task.auto_class != "AutoModel":
            raise ModelError(
                f"{location.name}: the task head is not in this checkpoint ({missing[0]} is missing), "
                "scores would be of a random head",
                hint="use a fine-tuned checkpoint, or --task embedding for the model without a head",
            )
        raise ModelError(f"{location.name}: {missing[0]} is missing ({len(missing)} in all), it would be random")
    unexpected = sorted(info["unexpected_keys"])
    if not unexpected:
        return []
    return [f"{len(unexpected)} tensors of the checkpoint are not used by this task, such as {unexpected[0]}"]


def blank_model(location: Location, options: LoadOptions) -> PreTrainedModel:
    """The model that config.json describes, with random weights in bfloat16: for comparing shapes with the files.

    Raises:
        ModelError: its configuration cannot be used.
    """
    import transformers

    check_config(read_config(location.folder))
    check_sizes(read_config(location.folder), read_headers(location.folder))
    config = _configuration(location, options)
    _, task = choose_task(config, options.task)
    try:
        with quiet():
            return getattr(transformers, task.auto_class).from_config(config, dtype=torch.bfloat16).eval()
    except _RAISED as error:
        raise ModelError(f"{location.name}: config.json describes no possible model: {first_line(error)}") from None


def non_finite(model: nn.Module) -> dict[str, int]:
    """Parameters that hold NaN or infinity, with how many."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.device.type != "meta":
            count = int((~torch.isfinite(parameter)).sum())
            if count:
                found[name] = count
    return found


def _positions(model: PreTrainedModel) -> int | None:
    """The number of positions the model has; RoBERTa's kin start counting behind the pad token."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")
    declared = next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
    if declared is None or declared <= 0 or config.model_type in ("t5", "mt5", "umt5", "longt5"):
        return None  # relative positions reach as far as the text
    for path, module in model.named_modules():
        if path.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return declared - int(module.padding_idx) - 1  # type: ignore[arg-type]
    return declared


def _dense() -> Any:
    """Weights of a GGUF file as ordinary matrices, whatever packages are installed."""
    from transformers import GgufConfig

    return GgufConfig(dequantize=True)


def _undo_quantisation(model: PreTrainedModel) -> None:
    """Dense weights are no longer quantised: let the model be saved and trained like any other."""
    model.hf_quantizer = None  # type: ignore[assignment]
    model.is_quantized = False  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own messages and progress bars off stderr: what matters becomes a note or an error."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none."""
    lines = [line.strip() for line in str(error).strip().split("\n") if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _reason(error: BaseException) -> str:
    if "ignore_mismatched_sizes" in str(error) or "size mismatch" in str(error):
        return "its weights have other shapes than config.json says (`headscope inspect MODEL --check` names them)"
    return first_line(error)
