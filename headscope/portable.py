"""Loading a checkpoint without some attention heads: this file travels inside it, needs torch and transformers only.

`config.headscope` is the recipe: the shapes and counts in which the smaller model differs from the one that its
configuration describes. A model class with `Pruned` in front of its bases builds the described model, takes the
recorded shapes on, and then loads its weights like any other. Nothing is guessed: every entry names a module.

The recipe's entries, all optional:

    parameters   {path: shape}                  parameters with fewer rows or columns
    attributes   {module: {name: count}}        counts that a module keeps for itself
    settings     {module: {name: count}}        counts that a module reads from its configuration while it runs
    arguments    {module: [slice, ...]}         tensors that reach a module with every head and are cut there
    silent       {module: output}               modules without a head: only their output's bias is left
    filled       {module: filling}              modules that run on whole parameters: zeros where the slices were
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401  the classes at the end of a checkpoint's copy need it
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

CODE_FILE = "modeling_headscope.py"
_MARK = "# The classes of this checkpoint"


class Pruned:
    """Goes in front of a transformers model class; without a recipe in the configuration it changes nothing."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        restore(self, carried(config))  # type: ignore[arg-type]

    def _initialize_weights(self, module: nn.Module, *custom: bool) -> None:  # own code may skip buffers, this is none
        super()._initialize_weights(module, *(False for _ in custom))  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers does it, with the code that loads it, and under the names that the code's classes expect."""
        config: Any = self.config  # type: ignore[attr-defined]
        if is_portable(config):
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        auto_map = getattr(config, "auto_map", None)
        if is_portable(config) and auto_map:
            (Path(save_directory) / CODE_FILE).write_text(code(auto_map), encoding="utf-8")


def carried(config: Any) -> dict[str, Any]:
    """What a configuration says about removed heads; empty where it says nothing."""
    return getattr(config, "headscope", None) or {}


def is_portable(config: Any) -> bool:
    """Whether heads were removed in a way that the configuration's plain counts cannot say."""
    recipe = carried(config)
    return isinstance(recipe, dict) and bool(recipe.keys() - {"version", "sites"})


def arguments_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a module was called with, under the names of its forward."""
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | dict(kwargs)


def pruned_class(original: type) -> type:
    """The class that loads a checkpoint with a recipe, under the original's name."""
    return type(original.__name__, (Pruned, original), {"__module__": __name__})


def code(auto_map: Mapping[str, str]) -> str:
    """The text of the file that a checkpoint carries: this one, with a class for each that `auto_map` names."""
    own = Path(__file__).read_text(encoding="utf-8").partition(f"\n\n{_MARK}")[0].rstrip("\n")
    names = sorted({str(target).rpartition(".")[2] for target in auto_map.values()})
    lines = [f"\n\nclass {name}(Pruned, transformers.{name}):\n    pass\n" for name in names]
    return f"{own}\n\n\n{_MARK}, each as transformers has it but for the heads that are gone.\n{''.join(lines)}"


def restore(model: nn.Module, recipe: Mapping[str, Any]) -> None:
    """Give a model the shapes and counts of the recipe, in place; modules that it lacks (another head) are passed."""
    for path, shape in recipe.get("parameters", {}).items():
        owner, _, name = path.rpartition(".")
        if (module := find(model, owner)) is not None and (old := getattr(module, name, None)) is not None:
            resize(module, name, torch.empty(shape, dtype=old.dtype, device=old.device))
    ways = {"attributes": _count, "settings": see_config, "arguments": slice_arguments, "filled": fill_in}
    for entry, give in ways.items():
        for path, content in recipe.get(entry, {}).items():
            if (module := find(model, path)) is not None:
                give(module, content)
    for path, output in recipe.get("silent", {}).items():
        if (module := find(model, path)) is not None:
            silence(model, module, output)


def _count(module: nn.Module, counts: Mapping[str, Any]) -> None:
    for name, count in counts.items():
        if type(vars(module).get(name)) in (int, tuple):
            setattr(module, name, tuple(count) if isinstance(count, list) else count)


def resize(module: nn.Module, name: str, values: Tensor) -> None:
    """Put other values into a parameter; the sizes that its module declares follow."""
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(values, requires_grad=old.requires_grad))
    axes = ("nx", "nf") if "nf" in vars(module) else ("out_features", "in_features")  # Conv1D keeps [in, out]
    if isinstance(module, nn.Embedding):
        axes = ("num_embeddings", "embedding_dim")
    if name == "weight" and values.dim() == 2:
        for size, attribute in zip(values.shape, axes, strict=True):
            if attribute in vars(module):
                setattr(module, attribute, size)
    if vars(module).get("normalized_shape") == tuple(old.shape):
        module.normalized_shape = tuple(values.shape)  # type: ignore[assignment]


def find(model: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`, whether the path was written for the bare model or for one with a head."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    inner = getattr(model, prefix, None) if prefix else None
    shorter = path.removeprefix(f"{prefix}.") if prefix else path
    for root in (model, *([inner] if isinstance(inner, nn.Module) else [])):
        for name in (path, shorter):
            with contextlib.suppress(AttributeError):
                return root.get_submodule(name)
    return None


class ConfigView:
    """A configuration with a few counts of one module; everything else is read from and written to the model's own."""

    def __init__(self, config: Any, counts: Mapping[str, int]) -> None:
        self.__dict__["_config"], self.__dict__["_counts"] = config, dict(counts)

    def __getattr__(self, name: str) -> Any:
        if "_config" not in self.__dict__:  # a copy in the making
            raise AttributeError(name)
        counts = self.__dict__["_counts"]
        return counts[name] if name in counts else getattr(self.__dict__["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_config"], name, value)


def see_config(module: nn.Module, counts: Mapping[str, int]) -> None:
    """Let a module read these counts from its configuration."""
    config: Any = module.config
    if isinstance(config, ConfigView):
        config.__dict__["_counts"].update(counts)
    else:
        module.config = ConfigView(config, counts)  # type: ignore[assignment]


# A slice is {"where": "forward" | "attention", "name": argument, "axis": axis, "heads": before, "kept": [places]}: an
# argument of a forward, or of the attention function. Along its axis lie all heads (along the first: of sequences).


def slice_arguments(module: nn.Module, slices: list[dict[str, Any]]) -> None:
    """Cut tensors that hold something for every head (position biases, ALiBi) down to the heads that are left."""
    first = "headscope_arguments" not in module.__dict__
    module.__dict__["headscope_arguments"] = slices
    if first and any(piece["where"] == "forward" for piece in slices):
        module.register_forward_pre_hook(_forward_hook, with_kwargs=True)
    if any(piece["where"] == "attention" for piece in slices):
        _wrap_interface()


def cut(module: nn.Module, where: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with those cut that the module's slices name; ones that are cut already stay."""
    slices = module.__dict__.get("headscope_arguments", ())
    return arguments | {
        piece["name"]: _cut(arguments[piece["name"]], piece)
        for piece in slices
        if piece["where"] == where and isinstance(arguments.get(piece["name"]), Tensor)
    }


def _cut(tensor: Tensor, piece: Mapping[str, Any]) -> Tensor:
    axis, heads = piece["axis"], piece["heads"]
    kept = torch.tensor(piece["kept"], device=tensor.device, dtype=torch.long)
    size = tensor.shape[axis] if axis < tensor.dim() else 1
    if size == heads:
        return tensor.index_select(axis, kept)
    if axis == 0 and size > heads and size % heads == 0 and tensor.dim() == 3:
        return tensor.unflatten(0, (-1, heads)).index_select(1, kept).flatten(0, 1)
    return tensor


def _forward_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    names = list(inspect.signature(module.forward).parameters)[: len(args)]
    both = cut(module, "forward", arguments_by_name(module, args, kwargs))
    return (*(both[name] for name in names), *args[len(names) :]), {name: both[name] for name in kwargs}


def _wrap_interface() -> None:
    """Let the attention functions of this process cut arguments of modules that have slices, for as long as it runs."""
    original: Callable[..., Any] = AttentionInterface.get_interface
    if getattr(original, "headscope", False):
        return

    def get_interface(registry: AttentionInterface, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        function = original(registry, *args, **kwargs)

        def attention(module: nn.Module, *tensors: Any, **keywords: Any) -> Any:
            if "headscope_arguments" in module.__dict__:
                keywords = cut(module, "attention", keywords)
            return function(module, *tensors, **keywords)

        return attention

    get_interface.headscope = True  # type: ignore[attr-defined]
    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]


def fill_in(module: nn.Module, filling: dict[str, Any]) -> None:
    """Let a module that cannot count fewer heads run on whole parameters, which exist only while it runs.

    `filling` has its "gaps" [{"module": path inside, "name": parameter, "axis": axis, "size": before, "kept": [[start,
    stop], ...]}, ...] and, for each attention module inside, which heads are "left" (`left.HeadsLeft`).
    """
    if "headscope_filled" not in module.__dict__:
        module.register_forward_pre_hook(_fill)
        module.register_forward_hook(_empty, always_call=True)
    module.__dict__["headscope_filled"] = filling
    for path, left in filling["left"].items():
        module.get_submodule(path).__dict__["headscope_left"] = left


def _fill(module: nn.Module, args: tuple[Any, ...]) -> None:
    filling = module.__dict__["headscope_filled"]
    fill_in(module, filling)  # some models change a module for another of its kind while they run
    for gap in filling["gaps"]:
        owner = module.get_submodule(gap["module"])
        values: Tensor = getattr(owner, gap["name"])  # with earlier gaps filled
        kept = torch.cat([torch.arange(*run, device=values.device) for run in gap["kept"]])
        shape = (*values.shape[: gap["axis"]], gap["size"], *values.shape[gap["axis"] + 1 :])
        whole: Any = values.new_zeros(shape).index_copy(gap["axis"], kept, values)
        whole.headscope_of = getattr(values, "headscope_of", values)
        owner.__dict__[gap["name"]] = whole  # found before the parameter


def _empty(module: nn.Module, *_: Any) -> None:
    for gap in module.__dict__["headscope_filled"]["gaps"]:
        module.get_submodule(gap["module"]).__dict__.pop(gap["name"], None)


class Silent(nn.Module):
    """An attention module without heads: what it writes is its output projection's bias, whatever it reads.

    It keeps the parameters and children of the module it stands for. `output` says what that returned: {"items": for
    each of a tuple "" (what is written), the name of the argument that is handed on, or None; empty for a bare tensor,
    "projection": its path inside the module, or None, "width": of what is written, "cache": whether it counts tokens}.
    """

    def __init__(self, original: nn.Module, output: Mapping[str, Any]) -> None:
        super().__init__()
        self.output = dict(output)
        names = (name for name in vars(original) if name in ("layer_idx", "layer_id", "layer_index", "layer_number"))
        self.layer_idx = next((getattr(original, name) for name in names), None)
        self.names = list(inspect.signature(original.forward).parameters)
        if hasattr(original, "config"):
            self.config = original.config
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in original.named_children():
            self.add_module(name, child)
        if output["projection"] is not None:
            self.get_submodule(output["projection"])  # a wrong path shows itself when the model is made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The bias at every query position, in the form that the module used to return."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        hidden = next(value for value in given.values() if isinstance(value, Tensor))
        if self.output["cache"] and self.layer_idx is not None:
            self._count(hidden, given.values())
        written = hidden.new_zeros(*hidden.shape[:-1], self.output["width"])
        if self.output["projection"] is not None:
            bias = getattr(self.get_submodule(self.output["projection"]), "bias", None)
            written = written if bias is None else written + bias
        items = [written if name == "" else given.get(name) for name in self.output["items"]]
        return tuple(items) if items else written

    def _count(self, hidden: Tensor, values: Iterable[Any]) -> None:
        """Let the cache know how many tokens there were: one number a token stands in for the keys."""
        cache = next((value for value in values if hasattr(value, "update") and hasattr(value, "get_seq_length")), None)
        cache = getattr(cache, "self_attention_cache", cache)
        if cache is not None:
            mark = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
            cache.update(mark, mark, self.layer_idx)


def silence(model: nn.Module, module: nn.Module, output: Mapping[str, Any]) -> None:
    """Put a `Silent` in the place of an attention module."""
    path = next(name for name, other in model.named_modules() if other is module)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, Silent(module, output))
