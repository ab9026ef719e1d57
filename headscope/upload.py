"""Upload of a finished checkpoint to the Hugging Face Hub; the local one stays, whatever happens on the way."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from headscope.errors import OutputError, UsageError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def check_repository(name: str) -> None:
    """Refuse what can be no repository, before anything is computed.

    Raises:
        UsageError: the name has another form.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"--push-to-hub {name} is no repository", hint="a repository has the form owner/name")


def upload(folder: Path, name: str, *, force: bool = False) -> str:
    """Put the files of a checkpoint folder into the repository `name` and return its address.

    With `force` a repository that exists takes them in place of the files that it has; its history keeps those.

    Raises:
        OutputError: there is no token, the repository exists and `force` is not set, or the Hub refuses or is out of
            reach. The message says where the local checkpoint lies, and never what the token is.
    """
    from huggingface_hub import create_repo, get_token, upload_folder
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    kept = f"{folder} is written, but could not be pushed to {name}"
    token = get_token()
    if token is None:
        raise OutputError(f"{kept}: there is no token", hint="run `hf auth login`, then `hf upload`")
    try:
        with _no_bars():
            address = create_repo(name, exist_ok=force)
            upload_folder(
                repo_id=address.repo_id,
                folder_path=folder,
                commit_message="Pruned by headscope",
                delete_patterns="*" if force else None,
            )
    except (HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        if getattr(getattr(error, "response", None), "status_code", None) == 409:
            raise OutputError(f"{kept}: it exists already", hint="pass --force to replace its files") from None
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].replace(token, "[token]")
        raise OutputError(f"{kept}: {why}", hint=f"try again: hf upload {name} {folder}") from None
    return str(address)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """No progress bars of the Hub's library in this block."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()
