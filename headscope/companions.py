"""Companions: the files of a model folder that its user needs beside config and weights, carried over byte for byte.

They are the files of a tokenizer or processor, chat templates, the generation config, the modules of
sentence-transformers, and the licence. Weights, pickles and hidden files are never among them, nor what a new
checkpoint writes itself.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from headscope.errors import ModelError
from headscope.jsonfiles import inside, quote, read

PATTERNS = (
    # the vocabularies of all tokenizers in transformers
    "tokenizer*", "*.tokenizer", "special_tokens_map*", "added_tokens*", "*vocab*", "merges*", "*.model", "*.spm",
    "*.tiktoken", "tekken.json", "bpe.codes", "dict.txt", "emoji.json", "byte_maps.json", "word_shape.json",
    "word_pronunciation.json", "normalizer.json",
    "*.jinja", "chat_template*",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json", "generation_config.json",
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json",
    "license*", "licence*", "copying*", "notice*", "use_policy*",
)  # fmt: skip
"""Lower-case names of companions in the top level of a model folder."""
OWN = frozenset({"config.json", "readme.md", "headscope.json"})
"""What a new checkpoint writes itself."""
WEIGHTS = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "*.h5", "*.h5.index.json",
    "*.msgpack", "*.msgpack.index.json", "*.ot", "*.onnx", "*.onnx_data", "*.tflite", "*.mlmodel", "*.pb", "*.ggml",
)  # fmt: skip
PICKLES = ("*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.dill")
PROGRAMS = ("*.py", "*.pyc", "*.pyi", "*.pyd", "*.so", "*.dll", "*.dylib")
_MODULE_FILES = ("*.json", "*.txt", "*.safetensors")
_MODULES = "modules.json"
_TEMPLATES = "additional_chat_templates"
_LIMIT = 16 * 1024**2
"""Bytes of modules.json; real ones have a few hundred."""


def companions(source: Path, *, keep_extra: bool, code: bool) -> tuple[str, ...]:
    """The files of a model folder to carry over, as sorted names relative to it; nothing is copied.

    `code` adds the Python files of its top level, `keep_extra` every other regular file that is no weight, pickle,
    program or hidden; of these, links that leave the folder are left out.

    Raises:
        ModelError: a companion is a link that leaves the folder or leads nowhere, or modules.json is unusable.
    """
    found = {name for name in _files(source, "") if _is_companion(name, code=code)}
    found |= {name for name in _files(source, _TEMPLATES) if name.endswith(".jinja")}
    if _MODULES in found:
        for folder in _module_folders(source):
            found |= {name for name in _tree(source, folder) if _matches(name, _MODULE_FILES)}
    found = {name for name in sorted(found) if not _is_pickle(inside(source, name))}
    if keep_extra:
        found |= {name for name in _tree(source, "") if _is_extra(source, name)}
    return tuple(sorted(found))


def copy_companions(source: Path, target: Path, *, keep_extra: bool, code: bool) -> tuple[str, ...]:
    """Copy the `companions` of `source` into the folder `target`, over what stands there, and return their names.

    Raises:
        ModelError: as `companions`, or a file cannot be read.
    """
    names = companions(source, keep_extra=keep_extra, code=code)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _copy(source / name, target / name)
    return names


def _copy(source: Path, target: Path) -> None:
    """Copy the bytes only: a cached file's mode says nothing about the new one."""
    try:
        original = source.open("rb")
    except OSError as error:
        raise ModelError(f"{source}: cannot be read: {error.strerror or error}") from None
    with original, target.open("wb") as copy:
        shutil.copyfileobj(original, copy, 1024**2)


def _files(source: Path, folder: str) -> Iterator[str]:
    """Names of the visible files in one folder of the model folder, broken links among them."""
    try:
        with os.scandir(source / folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and (entry.is_file() or _is_broken(entry)):
                    yield f"{folder}/{entry.name}" if folder else entry.name
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ModelError(f"{source / folder}: cannot be read: {error.strerror or error}") from None


def _is_broken(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _tree(source: Path, folder: str) -> Iterator[str]:
    """Names of the visible files in a folder and the folders below it; no link to a folder is followed."""
    for root, folders, _ in os.walk(source / folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        relative = Path(root).relative_to(source).as_posix()
        yield from _files(source, "" if relative == "." else relative)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    plain = PurePosixPath(name).name.lower()
    return any(fnmatch.fnmatchcase(plain, pattern) for pattern in patterns)


def _is_companion(name: str, *, code: bool) -> bool:
    if name.lower() in OWN or _matches(name, WEIGHTS + PICKLES):
        return False
    if _matches(name, PROGRAMS):
        return code and name.endswith(".py")
    return _matches(name, PATTERNS)


def _is_extra(source: Path, name: str) -> bool:
    if name.lower() in OWN or _matches(name, WEIGHTS + PICKLES + PROGRAMS):
        return False
    try:
        return not _is_pickle(inside(source, name))
    except ModelError:
        return False


def _is_pickle(path: Path) -> bool:
    """Whether a file begins as a pickle of protocol 2 or later, whatever it is called."""
    start, _ = read(path, _LIMIT, length=2)
    return start[:1] == b"\x80" and start[1:] in (b"\2", b"\3", b"\4", b"\5")


def _module_folders(source: Path) -> list[str]:
    """The folders of the sentence-transformers modules that come after the model itself."""
    path = inside(source, _MODULES)
    data, _ = read(path, _LIMIT)
    try:
        listed = json.loads(data)
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: not JSON") from None
    folders: list[str] = []
    for module in listed if isinstance(listed, list) else [None]:
        if not isinstance(module, dict) or not isinstance(name := module.get("path"), str):
            raise ModelError(f"{path}: not a list of modules, each with its path")
        if name.strip("/.") and not str(module.get("type")).endswith("Transformer"):
            folders.append(_plain(path, name))
    return folders


def _plain(modules: Path, name: str) -> str:
    """A folder's name that stays in the model folder, however modules.json writes it."""
    parts = name.rstrip("/").split("/")
    if any(part == "" or part.startswith(".") or set(part) & set("\\:\0") for part in parts):
        raise ModelError(f"{modules}: path {quote(name)} is no folder inside the model folder")
    return "/".join(parts)
