"""Imports the libraries that training and drawing stand on in half the time, with the same effect."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

_DEFERRING = threading.RLock()


@contextmanager
def quick_imports() -> Iterator[None]:
    """Let torch, diffusers, transformers and peft be imported within the block; later blocks have nothing to gain.

    Garbage is not looked for meanwhile: imports make a million objects and hardly any garbage, so all looking, which
    takes a quarter of the time, is in vain. What was imported is not looked through later either, since it stays.
    """
    if "diffusers" in sys.modules:
        yield
        return
    # Where torch is here already, so is other work, whose garbage must not be kept for ever.
    fresh, collecting = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        with deferred_compilation():
            import bitsandbytes  # noqa: F401 - diffusers and peft import it, and would have it compile at once
        yield
    finally:
        if fresh:
            gc.freeze()
        if collecting:
            gc.enable()


@contextmanager
def deferred_compilation() -> Iterator[None]:
    """Let functions that are defined within the block have `torch.compile` done to them when they are first called.

    bitsandbytes decorates four functions for the CPU, which hardly a run ever calls, and each import of it loads the
    whole compiler for them: seconds. What it compiles, and how, stays as it is.
    """
    import torch

    with _DEFERRING:
        compile_now = torch.compile
        torch.compile = _deferring(compile_now)
        try:
            yield
        finally:
            torch.compile = compile_now


def _deferring(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.compile` for functions, put off; also as a decorator with options. The rest is done at once."""

    def compile_later(model: object = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        # Two threads may both compile what both call first; torch keeps what it makes of a function with its code.
        compiled = functools.cache(functools.partial(compile_now, model, **options))

        @functools.wraps(model)
        def compiled_when_called(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return compiled_when_called

    return compile_later
