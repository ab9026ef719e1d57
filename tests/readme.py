"""Runs every example of README.md, as it stands there, in a temporary copy; exit 1 if one fails.

`python tests/readme.py [README.md]` uses the `headscope` of the environment that it runs in. The data files of the copy
keep their first rows only, so that the examples run, but do not print the numbers of the README. The two set-up
commands are left out: `.ci/run` has run them by then. Two examples run at a time, unless one needs a file that the
other writes.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SET_UP = re.compile(r"<!-- set-up -->.*?<!-- end of set-up -->", re.DOTALL)
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ROWS = 72
"""Rows that a data file keeps."""
_WRITERS = ("-o", "--output", "--curve", "--plot", ">")


@dataclass(frozen=True)
class Example:
    """One command of a shell block, or one Python block; `files` are the names that it may write or read."""

    shown: str
    command: tuple[str, ...]
    files: frozenset[str]
    writes: frozenset[str]


def examples(text: str) -> Iterator[Example]:
    """The examples of a README, in order."""
    for language, block in _BLOCK.findall(_SET_UP.sub("", text)):
        if language == "python":
            words = frozenset(re.findall(r'"([^"]*)"', block))
            yield Example("python", (sys.executable, "-c", block), words, words)
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                writes = frozenset(word for before, word in zip(words, words[1:], strict=False) if before in _WRITERS)
                yield Example(shlex.join(words), ("bash", "-euo", "pipefail", "-c", line), frozenset(words), writes)


def main(readme: Path) -> int:
    """Run all of them; the exit code."""
    found = list(examples(readme.read_text(encoding="utf-8")))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        shutil.copytree(ROOT / "sample_inputs", room / "sample_inputs")
        for data in room.glob("sample_inputs/*/*.[cj]s*[vl]"):
            lines = data.read_text(encoding="utf-8").split("\n")
            data.write_text("\n".join(lines[: _ROWS + 1]) + "\n", encoding="utf-8")
        failed = _run_all(found, room)
    seconds = time.monotonic() - begun
    cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    print(f"{len(found)} examples of {readme.name} in {seconds:.0f} s ({cpu:.0f} s of CPU), {failed} failed")
    return 1 if failed or not found else 0


def _run_all(found: Sequence[Example], room: Path) -> int:
    futures: list[Future[bool]] = []
    with ThreadPoolExecutor(2) as pool:
        for place, example in enumerate(found):
            # Threads take the examples in order, so that what an example waits for has begun before it.
            earlier = [futures[at] for at, other in enumerate(found[:place]) if _related(other, example)]
            futures.append(pool.submit(_run, example, room, earlier))
    return sum(not future.result() for future in futures)


def _related(earlier: Example, later: Example) -> bool:
    return bool(earlier.writes & later.files or earlier.files & later.writes)


def _run(example: Example, room: Path, earlier: Sequence[Future[bool]]) -> bool:
    wait(earlier)
    begun = time.monotonic()
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": scripts, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        example.command, cwd=room, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    print(f"{time.monotonic() - begun:6.1f} s  {example.shown}", flush=True)
    if done.returncode:
        print(f"exit {done.returncode}\n{done.stderr}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "README.md"))
