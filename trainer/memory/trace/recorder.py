"""Records on tapes what PyTorch does to memory: storages of meta tensors, born and dying, and the work between."""

from __future__ import annotations

import gc
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainer.memory.trace.cuda_kernels import (
    AttentionKernel,
    as_on_cuda,
    gemm_4bit,
    hidden_bytes,
    overwritten,
    safe_softmax,
)
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, StorageKind, Work, WorkKind
from trainer.training.device.dispatched import is_allocation, is_view

aten = torch.ops.aten

# cuBLAS takes a workspace for each thread that multiplies, the caller's and autograd's, and keeps it. How large it is
# depends on the card: this is the size on consumer cards, which a replay replaces.
CUBLAS_WORKSPACE = 8_519_680

_GEMMS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._int_mm}
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
_REPLACEMENTS: dict[OpOverload, Callable[..., Any]] = {
    aten._safe_softmax.default: safe_softmax,
    torch.ops.bitsandbytes.gemm_4bit.default: gemm_4bit,
}


class _LiveStorage(weakref.ref[torch.UntypedStorage]):
    """A storage that is alive, with what the tape says of it."""

    __slots__ = ("address", "bytes", "index", "kind", "module", "name", "stage")

    address: int
    bytes: int
    index: int
    """Its place on the current tape; -1 while it is on none."""
    kind: StorageKind | None
    module: str
    name: str | None
    stage: str


class _Operator(NamedTuple):
    """What is known of an operator, whatever it is called with."""

    makes: bool
    """Whether all that it returns is new memory."""
    works: bool
    """Whether it touches memory; else it only looks at it in another way."""
    allocates: bool
    """Whether it only takes memory, which starts nothing on a card."""
    overwrites: bool
    """Whether it changes numbers and nothing else, so that on meta it need not be run."""
    fills: bool
    """Whether it is a product that is written where the caller says, which on meta need not be run again either."""
    work: WorkKind
    flops: Callable[..., int] | None
    instead: Callable[..., Any] | None
    """What is called in its place."""


class _Call(NamedTuple):
    """What is known of an operator called with certain shapes."""

    seen: bool
    """Whether it concerns meta tensors at all."""
    made: tuple[_TensorSpec | None, ...] | None
    """What it returns, where that is nothing but new tensors: then it need not be run again."""
    single: bool
    """Whether it returns a tensor, not a tuple of them."""
    hidden: tuple[int, ...]
    dtype: str
    flops: int
    bytes: int


class _TensorSpec(NamedTuple):
    """A new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records the storages of meta tensors that are born and die, and every operation's work.

    Storages on other devices are not seen. What is recorded between two calls of :meth:`cut` is one tape; the same
    operations give the same tape. The buffers that cuDNN takes for a convolution are storages of kind "workspace" and
    module "cudnn", as large as input, weight and output together; cuBLAS' are named, of module "cublas".
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: dict[OpOverload, _Operator] = {}
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._alive: dict[int, _LiveStorage] = {}
        self._storages: list[_LiveStorage | Storage] = []
        self._events: list[int] = []
        self._work: dict[tuple[Any, ...], int] = {}
        self._workspaces: set[str] = set()
        self._outer_stage = ""
        self._stage = ""
        self._stage_began = 0
        self._operand: _LiveStorage | None = None
        """What the latest storage overwrites instead of being born, if that dies next."""
        self._after_product = False
        self._zeros: set[int] = set()
        self._false: set[int] = set()
        self._modules: list[str] = [""]
        # Which module ran when: the autograd nodes from one number on belong to the module beside it.
        self._node_numbers = [0]
        self._node_modules = [""]
        self._last_node_module = ""
        self._hooks: list[Any] = []

    def close(self) -> None:
        """Takes the hooks off the watched modules and forgets what is alive."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._alive.clear()

    def know(self, tensor: Tensor, kind: StorageKind, module: str, name: str | None = None) -> None:
        """Says what a tensor's storage is; one that is not known yet counts as born now.

        ``name`` is its name where it outlives the tape, unless it has one; no two that live at once may share one.
        """
        storage = tensor.untyped_storage()
        live = self._alive.get(storage._cdata) or self._record_birth(storage)
        live.kind, live.module = kind, module
        live.name = live.name or name

    def know_zero(self, tensor: Tensor) -> None:
        """Says that a tensor holds nothing but zeros, for programs that ask."""
        self._zeros.add(tensor.untyped_storage()._cdata)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage was seen being born, or told of."""
        return tensor.untyped_storage()._cdata in self._alive

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Names what goes on inside. In "forward", what autograd does is told apart: "backward" and "recompute"."""
        outer, self._outer_stage = self._outer_stage, name
        try:
            yield
        finally:
            self._outer_stage = outer

    def watch(self, prefix: str, module: nn.Module) -> None:
        """Lets storages be told by the path of the module that takes them, in its forward and its backward."""
        for path, part in module.named_modules():
            name = f"{prefix}.{path}" if path else prefix
            self._hooks.append(part.register_forward_pre_hook(partial(self._enter, name)))
            # Checkpointing leaves a module by an exception once it has recomputed enough.
            self._hooks.append(part.register_forward_hook(self._leave, always_call=True))

    def cut(self, name: str) -> MemoryTrace:
        """Ends the current tape and begins the next; what is alive is left to later tapes under its name."""
        self._update_stage()
        for number, live in enumerate(self._alive.values()):
            live.name = live.name or f"{name}:{number}"
        trace = MemoryTrace(
            name=name,
            storages=tuple(self._as_storage(storage) for storage in self._storages),
            events=np.array(self._events, dtype=np.int32),
            work=tuple(self._as_work(stage, key, count) for (stage, key), count in self._work.items()),
        )
        for live in self._alive.values():
            live.index = -1
        self._storages, self._events, self._work, self._stage_began = [], [], {}, 0
        self._workspaces.clear()
        self._operand = None
        return trace

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation and records it.

        PyTorch finds the shapes of most results in Python, slowly; the same question is asked of it only once.
        """
        kwargs = kwargs or {}
        operator = self._operators.get(func) or self._look_up(func)
        if not operator.works:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return self._read(args[0])
        if operator.instead is not None and isinstance(args[0], Tensor) and args[0].is_meta:
            with self:
                return operator.instead(*args, **kwargs)
        key = (func, _signature(args), _signature(kwargs.values()))
        call = self._calls.get(key)
        if call is None:
            result = func(*args, **kwargs)
            call = self._calls[key] = _describe_call(func, operator, args, kwargs, result)
        elif operator.overwrites and call.seen:
            result = args[0] if call.single else None
        elif operator.fills and call.seen:
            result = kwargs["out"]
        elif call.made is None:
            result = func(*args, **kwargs)
        else:
            made = tuple(one and torch.empty_strided(*one[:2], dtype=one[2], device="meta") for one in call.made)
            result = made[0] if call.single else made
        if call.seen:
            self._update_stage()
            if operator.makes:
                self._record_results(func, args, (result,) if call.single else result)
            self._record_work(key, operator, call)
        if func is aten.any.default and args[0].untyped_storage()._cdata in self._zeros:
            self._false.add(result.untyped_storage()._cdata)
        return result

    def _read(self, tensor: Tensor) -> float:
        """The number that a program reads from the device: there is none, and but for known zeros any will do."""
        address = tensor.untyped_storage()._cdata
        if address not in self._false:
            return 1.0
        self._false.discard(address)
        return 0.0

    def _record_results(self, func: OpOverload, args: Sequence[Any], results: Sequence[Any]) -> None:
        for result in results:
            if isinstance(result, Tensor) and result.is_meta:
                storage = result.untyped_storage()
                if storage._cdata not in self._alive and storage.nbytes():
                    self._record_birth(storage)
        operand = overwritten(func, args, backward=self._stage == "backward", after_product=self._after_product)
        live = None if operand is None else self._alive.get(operand.untyped_storage()._cdata)
        self._operand = live if live is not None and live.index >= 0 else None

    def _record_work(self, key: tuple[Any, ...], operator: _Operator, call: _Call) -> None:
        """Counts an operation; takes the buffers that it needs."""
        self._after_product = operator.work == "gemm"
        if operator.allocates:
            return
        done = (self._stage, key)
        self._work[done] = self._work.get(done, 0) + 1
        for size in call.hidden:
            self._record_buffer(Storage(size, "temporary", self._module(), self._stage))
        if operator.work == "gemm":
            thread = "autograd" if self._stage in ("backward", "recompute") else "caller"
            self._record_workspace(Storage(CUBLAS_WORKSPACE, "workspace", "cublas", self._stage, f"cublas.{thread}"))
        elif operator.work == "conv":
            self._record_buffer(Storage(call.bytes, "workspace", "cudnn", self._stage))

    def _record_buffer(self, buffer: Storage) -> None:
        """A buffer that lives within one operation."""
        index = len(self._storages)
        self._storages.append(buffer)
        self._events += (index, ~index)

    def _record_workspace(self, workspace: Storage) -> None:
        """A buffer that is kept for good from its first use on."""
        if workspace.name is not None and workspace.name not in self._workspaces:
            self._workspaces.add(workspace.name)
            self._events.append(len(self._storages))
            self._storages.append(workspace)

    def _record_birth(self, storage: torch.UntypedStorage) -> _LiveStorage:
        live = _LiveStorage(storage, self._record_death)
        live.address, live.bytes = storage._cdata, storage.nbytes()
        live.kind, live.name = None, None
        live.module, live.stage = self._module(), self._stage
        live.index = len(self._storages)
        self._storages.append(live)
        self._events.append(live.index)
        self._alive[live.address] = live
        return live

    def _record_death(self, live: Any) -> None:
        if self._alive.pop(live.address, None) is None:
            return
        operand, self._operand = self._operand, None
        if operand is not None and live is operand and self._events[-1] == len(self._storages) - 1:
            self._merge_into_operand(operand)
            return
        if live.index < 0:
            live.index = len(self._storages)
            self._storages.append(live)
        self._events.append(~live.index)

    def _merge_into_operand(self, operand: _LiveStorage) -> None:
        """The latest storage was computed in place of an operand, since nothing held that any more."""
        self._events.pop()
        result_storage = self._storages.pop()
        assert isinstance(result_storage, _LiveStorage)
        self._storages[operand.index] = result_storage
        result_storage.index, result_storage.bytes = operand.index, operand.bytes
        result_storage.kind, result_storage.module, result_storage.stage, result_storage.name = (
            operand.kind,
            operand.module,
            operand.stage,
            operand.name,
        )

    def _update_stage(self) -> None:
        """Notices where autograd begins and ends, and where checkpointing recomputes within it."""
        stage = self._outer_stage
        if stage == "forward" and torch._C._current_graph_task_id() != -1:
            # No backward calls a module; a function of our own computes without gradients in its forward, too.
            recomputing = torch.is_grad_enabled() or len(self._modules) > 1
            stage = "recompute" if recomputing else "backward"
        if stage == self._stage:
            return
        if stage == "backward":  # what is left of a forward now was kept for this
            for storage in self._storages[self._stage_began :]:
                if isinstance(storage, _LiveStorage) and storage.kind is None and storage() is not None:
                    storage.kind = "activations"
        self._stage, self._stage_began = stage, len(self._storages)

    def _module(self) -> str:
        """The module at work: the one that runs, or the one whose backward it is."""
        if self._stage != "backward":
            return self._modules[-1]
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            # Nodes that put gradients into weights have no place in the order: they come after their weight's use.
            if number < torch._C._autograd._get_sequence_nr():
                self._last_node_module = self._node_modules[bisect_right(self._node_numbers, number) - 1]
        return self._last_node_module

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._modules.append(name)
        self._mark_nodes()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()
        self._mark_nodes()

    def _mark_nodes(self) -> None:
        number: int = torch._C._autograd._get_sequence_nr()
        if number == self._node_numbers[-1]:
            self._node_modules[-1] = self._modules[-1]
        else:
            self._node_numbers.append(number)
            self._node_modules.append(self._modules[-1])

    def _as_storage(self, storage: _LiveStorage | Storage) -> Storage:
        if isinstance(storage, Storage):
            return storage
        alive = storage() is not None
        kind: StorageKind = "optimizer" if alive and storage.stage == "optimizer" else "temporary"
        return Storage(storage.bytes, storage.kind or kind, storage.module, storage.stage, storage.name)

    def _as_work(self, stage: str, key: tuple[Any, ...], count: int) -> Work:
        call = self._calls[key]
        return Work(self._operators[key[0]].work, call.dtype, stage, call.flops, call.bytes, count)

    def _look_up(self, func: OpOverload) -> _Operator:
        packet = func.overloadpacket
        kind: WorkKind = "other"
        if packet in _GEMMS:
            kind = "gemm"
        elif packet in _CONVOLUTIONS:
            kind = "conv"
        elif "attention" in packet.__name__:
            kind = "attention"
        returns = func._schema.returns
        plain = torch.Tag.pointwise in func.tags or packet.__name__.startswith("_foreach")
        operator = self._operators[func] = _Operator(
            makes=bool(returns) and all(value.alias_info is None for value in returns),
            works=not is_view(func),
            allocates=is_allocation(func),
            overwrites=plain and func._schema.is_mutable and packet.__name__.endswith("_"),
            fills=packet in _GEMMS and func._overloadname == "out",
            work=kind,
            flops=flop_registry.get(packet),
            instead=_REPLACEMENTS.get(func),
        )
        return operator


@contextmanager
def recording(kernel: AttentionKernel) -> Iterator[Tracer]:
    """A tracer at work, with the operations of a card whose attention is computed by ``kernel``.

    PyTorch's functions are exchanged meanwhile, so nothing else may compute in this process.
    """
    tracer = Tracer()
    collecting = gc.isenabled()
    gc.disable()  # what hangs in cycles would otherwise die at moments that depend on what ran before
    try:
        with as_on_cuda(kernel), tracer:
            yield tracer
    finally:
        tracer.close()
        if collecting:
            gc.enable()


def _signature(values: Iterable[Any]) -> tuple[Any, ...]:
    """All of an operation's arguments that its results' shapes may depend on."""
    facts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            facts.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif isinstance(value, (tuple, list)):
            facts.append(_signature(value))
        else:
            facts.append((value.__class__, value))
    return tuple(facts)


def _describe_call(
    func: OpOverload, operator: _Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> _Call:
    results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    inputs = [tensor for tensor in (*_tensors(args), *_tensors(kwargs.values())) if tensor.is_meta]
    outputs = [tensor for tensor in _tensors(results) if tensor.is_meta]
    tensors = [*outputs, *inputs]
    if not tensors:
        return _Call(False, None, False, (), "", 0, 0)
    return _Call(
        seen=True,
        made=_result_specs(results, inputs) if operator.makes else None,
        single=isinstance(result, Tensor),
        hidden=hidden_bytes(func, args),
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        flops=operator.flops(*args, **kwargs, out_val=result) if operator.flops else 0,
        bytes=sum(tensor.numel() * tensor.itemsize for tensor in tensors) - _output_argument_bytes(outputs, kwargs),
    )


def _output_argument_bytes(outputs: Sequence[Tensor], kwargs: Mapping[str, Any]) -> int:
    """Bytes of what is an argument only to be written to (`out`): it is among the results already."""
    places = [tensor for tensor in _tensors(kwargs.values()) if any(tensor is one for one in outputs)]
    return sum(tensor.numel() * tensor.itemsize for tensor in places)


def _result_specs(results: Sequence[Any], inputs: Sequence[Tensor]) -> tuple[_TensorSpec | None, ...] | None:
    """How to make the results again; None where they are not new tensors on meta, each whole in its storage."""
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    made: list[_TensorSpec | None] = []
    for tensor in results:
        if tensor is None:
            made.append(None)
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_meta:
            return None
        one = _TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        again = torch.empty_strided(*one[:2], dtype=one[2], device="meta").untyped_storage().nbytes()
        storage = tensor.untyped_storage()
        if storage._cdata in storages or storage.nbytes() != again or tensor.storage_offset():
            return None
        storages.add(storage._cdata)
        made.append(one)
    return tuple(made)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
