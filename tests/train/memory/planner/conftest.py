"""Fixtures of plans for small models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainer.base import streaming
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceLibrary:
    return TraceLibrary(TraceStore(tmp_path_factory.mktemp("traces")))


@pytest.fixture(scope="module")
def small_weights_are_streamed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "MIN_BYTES", 0)
        yield
