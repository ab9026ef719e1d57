"""What memory this process holds: the part of a run's peak that is there before it begins."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from headscope.offload import home


def resident() -> int:
    """Bytes that the process holds now, libraries included; the most it ever held where the system does not say."""
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as numbers:
            return int(numbers.read().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def peak(models: Sequence[nn.Module], more: int) -> int:
    """Bytes at the peak of a run that takes `more` beside its models, which are loaded.

    On a CPU these are of the process, with its libraries; on another device those that are taken there.
    """
    if all(home(model).type == "cpu" for model in models):
        return resident() + more
    return more + sum(parameter.nbytes for model in models for parameter in model.parameters())
