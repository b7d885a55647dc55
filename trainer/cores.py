"""How many cores this process may use; standard library only."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores that this process may run on, which `taskset` or a container's set may make fewer.

    A share of their time (`docker run --cpus`) is not looked at.
    """
    if hasattr(os, "sched_getaffinity"):  # not on Windows and macOS; Python 3.13 has os.process_cpu_count for all
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
