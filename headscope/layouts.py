"""The forms in which a pruned model goes to disk: `native`, `portable` and `masked`, each a folder that loads.

A native checkpoint is described by its configuration alone. A portable one carries the recipe in its configuration
and the file that restores it, which transformers runs only with `trust_remote_code=True`. A masked one has the shapes
of the original.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from headscope.errors import UnsupportedModel
from headscope.offload import is_offloaded
from headscope.portable import CODE_FILE, code
from headscope.reasons import quiet
from headscope.streaming import write_weights

LAYOUTS = ("auto", "native", "portable", "masked")
SHARD_SIZE = "5GB"


def save_native(
    model: PreTrainedModel, config: PreTrainedConfig, folder: Path, *, max_shard_size: str = SHARD_SIZE
) -> None:
    """Write a pruned model under a configuration that describes it (`native.native_config`)."""
    with _configured(model, config), quiet():
        _write(model, folder, max_shard_size)


def save_portable(model: PreTrainedModel, folder: Path, *, max_shard_size: str = SHARD_SIZE) -> None:
    """Write a pruned model with its recipe and the code that restores it.

    Raises:
        UnsupportedModel: the model's class is none of transformers' own, so no code here can restore it.
    """
    auto_map = auto_classes(model)
    if not auto_map:
        raise UnsupportedModel(
            f"{type(model).__name__} is no class of transformers, so a portable checkpoint cannot restore it",
            hint="--layout masked",
        )
    config: PreTrainedConfig = copy.deepcopy(model.config)
    config.auto_map = auto_map
    with _configured(model, config), quiet():
        _write(model, folder, max_shard_size, original=False)
    (folder / CODE_FILE).write_text(code(auto_map), encoding="utf-8")


def save_masked(model: PreTrainedModel, folder: Path, *, max_shard_size: str = SHARD_SIZE) -> None:
    """Write a model whose removed heads are silenced in place."""
    with quiet():
        _write(model, folder, max_shard_size)


def _write(model: PreTrainedModel, folder: Path, max_shard_size: str, *, original: bool = True) -> None:
    """As transformers does it; of an offloaded model all but the weights."""
    if not is_offloaded(model):
        model.save_pretrained(folder, max_shard_size=max_shard_size, save_original_format=original)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
        model.save_pretrained(folder, state_dict={})
    write_weights(model, folder, max_shard_size=max_shard_size, original=original)


def auto_classes(model: PreTrainedModel) -> dict[str, str]:
    """For every Auto class that serves this model's type, the class in the checkpoint's code that it should load."""
    found: dict[str, str] = {}
    for name, loader in vars(modeling_auto).items():
        mapping: Any = getattr(loader, "_model_mapping", None)
        if not name.startswith("AutoModel") or mapping is None:
            continue
        with contextlib.suppress(KeyError):
            served = mapping[type(model.config)]
            kinds = [served] if isinstance(served, type) else list(served)
            own = [kind for kind in kinds if kind.__name__ == type(model).__name__]
            chosen = (own or kinds)[0].__name__
            if hasattr(transformers, chosen):
                found[name] = f"{Path(CODE_FILE).stem}.{chosen}"
    return found if type(model).__name__ in {target.rpartition(".")[2] for target in found.values()} else {}


@contextlib.contextmanager
def _configured(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[None]:
    """The model under another configuration while the block runs."""
    before = model.config
    model.config = config
    try:
        yield
    finally:
        model.config = before
