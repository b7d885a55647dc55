"""Record what PyTorch's CPU allocator allocates, from its profiler: by address, with the operation that allocates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile, record_function
from torch.profiler._utils import traverse_dfs

from trainer.training.objective import NoiseSchedule

_MAIN_MEMORY = "main memory"


class Change(NamedTuple):
    """Bytes allocated or (negative) freed."""

    time_ns: int
    address: int
    bytes: int
    operations: tuple[tuple[int, str], ...]
    """Numbers and names of the calling operations, innermost first; empty if memory is freed between operations."""


@contextmanager
def marking_main_memory() -> Iterator[None]:
    """Mark what stays in main memory on every device, so that :func:`changes_of` leaves it out.

    These are the random number generator's state, which checkpointing saves for each block, and the noise schedule in
    float64, which is copied to the device.
    """
    state, create = torch.get_rng_state, NoiseSchedule.create
    with patch.object(torch, "get_rng_state", _marked(state)), patch.object(NoiseSchedule, "create", _marked(create)):
        yield


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(_MAIN_MEMORY):
            return function(*args, **kwargs)

    return marked


def changes_of(profiler: profile | None) -> list[Change]:
    """Return all changes in order, without those of tensors that are marked as main memory."""
    assert profiler is not None
    assert profiler.kineto_results is not None
    events = traverse_dfs(profiler.kineto_results.experimental_event_tree())
    changes = [
        Change(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, tuple(_above(event)))
        for event in events
        if event.tag == _EventType.Allocation
    ]
    return list(_on_device(sorted(changes, key=lambda change: change.time_ns)))


def _above(event: Any) -> Iterator[tuple[int, str]]:
    while (event := event.parent) is not None:
        yield event.id, event.name


def _on_device(changes: Iterable[Change]) -> Iterator[Change]:
    elsewhere: set[int] = set()
    for change in changes:
        if change.bytes < 0:
            if change.address in elsewhere:
                elsewhere.discard(change.address)
                continue
        elif any(name == _MAIN_MEMORY for _, name in change.operations):
            elsewhere.add(change.address)
            continue
        yield change


def outside(changes: Iterable[Change], kernels: Collection[str]) -> list[int]:
    """Return the bytes of each change, without what one of ``kernels`` allocated and freed within itself."""
    changes = list(changes)
    born: dict[int, int] = {}
    inner: set[int] = set()
    for place, change in enumerate(changes):
        if change.bytes > 0:
            born[change.address] = place
        elif (birth := born.pop(change.address, None)) is not None:
            kernel = _outermost(changes[birth], kernels)
            if kernel is not None and kernel == _outermost(change, kernels):
                inner |= {birth, place}
    return [change.bytes for place, change in enumerate(changes) if place not in inner]


def _outermost(change: Change, kernels: Collection[str]) -> int | None:
    return next((number for number, name in reversed(change.operations) if name in kernels), None)
