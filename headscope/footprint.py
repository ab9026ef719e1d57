"""What memory this process holds: the part of a run's peak that is there before it begins."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from headscope.offload import home


@dataclass(frozen=True)
class Library:
    """What a run imports on the way, and the bytes it then takes, as measured."""

    name: str
    bytes: int


RANKINGS, METRICS = Library("scipy.stats", 22_000_000), Library("sklearn.metrics", 80_000_000)


def most() -> int:
    """Bytes that the process has held at most so far."""
    import re
    import resource

    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            if found := re.search(r"VmHWM:\s+(\d+) kB", lines.read()):
                return int(found[1]) * 1024
    except OSError:
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def resident() -> int:
    """Bytes that the process holds now, libraries included; the most it ever held where the system does not say."""
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as numbers:
            return int(numbers.read().split()[1]) * resource.getpagesize()
    except OSError:
        return most()


def peak(models: Sequence[nn.Module], more: int, *libraries: Library) -> int:
    """Bytes at the peak of a run that takes `more` beside its models, which are loaded; and libraries that are not yet.

    On a CPU these are of the process, with all its libraries; on another device those that are taken there.
    """
    if all(home(model).type == "cpu" for model in models):
        return resident() + more + sum(one.bytes for one in libraries if one.name not in sys.modules)
    return more + sum(parameter.nbytes for model in models for parameter in model.parameters())
