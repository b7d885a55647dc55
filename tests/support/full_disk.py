"""A full disk, simulated: the system refuses to let any file of this process grow past a limit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

needs_limits = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on file sizes")


@contextmanager
def full_disk(largest: int = 0) -> Iterator[None]:
    """Limit the size of every file to so many bytes."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
