"""Import the libraries for training and rendering in half the time, with the same effect."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

_LOCK = threading.RLock()


@contextmanager
def quick_imports() -> Iterator[None]:
    """Speed up imports of torch, diffusers, transformers and peft within the block; only the first block has an effect.

    Garbage collection is off within the block: imports create a million objects and hardly any garbage, and collection
    would take a quarter of the time. The imported objects are never freed, so later collections skip them too.
    """
    if "diffusers" in sys.modules:
        yield
        return
    # If torch is imported already, other code has run, whose garbage gc.freeze() would keep forever.
    is_first, was_enabled = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        with deferred_compilation():
            import bitsandbytes  # noqa: F401 - diffusers and peft import it, and would compile at once
        yield
    finally:
        if is_first:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def deferred_compilation() -> Iterator[None]:
    """Make `torch.compile` within the block defer compiling a function until the function is first called.

    bitsandbytes decorates four CPU functions that hardly any run calls, and loads the whole compiler for them at
    import, which takes seconds. The compiled functions and their options stay the same.
    """
    import torch

    with _LOCK:
        compile_now = torch.compile
        torch.compile = _deferring(compile_now)
        try:
            yield
        finally:
            torch.compile = compile_now


def _deferring(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `torch.compile` that compiles modules at once, but functions at their first call.

    Like `torch.compile`, it can be used as a decorator.
    """

    def compile_later(model: object = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        # Two threads may both compile on their first call; that is harmless, because torch caches by code object.
        compiled = functools.cache(functools.partial(compile_now, model, **options))

        @functools.wraps(model)
        def compiled_when_called(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return compiled_when_called

    return compile_later
