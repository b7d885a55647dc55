"""Check that work on different CUDA streams is ordered: `python -m tests.emulated_gpu.stream_order FILE train JOB`.

Runs the trainer, and writes to FILE which accesses to the same memory no event puts in order. On an emulated GPU every
operation ends at once, so a missing event has no effect there; on a GPU it changes results now and then.

PyTorch has such a check (torch.cuda._sanitizer), but it forgets a tensor when it is freed, and its hooks break
exceptions that pass through autograd. Here accesses belong to addresses, so memory that is freed and allocated again is
checked too. Workspaces within an operation are not seen, nor operations that other threads start.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.training.acceleration.throughput import is_allocation, is_view

Clock = dict[int, int]
"""By stream, how many of its operations have ended before."""
HOST = -1
"""The host as a stream: it waits by synchronizing, and everything launched later follows."""
_NO_ACCESS = {torch.ops.aten.set_, torch.ops.aten.record_stream}


class Access(NamedTuple):
    """An operation on a stream, with its place in the stream's order."""

    stream: int
    time: int
    operation: str


@dataclass(slots=True, eq=False)
class Range:
    """Addresses with equal accesses: of each stream the last write, and the last read since then."""

    start: int
    end: int
    writes: dict[int, Access] = field(default_factory=dict)
    reads: dict[int, Access] = field(default_factory=dict)


class StreamOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that notes which memory each operation accesses on which stream, and finds those out of order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.races: dict[str, None] = {}
        """The kinds of accesses that nothing orders, in the order in which they were found."""
        self.ordered: Counter[str] = Counter()
        """Number of accesses that an event ordered after one on another stream, such as "read after write"."""
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)
        self._ranges: list[Range] = []  # sorted, without overlaps

    def watch(self) -> None:
        """Follow the program's own events and synchronizations, and the unpinning of main memory."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        _call_before(torch.cuda.Event, "record", self._on_record)
        _call_before(torch.cuda.Event, "wait", self._on_wait)
        _call_before(torch.cuda.Event, "synchronize", lambda event: self._join(HOST, event.clock))
        _call_before(torch.cuda.Stream, "synchronize", lambda stream: self._join(HOST, self._clock_of(stream)))
        _call_before(torch.cuda, "synchronize", self._on_device_synchronization)
        _call_before(cudart, "cudaHostUnregister", self._on_unpin)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note its accesses."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [*_tensors(args), *_tensors(kwargs.values()), *_tensors([result])]
        uses_gpu = any(tensor.is_cuda for tensor in tensors)
        if not uses_gpu or is_view(func) or is_allocation(func) or func.overloadpacket in _NO_ACCESS:
            return result
        access = self._begin(torch.cuda.current_stream().cuda_stream, str(func))
        for tensor, writes in _accesses(func, args, kwargs, result):
            storage = tensor.untyped_storage()
            self._access(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), access, writes=writes)
        return result

    def report(self) -> dict[str, Any]:
        """Return what was found as plain data."""
        return {"races": list(self.races), "ordered": dict(self.ordered)}

    def _clock_of(self, stream: torch.cuda.Stream | None) -> Clock:
        return self._clocks[(stream or torch.cuda.current_stream()).cuda_stream]

    def _on_record(self, event: Any, stream: torch.cuda.Stream | None = None) -> None:
        event.clock = dict(self._clock_of(stream))

    def _on_wait(self, event: Any, stream: torch.cuda.Stream | None = None) -> None:
        self._join((stream or torch.cuda.current_stream()).cuda_stream, event.clock)

    def _on_device_synchronization(self, *_: Any) -> None:
        for clock in list(self._clocks.values()):
            self._join(HOST, clock)

    def _on_unpin(self, address: int) -> None:
        self._access(address, address + 1, self._begin(HOST, "cudaHostUnregister"), writes=True)

    def _join(self, stream: int, other: Clock) -> None:
        """Let everything that follows on a stream be after what a clock contains."""
        clock = self._clocks[stream]
        for each, time in other.items():
            clock[each] = max(clock.get(each, 0), time)

    def _begin(self, stream: int, operation: str) -> Access:
        """Count an operation on a stream; it is after what the host waited for before."""
        self._join(stream, self._clocks[HOST])
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        return Access(stream, clock[stream], operation)

    def _access(self, start: int, end: int, access: Access, *, writes: bool) -> None:
        """Note an access to some addresses, after checking it against the earlier ones."""
        if start == end:
            return
        merged = Range(start, end)
        for former in self._cut_out(start, end):
            for before in former.writes.values():
                self._check(before, access, "write after write" if writes else "read after write")
            for before in former.reads.values() if writes else ():
                self._check(before, access, "write after read")
            if not writes:
                merged.writes |= former.writes
                merged.reads |= former.reads
        (merged.writes if writes else merged.reads)[access.stream] = access
        insort(self._ranges, merged, key=_start)

    def _cut_out(self, start: int, end: int) -> list[Range]:
        """Return the ranges that overlap with some addresses, after limiting them to what is outside."""
        first = bisect_left(self._ranges, start, key=_end_before)
        last = bisect_left(self._ranges, end, key=_start)
        found = self._ranges[first:last]
        rest: list[Range] = []
        for each in found:
            if each.start < start:
                rest.append(Range(each.start, start, dict(each.writes), dict(each.reads)))
            if each.end > end:
                rest.append(Range(end, each.end, dict(each.writes), dict(each.reads)))
        self._ranges[first:last] = rest
        return found

    def _check(self, before: Access, now: Access, kind: str) -> None:
        if before.stream == now.stream:
            return
        if before.time <= self._clocks[now.stream].get(before.stream, 0):
            self.ordered[kind] += 1
        else:
            self.races[f"{kind}: {now.operation} does not wait for {before.operation}"] = None


def _call_before(owner: Any, name: str, before: Callable[..., None]) -> None:
    """Let every call of a function call another one first, with the same arguments."""
    function = getattr(owner, name)

    def both(*args: Any, **options: Any) -> Any:
        before(*args, **options)
        return function(*args, **options)

    setattr(owner, name, both)


def _start(each: Range) -> int:
    return each.start


def _end_before(each: Range) -> int:
    return each.end - 1


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)]


def _accesses(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors that an operation accesses, each with whether it writes."""
    schema = func._schema
    named = {argument.name: argument for argument in schema.arguments}
    given = [*zip(schema.arguments, args, strict=False), *((named[name], value) for name, value in kwargs.items())]
    for argument, value in given:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors([value]):
            if tensor.is_cuda or tensor.is_pinned():
                yield tensor, writes
    if all(value.alias_info is None for value in schema.returns):
        yield from ((tensor, True) for tensor in _tensors([result]) if tensor.is_cuda)


def main(words: Sequence[str]) -> int:
    """Run the trainer with all words but the first, and write the report to the file that the first names."""
    from trainer.cli import main as run_trainer
    from trainer.cli.common import quieten

    quieten()
    order = StreamOrder()
    order.watch()
    sys.argv[1:] = words[1:]
    with order:
        code = run_trainer()
    Path(words[0]).write_text(json.dumps(order.report()), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
