"""Keeps what libraries say to their programmers off the terminal of an artist, and their seconds from being silent."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.cli.output import LogHandler
from trainer.protocol import events

_STARTING = events.Notice("starting", "Starting the engine, which takes some seconds.")


def quieten() -> None:
    """Silence the libraries' notices, warnings and bars below errors; call it before the first of them is imported."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a line for each allocation that fails, retried or not
    logging.basicConfig(level=logging.ERROR, handlers=[LogHandler()])
    warnings.simplefilter("ignore")


@contextmanager
def engine_imports(on_event: Callable[[events.Event], None]) -> Iterator[None]:
    """Let the engine be imported within the block: as quickly as can be, and after a word about the wait."""
    from trainer.base.imports import quick_imports

    on_event(_STARTING)
    with quick_imports():
        yield
