"""Count what a training step sends to a device, on tensors without data: operations, bytes saved, waits."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.training.acceleration.throughput import is_allocation, is_view

aten = torch.ops.aten

# Operations that make the host wait for a GPU: reading a value, or a shape that depends on values.
WAITING = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "unique_consecutive"})


class StepCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts by stage what PyTorch's dispatcher sends to ``device``, below all of our own functions.

    Views and allocations are not counted, since they start nothing on a device. An operation over a list of tensors
    ("foreach") counts once, unless it mixes dtypes: PyTorch then processes the list tensor by tensor on a GPU (except
    for copies), so it counts once per tensor.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.operations: Counter[tuple[str, str]] = Counter()
        """Number of calls of each operation, by (stage, name)."""
        self.waits: Counter[tuple[str, str]] = Counter()
        """Operations that would make the host wait for a GPU, by (stage, name)."""
        self.saved_bytes = 0
        """Bytes saved for backward when it begins, without weights; the largest value if there are several."""
        self._stage = ""
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._in_backward = False

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name the operations inside; what autograd does in "forward", recomputation included, counts as "backward"."""
        outer, self._stage = self._stage, name
        self._in_backward = False
        self._alive.clear()
        try:
            yield
        finally:
            self._stage = outer

    def total(self, *stages: str) -> int:
        """Return how many operations these stages sent; all stages if none is named."""
        return sum(count for (stage, _), count in self.operations.items() if not stages or stage in stages)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and count it."""
        stage = self._stage_now()
        result = func(*args, **(kwargs or {}))
        given = list(_tensors((args, tuple((kwargs or {}).values()))))
        made = list(_tensors(result))
        if not any(tensor.device == self.device for tensor in (*given, *made)):
            return result
        packet = func.overloadpacket
        if is_view(func):
            return result
        if stage == "forward":
            self._note_made(given, made)
        if not is_allocation(func):
            self.operations[stage, packet.__name__] += _times(packet.__name__, args)
        if (
            packet.__name__ in WAITING
            or _picks_by_mask(packet.__name__, args)
            or _awaits_copy(func, args, kwargs, result)
        ):
            self.waits[stage, packet.__name__] += 1
        return result

    def _stage_now(self) -> str:
        if self._stage != "forward" or torch._C._current_graph_task_id() == -1:
            return self._stage
        if not self._in_backward:
            self._in_backward = True
            storages = [storage() for storage in self._alive.values()]
            self.saved_bytes = max(self.saved_bytes, sum(one.nbytes() for one in storages if one is not None))
        return "backward"

    def _note_made(self, given: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        known = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in made:
            storage = tensor.untyped_storage()
            if tensor.device == self.device and storage._cdata not in known:
                self._alive[storage._cdata] = weakref.ref(storage)


def _times(name: str, args: tuple[Any, ...]) -> int:
    """Return how many operations a call counts as."""
    if not name.startswith("_foreach") or name == "_foreach_copy_":
        return 1
    formats = {tensor.dtype for tensor in _tensors(args)}
    return len(args[0]) if len(formats) > 1 else 1


def _picks_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether it indexes by a mask, so that only the device knows the size of the result."""
    return name.startswith("index") and any(tensor.dtype == torch.bool for tensor in _tensors(args[1:2]))


def _awaits_copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> bool:
    """Return whether it copies from one device to another and waits for the copy."""
    if func is aten.copy_.default:
        return args[0].device != args[1].device and not (len(args) > 2 and args[2])
    if func is aten._to_copy.default:
        return bool(args[0].device != result.device and not (kwargs or {}).get("non_blocking"))
    return False


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
