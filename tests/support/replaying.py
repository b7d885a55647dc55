"""A replacement for CUDA graphs without a GPU: log every operation that some work dispatches, and run them again.

A replay repeats what was logged: the same operations on the same memory with the same scalars, and no Python code. So a
number that a program read and passed to an operation stays the same, as in a CUDA graph. It is stricter than that:
memory that the work allocated is filled with NaN before each replay, memory that existed before must not have moved,
and reading a value raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default)


@dataclass
class Call:
    """One logged operation."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[tuple[int, Tensor]]
    """Tensors among the results that have their own memory, with their positions: a replay writes them again."""


class Log(TorchDispatchMode):
    """Logs the operations inside, including those of backward, which the CPU computes in the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.born: dict[int, torch.UntypedStorage] = {}
        self.found: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError(f"{func} reads from the device while it is recorded")
        for tensor in tensors_in((*args, *kwargs.values())):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.born:
                self.found.setdefault(storage._cdata, (storage, storage.data_ptr()))
        result = func(*args, **kwargs)
        made = []
        for place, tensor in enumerate(listed(result)):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.born and storage._cdata not in self.found:
                self.born[storage._cdata] = storage
                made.append((place, tensor))
        self.calls.append(Call(func, args, kwargs, made))
        return result


@dataclass
class Replay:
    """Replaces trainer.training.acceleration.cuda_graphs.CudaRecording on the CPU."""

    log: Log
    result: Tensor
    times: list[None] = field(default_factory=list)

    def replay(self) -> None:
        """Run the logged operations; raise RuntimeError if memory that existed before has moved."""
        self.times.append(None)
        for storage, address in self.log.found.values():
            if storage.data_ptr() != address:
                raise RuntimeError("what was recorded reads memory that is another's now")
        with torch.no_grad():
            for storage in self.log.born.values():
                forget(storage)
            for call in self.log.calls:
                again = listed(call.func(*call.args, **call.kwargs))
                for place, tensor in call.made:
                    tensor.detach().copy_(again[place])


class Replayer:
    """Replaces trainer.training.acceleration.cuda_graphs.CudaRecorder on the CPU.

    ``replays`` lists everything it recorded.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self.replays: list[Replay] = []

    def record(self, work: Callable[[], Tensor]) -> Replay:
        """Run the work once as a warm-up, as on a GPU, and once to log it."""
        work()
        with Log() as log:
            result = work()
        self.replays.append(Replay(log, result))
        return self.replays[-1]


def listed(result: Any) -> Sequence[Any]:
    """Return the results of an operation as a sequence, whether one or several."""
    return result if isinstance(result, (tuple, list)) else (result,)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors in nested lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def forget(storage: torch.UntypedStorage) -> None:
    """Fill memory with a bit pattern that is NaN in every float format: all bits set."""
    torch.tensor([], dtype=torch.uint8).set_(storage).fill_(255)  # type: ignore[call-overload]
