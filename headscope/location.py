"""Where a model's files are: a local folder, a GGUF file, or a snapshot of a Hub repository."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from headscope.errors import ModelError, UsageError
from headscope.headers import has_safetensors

_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True)
class Location:
    """A folder with a model's files; `name` is what the user typed, `gguf` the file in the folder if it is one."""

    name: str
    folder: Path
    revision: str = ""
    gguf: str = ""
    notes: tuple[str, ...] = ()

    @property
    def origin(self) -> Path:
        """The folder, or the one file, that the model is read from."""
        return self.folder / self.gguf if self.gguf else self.folder

    def digest(self, limit: int | None = 2 * 1024**3) -> str:
        """SHA-256 over the names and bytes of the weights; empty for more than `limit`, where the revision must do."""
        suffixes = (".gguf",) if self.gguf else (".safetensors", ".bin")
        files = sorted(file for file in self.folder.iterdir() if file.suffix in suffixes and file.is_file())
        files = [self.folder / self.gguf] if self.gguf else files
        if limit is not None and sum(file.stat().st_size for file in files) > limit:
            return ""
        total = hashlib.sha256()
        for file in files:
            total.update(file.name.encode())
            with file.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
        return total.hexdigest()


def locate(name: str, *, revision: str | None = None, allow_pickle: bool = False, code: bool = False) -> Location:
    """The files of the model `name`: what looks like a path is never asked of the Hub.

    Raises:
        UsageError: `name` is neither a folder nor a Hub id.
        ModelError: there is no such folder or repository, or it cannot be reached.
    """
    path = Path(name).expanduser()
    if not name.strip():
        raise UsageError(f"{name!r} is no model", hint="give a folder, or a Hub id of the form owner/name")
    try:
        if path.is_symlink() and not path.exists():
            raise ModelError(f"{name} is a link that leads nowhere")
        if path.is_file() and path.suffix == ".gguf":
            return Location(name, path.parent, gguf=path.name)
        if path.is_dir():
            with os.scandir(path) as entries:
                next(entries, None)  # may it be read?
            ignored = (
                () if revision is None else (f"--revision {revision} is for the Hub, and {name} is a folder here",)
            )
            return Location(name, path, notes=(*_ignored_pickles(path), *ignored))
        if path.is_file():
            raise ModelError(f"{name} is a file; a model is a folder with config.json, or a .gguf file")
    except OSError as error:
        raise ModelError(f"{name}: {error.strerror or error}") from None
    if name.startswith((".", "/", "~", "-")) or name.count("/") > 1 or name.endswith(".gguf"):
        if name.startswith((".", "/", "~")) or name.endswith(".gguf"):
            raise ModelError(f"no such model: {name}", hint=_sibling(path))
        raise UsageError(f"{name!r} is no model", hint="give a folder, or a Hub id of the form owner/name")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name):
        raise UsageError(f"{name!r} is no Hub id and no folder", hint="a Hub id has the form owner/name")
    if os.sep in name and path.parent.is_dir():
        raise ModelError(f"no such model folder: {name}", hint=_sibling(path))
    return _snapshot(name, revision, allow_pickle=allow_pickle, code=code)


def _ignored_pickles(folder: Path) -> tuple[str, ...]:
    """A note where a pickle lies beside the safetensors that are used instead."""
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickles and has_safetensors(folder):
        return (f"{pickles[0]} is ignored: the safetensors beside it are used",)
    return ()


def _sibling(path: Path) -> str | None:
    """A hint that names the most alike folder or GGUF file beside it."""
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in entries if entry.is_dir() or entry.name.endswith(".gguf")]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, sorted(names), n=1)
    return f"did you mean {str(path.with_name(close[0]))!r}?" if close else None


def _snapshot(name: str, revision: str | None, *, allow_pickle: bool, code: bool) -> Location:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [*_PATTERNS, *(["*.bin"] if allow_pickle else []), *(["*.py"] if code else [])]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise ModelError(f"{name} is gated", hint="ask for access on its page, then run `hf auth login`") from None
    except RevisionNotFoundError:
        raise ModelError(f"{name} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"no model {name} on the Hub, and no such folder here", hint="for a private one run `hf auth login`"
        ) from None
    except LocalEntryNotFoundError:
        wanted = "" if revision is None else f" for revision {revision}"
        raise ModelError(
            f"{name} is no folder here, and the Hub cannot be reached{wanted}",
            hint="give a local folder, or go online",
        ) from None
    except (HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{name} cannot be fetched: {why[:200]}") from None
    return Location(name, folder, revision=folder.name, notes=_ignored_pickles(folder))
