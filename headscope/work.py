"""A folder of finished work: one safetensors file for each unit, written whole or not at all, with its fingerprint."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from headscope.errors import WorkError
from headscope.fingerprints import Fingerprint, difference
from headscope.folder_writing import told
from headscope.interrupt import raise_interrupts
from headscope.places import require_folder
from headscope.states import State

_NAMES = re.compile(r"pass-\d+-unit-\d+\.safetensors")
_PARTS = re.compile(r"\.pass-\d+-unit-\d+\.safetensors\.\d+")


class WorkFolder:
    """Where the units of a run are kept; with `anew`, units that are there already are removed first."""

    def __init__(self, folder: Path, *, anew: bool = False) -> None:
        """Check that the folder is there or can be made.

        Raises:
            UsageError: it is a file.
            OutputError: it cannot be made or written.
        """
        require_folder(folder)
        raise_interrupts()
        self.folder, self.anew = folder, anew

    def prepare(self) -> None:
        """Make the folder, and remove what killed runs have left half-written; no other file is ever touched.

        Raises:
            OutputError: the disk refuses.
        """
        with told(self.folder):
            self.folder.mkdir(exist_ok=True)
            for path in self.folder.iterdir():
                if _PARTS.fullmatch(path.name) or (self.anew and _NAMES.fullmatch(path.name)):
                    path.unlink(missing_ok=True)

    def require(self, number: int, fingerprint: Fingerprint) -> None:
        """Refuse units of a pass that belong to another run.

        Raises:
            WorkError: there are some; it says what differs.
        """
        for path in sorted(self.folder.glob(f"pass-{number}-unit-*.safetensors")):
            found = difference(self._fingerprint(path), fingerprint)
            if found is not None:
                raise WorkError(
                    f"{self.folder} holds units of another run: {found}",
                    hint="--resume never starts anew, --work with another folder keeps both",
                )

    def load(self, number: int, unit: int, fingerprint: Fingerprint) -> State | None:
        """The state of a unit; None where it is still to be computed.

        Raises:
            WorkError: its file is damaged, or belongs to another run.
        """
        path = self._path(number, unit)
        if not path.exists():
            return None
        if self._fingerprint(path) != fingerprint:
            self.require(number, fingerprint)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise _damaged(path, error) from None

    def save(self, number: int, unit: int, state: State, *, fingerprint: Fingerprint) -> None:
        """Keep a unit: under a temporary name, flushed, then renamed.

        Raises:
            OutputError: the disk is full or the folder has gone.
        """
        path = self._path(number, unit)
        with told(path):
            try:
                self._write(path, state, fingerprint)
            except FileNotFoundError:
                if not self.folder.is_dir():
                    raise
                self._write(path, state, fingerprint)  # a run that begins here too took the half-written for left over

    def _write(self, path: Path, state: State, fingerprint: Fingerprint) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            tensors = {name: value.contiguous() for name, value in state.items()}
            save_file(tensors, temporary, metadata={"fingerprint": json.dumps(fingerprint)})
            _flush(temporary)
            os.replace(temporary, path)
            _flush(self.folder)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _path(self, number: int, unit: int) -> Path:
        return self.folder / f"pass-{number}-unit-{unit:06d}.safetensors"

    def _fingerprint(self, path: Path) -> Fingerprint:
        try:
            with safe_open(path, framework="pt") as file:
                return json.loads((file.metadata() or {})["fingerprint"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> WorkError:
    return WorkError(
        f"{path} is no unit of finished work: {error}", hint="remove it, or start anew with --resume never"
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
