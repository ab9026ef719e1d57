"""Loading a pretrained model so that what is measured is what the checkpoint says: complete, finite and on its task."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from headscope.devices import check_attention, resolve_device, resolve_dtype
from headscope.errors import DeviceError, ModelError
from headscope.headers import has_safetensors, read_headers, value_bytes
from headscope.jsonfiles import quote
from headscope.location import Location, locate
from headscope.offload import NO_MEMORY, home, max_memory, spread
from headscope.parallel import splitting
from headscope.portable import is_portable, pruned_class
from headscope.positions import most_positions
from headscope.reasons import PACKED, RAISED, NoBareErrors, configuration_error, first_line, no_bars, quiet, reason
from headscope.task_choice import choose_task
from headscope.tasks import Task
from headscope.weights import changed_since_written, check_files, check_keys, dense, non_finite, undo_quantisation


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
    tensor_parallel: bool = False
    """Split the model between the processes that torchrun has started, by transformers' own plan."""
    on_disk: bool = False
    """Leave every weight of a balanced model on the disk, whatever memory is allowed."""


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
    unused: tuple[str, ...] = ()
    """Tensors of the checkpoint that this model has no place for."""
    assumed: bool = False
    """The task is regression because there is one output, and nothing else says so."""

    @property
    def value_bytes(self) -> int:
        """Bytes of one number as the checkpoint stores it."""
        if self.location.gguf or not has_safetensors(self.location.folder):
            return self.model.dtype.itemsize
        return value_bytes(read_headers(self.location.folder).values())

    @property
    def reads(self) -> str:
        """What the model reads: `text`, `images` or `sounds`."""
        main = self.model.main_input_name
        return "images" if "pixel" in main else "sounds" if main in ("input_features", "input_values") else "text"

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer.

        Raises:
            ModelError: it has none that can be loaded, or only an empty one.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        found = self._companion(AutoTokenizer, "tokenizer", PreTrainedTokenizerBase)
        if len(set(found.get_vocab()) - set(found.all_special_tokens)) < 2:  # what is loaded where there is no file
            raise ModelError(f"{self.location.name}: its tokenizer knows no words", hint="is tokenizer.json missing?")
        return found

    def image_processor(self) -> Any:
        """The checkpoint's image processor.

        Raises:
            ModelError: it has none that can be loaded.
        """
        from transformers import AutoImageProcessor, ImageProcessingMixin

        return self._companion(AutoImageProcessor, "image processor", ImageProcessingMixin)

    def feature_extractor(self) -> Any:
        """What turns sounds into the model's inputs.

        Raises:
            ModelError: the checkpoint has none that can be loaded.
        """
        from transformers import AutoFeatureExtractor, FeatureExtractionMixin

        return self._companion(AutoFeatureExtractor, "feature extractor", FeatureExtractionMixin)

    def processor(self) -> Any:
        """What prepares images or sounds for a model that reads them."""
        return self.feature_extractor() if self.reads == "sounds" else self.image_processor()

    def _companion(self, loader: Any, what: str, kind: type) -> Any:
        options = {"gguf_file": self.location.gguf} if self.location.gguf and what == "tokenizer" else {}
        try:
            with quiet(), NoBareErrors():
                found = loader.from_pretrained(
                    self.location.folder, local_files_only=True, trust_remote_code=self.trust_remote_code, **options
                )
        except RAISED as error:
            raise ModelError(f"{self.location.name}: its {what} cannot be loaded: {first_line(error)}") from None
        if not isinstance(found, kind):  # a configuration may name any class
            raise ModelError(f"{self.location.name}: its {what} is none but a {type(found).__name__}")
        return found

    def max_length(self) -> int | None:
        """The longest text that positions of the model and its tokenizer allow, in tokens; None where nothing says."""
        limits = [most_positions(self.model)]
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
    check_attention(options.attention, trust_remote_code=options.trust_remote_code)
    location = locate(
        name, revision=options.revision, allow_pickle=options.allow_pickle, code=options.trust_remote_code
    )
    notes = list(location.notes)
    if not location.gguf:
        config = check_files(location, allow_pickle=options.allow_pickle)
        if config.get("auto_map") and "headscope" not in config and not options.trust_remote_code:
            notes.append("the code that comes with the model is not run: transformers' own takes its place")
        notes += changed_since_written(location.folder)
    configuration = _configuration(location, options)
    wanted = "causal-lm" if location.gguf and options.task == "auto" else options.task  # GGUF names no architecture
    task_name, task = choose_task(configuration, wanted)
    model, info = _load(location, configuration, task, options, device=device, dtype=dtype)
    notes += check_keys(location, model, info, headless=task.auto_class == "AutoModel")
    bad = non_finite(model)
    if bad and not options.tolerate_non_finite:
        parameter, count = next(iter(bad.items()))
        raise ModelError(
            f"{location.name}: {count} values of {parameter} are NaN or infinite, so every result would be",
            hint="`headscope inspect MODEL --check` lists them all",
        )
    if home(model).type == "cpu" and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped kernels want widths in steps of 16 bytes, no float64
    model.eval().requires_grad_(False)
    return LoadedModel(
        model,
        task_name,
        task,
        location,
        tuple(notes),
        bad,
        trust_remote_code=options.trust_remote_code,
        unused=tuple(sorted(info["unexpected_keys"])),
        assumed=(task_name, options.task, configuration.problem_type) == ("regression", "auto", None),
    )


def _configuration(location: Location, options: LoadOptions) -> PreTrainedConfig:
    extra = {"gguf_file": location.gguf} if location.gguf else {}
    try:
        with quiet():
            return AutoConfig.from_pretrained(
                location.folder, local_files_only=True, trust_remote_code=options.trust_remote_code, **extra
            )
    except RAISED as error:
        raise configuration_error(location, error) from None


def _load(
    location: Location,
    config: PreTrainedConfig,
    task: Task,
    options: LoadOptions,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    import transformers

    arguments: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    arguments["trust_remote_code"] = options.trust_remote_code
    if options.attention != "auto":
        arguments["attn_implementation"] = options.attention
    if options.tensor_parallel:
        arguments |= splitting(config, options.device)
    if location.gguf:
        arguments |= {"gguf_file": location.gguf, "quantization_config": dense()}
    else:
        arguments |= {"config": config, "use_safetensors": has_safetensors(location.folder)}
    loader, budget = getattr(transformers, task.auto_class), max_memory() if device == "balanced" else None
    if options.on_disk:
        budget = NO_MEMORY
    if is_portable(config):
        loader = _pruned(config, task)
        del arguments["trust_remote_code"]
    try:
        with quiet(), no_bars(location):
            read = partial(loader.from_pretrained, location.folder, **arguments)
            model, info = spread(read, budget) if device == "balanced" else read()
            if device != "balanced" and not options.tensor_parallel:
                model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"{location.name} does not fit on {device}: {first_line(error)}") from None
    except RAISED as error:
        hint = PACKED if getattr(config, "quantization_config", None) is not None else None
        raise ModelError(f"{location.name} cannot be loaded as {task.auto_class}: {reason(error)}", hint=hint) from None
    if location.gguf:
        undo_quantisation(model)
    return model, info


def blank_model(location: Location, options: LoadOptions, *, device: str = "meta") -> PreTrainedModel:
    """The model that config.json describes, without the checkpoint's weights: for comparing shapes with the files.

    On the meta device it takes no memory, whatever sizes config.json asks for.

    Raises:
        ModelError: its configuration cannot be used.
    """
    import transformers

    config = _configuration(location, options)
    _, task = choose_task(config, options.task)
    try:
        with quiet(), torch.device(device):
            if is_portable(config):
                return _pruned(config, task)._from_config(config, dtype=torch.bfloat16).eval()
            blank = getattr(transformers, task.auto_class).from_config(
                config, dtype=torch.bfloat16, trust_remote_code=options.trust_remote_code
            )
            return blank.eval()
    except RAISED as error:
        raise ModelError(f"{location.name}: config.json describes no possible model: {first_line(error)}") from None


def _pruned(config: PreTrainedConfig, task: Task) -> Any:
    """The class that restores a recipe, from this package: the code inside the checkpoint is not run."""
    import transformers
    from transformers.models.auto import modeling_auto

    named = getattr(modeling_auto, task.mapping).get(config.model_type)
    names = [named] if isinstance(named, str) else list(named or ())
    wanted = next((name for name in names if name in (config.architectures or ())), names[0] if names else "")
    if not wanted:
        raise ModelError(f"config.json: a {quote(config.model_type)} model does no such task", hint="--task embedding")
    return pruned_class(getattr(transformers, wanted))
