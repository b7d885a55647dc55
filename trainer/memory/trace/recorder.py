"""Record allocations and frees of meta-tensor storages, and the operations between them, as memory traces."""

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
    convolution_operands,
    gemm_4bit,
    hidden_bytes,
    overwritten,
    safe_softmax,
)
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, StorageKind, Work, WorkKind
from trainer.training.acceleration.throughput import is_allocation, is_view

aten = torch.ops.aten

Times = Callable[[str], int]
"""Function that returns how many operations one in a module, or on a module's weight, stands for."""

# cuBLAS allocates one workspace for each thread that multiplies matrices (the caller's and autograd's) and keeps it.
# Its size depends on the GPU: this is the size on consumer GPUs, and a replay replaces it with the right one.
CUBLAS_WORKSPACE = 8_519_680

_GEMMS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._int_mm}
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
# Composite operations that must be traced in parts: below autograd they are one operation, whose buffers are invisible.
_REPLACEMENTS: dict[OpOverload, Callable[..., Any]] = {
    aten._safe_softmax.default: safe_softmax,
    torch.ops.bitsandbytes.gemm_4bit.default: gemm_4bit,
}


_TRUTHS = {aten.any.default, aten.gt.Scalar, aten.eq.Scalar}
"""Operations whose single results tell optimizers whether there is anything to do."""


class _LiveStorage(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a live storage, with the properties that go into the trace.

    It does not keep the storage alive, and its callback runs at the moment when the storage is freed.
    """

    __slots__ = ("address", "bytes", "index", "kind", "module", "name", "stage")

    # Both are from the allocation, because a freed storage can no longer be queried.
    address: int
    bytes: int
    index: int
    """Index in the current trace; -1 if the trace does not contain the storage yet."""
    kind: StorageKind | None
    module: str
    name: str | None
    stage: str


class _Operator(NamedTuple):
    """Properties of an operator that do not depend on its arguments."""

    returns_new: bool
    """Whether all results are newly allocated."""
    touches_memory: bool
    """Whether the operator touches memory; views do not."""
    allocates: bool
    """Whether the operator only allocates memory, which launches no kernel on a GPU."""
    in_place: bool
    """Whether the operator is elementwise and in place and can thus be skipped on meta tensors."""
    writes_out: bool
    """Whether the operator is a matrix product with an ``out`` argument, which can also be skipped on meta tensors."""
    work: WorkKind
    flops: Callable[..., int] | None
    replacement: Callable[..., Any] | None
    """Function to call instead of the operator; None for most operators."""


class _Call(NamedTuple):
    """Properties of an operator called with certain shapes."""

    on_meta: bool
    """Whether any argument or result is a meta tensor."""
    made: tuple[_TensorSpec | None, ...] | None
    """Specs of the results, from which later calls recreate them without PyTorch; None unless all results are new."""
    single: bool
    """Whether the call returns a single tensor instead of a tuple."""
    hidden: tuple[int, ...]
    """Bytes of each temporary buffer that the CUDA kernel allocates."""
    workspaces: tuple[int, ...]
    """Bytes of the operands of each convolution that cuDNN runs."""
    dtype: str
    flops: int
    bytes: int
    """Bytes read and written."""


class _TensorSpec(NamedTuple):
    """Shape, stride and dtype of a new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the storages of meta tensors and the work of every operation.

    Storages on other devices are ignored. The operations between two calls of :meth:`cut` form one trace; equal
    operations result in equal traces. cuDNN's buffer for a convolution is a storage of kind "workspace" and module
    "cudnn", as large as the three operands together. cuBLAS's workspaces have names and the module "cublas".
    """

    def __init__(self, times: Times | None = None) -> None:
        """Create a tracer; without ``times``, each operation counts once."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._times = times
        self.placing = ""
        """Path of the weight that is being placed, which stands for a module in ``times``."""
        self._operators: dict[OpOverload, _Operator] = {}
        self._calls: dict[tuple[Any, ...], _Call] = {}
        # By address, which PyTorch may reuse as soon as a storage is freed, so entries must be removed at that moment.
        self._alive: dict[int, _LiveStorage] = {}
        self._storages: list[_LiveStorage | Storage] = []
        self._events: list[int] = []
        self._work: dict[tuple[Any, ...], int] = {}
        self._copies: dict[tuple[str, int], int] = {}
        """Number of copies from main memory, by stage and bytes."""
        self._workspaces: set[str] = set()
        self._outer_stage = ""
        self._stage = ""
        self._stage_began = 0
        self._operand: _LiveStorage | None = None
        """Storage that the latest result takes over if that storage is freed next: CUDA then computes in place."""
        self._after_product = False
        # Addresses of storages that hold only zeros, and of the results of `any` on them.
        self._zeros: set[int] = set()
        self._false: set[int] = set()
        self._modules: list[str] = [""]
        # Parallel lists: autograd nodes numbered from _node_numbers[i] on were created while _node_modules[i] ran.
        self._node_numbers = [0]
        self._node_modules = [""]
        self._last_node_module = ""
        self._counted = ""
        self._hooks: list[Any] = []

    def close(self) -> None:
        """Remove the hooks from the watched modules and stop tracking all storages."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._alive.clear()

    def label(self, tensor: Tensor, kind: StorageKind, module: str, name: str | None = None) -> None:
        """Label a tensor's storage; if it is not known yet, record its allocation now.

        ``name`` identifies it in later traces, unless it already has a name. Names of live storages must be unique.
        """
        storage = tensor.untyped_storage()
        live = self._alive.get(storage._cdata) or self._record_birth(storage)
        live.kind, live.module = kind, module
        live.name = live.name or name

    def record_free(self, tensor: Tensor) -> None:
        """Record that a known storage's memory was freed although the storage is still referenced."""
        live = self._alive.get(tensor.untyped_storage()._cdata)
        if live is not None:
            self._record_death(live)

    def record_copy(self, size: int) -> None:
        """Record a copy of ``size`` bytes from main memory to the GPU."""
        self._update_stage()
        key = (self._stage, size)
        self._copies[key] = self._copies.get(key, 0) + 1

    def mark_zero(self, tensor: Tensor) -> None:
        """Mark a tensor as all zeros, so that code that checks its values with ``any`` reads False."""
        self._zeros.add(tensor.untyped_storage()._cdata)

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage is alive and known to the tracer."""
        return tensor.untyped_storage()._cdata in self._alive

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Set the stage during the block; within "forward", autograd's work is labeled "backward" or "recompute"."""
        outer, self._outer_stage = self._outer_stage, name
        try:
            yield
        finally:
            self._outer_stage = outer

    def watch(self, prefix: str, module: nn.Module) -> None:
        """Attribute storages to the submodule whose forward or backward allocates them."""
        for path, part in module.named_modules():
            if isinstance(part, (nn.ModuleDict, nn.ModuleList, nn.ParameterDict)):
                continue  # never run; with PEFT's layers they are half of all modules
            name = f"{prefix}.{path}" if path else prefix
            self._hooks.append(part.register_forward_pre_hook(partial(self._enter, name)))
            # always_call: checkpointing leaves a module through an exception when it has recomputed enough.
            self._hooks.append(part.register_forward_hook(self._leave, always_call=True))

    def cut(self, name: str) -> MemoryTrace:
        """End and return the current trace, and begin the next one.

        Storages that are still live get names, by which later traces can free them.
        """
        self._update_stage()
        # A storage without a name gets one here, since a later trace can free it only by name.
        number = 0
        for live in self._alive.values():
            live.name = live.name or f"{name}:{number}"
            number += 1 if self._times is None else self._times(live.module)
        trace = MemoryTrace(
            name=name,
            storages=tuple(self._as_storage(storage) for storage in self._storages),
            events=np.array(self._events, dtype=np.int32),
            work=(
                *(self._as_work(stage, key, count) for (stage, key), count in self._work.items()),
                *(Work("copy", "uint8", stage, 0, size, count) for (stage, size), count in self._copies.items()),
            ),
        )
        for live in self._alive.values():
            live.index = -1
        self._storages, self._events, self._work, self._copies, self._stage_began = [], [], {}, {}, 0
        self._workspaces.clear()
        self._operand = None
        return trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, to spare each operation a wrapper; nothing is compiled while traces are recorded."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and record it.

        On meta tensors, equal arguments give equal results. Therefore, PyTorch runs only the first of many equal calls:
        it computes most result shapes in Python, which is slow.
        """
        kwargs = kwargs or {}
        operator = self._operators.get(func) or self._look_up(func)
        if not operator.touches_memory:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            # The code reads a number from the GPU, such as `if tensor.any()`. There is none on meta.
            return self._read(args[0])
        if operator.replacement is not None and isinstance(args[0], Tensor) and args[0].is_meta:
            with self:  # a mode is inactive inside its own handler: without this the parts would not be recorded
                return operator.replacement(*args, **kwargs)
        key = (func, _signature(args), _signature(kwargs.values()))
        call = self._calls.get(key)
        if call is None:
            result = func(*args, **kwargs)
            call = self._calls[key] = _describe_call(func, operator, args, kwargs, result)
        elif operator.in_place and call.on_meta:
            result = args[0] if call.single else None
        elif operator.writes_out and call.on_meta:
            result = kwargs["out"]
        elif call.made is None:
            result = func(*args, **kwargs)
        else:
            # Each result has a storage of its own (see _result_specs), as the real call would have.
            made = tuple(one and torch.empty_strided(*one[:2], dtype=one[2], device="meta") for one in call.made)
            result = made[0] if call.single else made
        if call.on_meta:
            self._update_stage()
            if operator.returns_new:
                self._record_results(func, args, (result,) if call.single else result)
            self._record_work(key, operator, call)
        if func in _TRUTHS and self._is_false(func, args):
            self._false.add(result.untyped_storage()._cdata)
        return result

    def _is_false(self, func: OpOverload, args: Sequence[Any]) -> bool:
        """Return whether a truth value that an optimizer may read is false, if numbers are 1 unless known to be 0.

        That is `any` of zeros, such a result > 0, and any other single number == 0.
        """
        address = args[0].untyped_storage()._cdata
        if func is aten.any.default:
            return address in self._zeros
        if self._stage != "optimizer" or args[0].numel() != 1 or args[1] != 0:
            return False
        known = address in self._false
        self._false.discard(address)
        return known == (func is aten.gt.Scalar)

    def _read(self, tensor: Tensor) -> float:
        """Return a substitute for a number that code reads from the device: 0 for known zeros, otherwise 1."""
        address = tensor.untyped_storage()._cdata
        if address not in self._false:
            return 1.0
        self._false.discard(address)
        return 0.0

    def _record_results(self, func: OpOverload, args: Sequence[Any], results: Sequence[Any]) -> None:
        """Record the allocation of an operation's results, and remember the operand that CUDA might overwrite.

        CUDA overwrites the operand only if nothing else refers to it. In that case, the operand is the next storage to
        be freed, right after the operation; _record_death checks this.
        """
        for result in results:
            if isinstance(result, Tensor) and result.is_meta:
                storage = result.untyped_storage()
                if storage._cdata not in self._alive and storage.nbytes():
                    self._record_birth(storage)
        operand = overwritten(func, args, backward=self._stage == "backward", after_product=self._after_product)
        live = None if operand is None else self._alive.get(operand.untyped_storage()._cdata)
        self._operand = live if live is not None and live.index >= 0 else None

    def _record_work(self, key: tuple[Any, ...], operator: _Operator, call: _Call) -> None:
        """Count an operation, and record the buffers and workspaces that it needs."""
        self._after_product = operator.work == "gemm"
        if operator.allocates:
            return
        done = (self._stage, key)
        self._work[done] = self._work.get(done, 0) + (1 if self._times is None else self._times(self._counted_module()))
        for size in call.hidden:
            self._record_buffer(Storage(size, "temporary", self._module(), self._stage))
        # Backward and recomputation run on autograd's thread, whose cuBLAS handle has a workspace of its own.
        if operator.work == "gemm":
            thread = "autograd" if self._stage in ("backward", "recompute") else "caller"
            self._record_workspace(Storage(CUBLAS_WORKSPACE, "workspace", "cublas", self._stage, f"cublas.{thread}"))
        elif operator.work == "conv":
            for size in call.workspaces:
                self._record_buffer(Storage(size, "workspace", "cudnn", self._stage))

    def _record_buffer(self, buffer: Storage) -> None:
        """Record a buffer that exists only during one operation."""
        index = len(self._storages)
        self._storages.append(buffer)
        self._events += (index, ~index)

    def _record_workspace(self, workspace: Storage) -> None:
        """Record a workspace at its first use; it is never freed."""
        if workspace.name is not None and workspace.name not in self._workspaces:
            self._workspaces.add(workspace.name)
            self._events.append(len(self._storages))
            self._storages.append(workspace)

    def _record_birth(self, storage: torch.UntypedStorage) -> _LiveStorage:
        """Record the allocation of a new storage now and its deallocation when PyTorch frees it.

        Return a reference to the storage.
        """
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
        """Record that a storage was freed; called by its weak reference."""
        if id(self._alive.get(live.address)) != id(live):  # freed before, by `record_free`
            return
        del self._alive[live.address]
        # Only a free right after the result's allocation counts: with any other event in between, something else held
        # the operand while the result was computed, and CUDA would have allocated a new tensor.
        operand, self._operand = self._operand, None
        if operand is not None and live is operand and self._events[-1] == len(self._storages) - 1:
            self._merge_into_operand(operand)
            return
        # Allocated in an earlier trace: listed here, so the replay can find it by its name.
        if live.index < 0:
            live.index = len(self._storages)
            self._storages.append(live)
        self._events.append(~live.index)

    def _merge_into_operand(self, operand: _LiveStorage) -> None:
        """Let the latest result use the memory of an operand that nothing else refers to.

        Operand and result become one storage: the result's allocation and the operand's deallocation are removed.
        """
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
        """Update the stage when autograd begins or ends, or when checkpointing recomputes within it.

        Autograd signals neither, so this is checked before each recorded operation.
        """
        stage = self._outer_stage
        if stage == "forward" and torch._C._current_graph_task_id() != -1:
            # Backward itself runs no module and computes without gradients. Our own autograd functions also compute
            # without gradients while checkpointing recomputes them, but then a module is running.
            recomputing = torch.is_grad_enabled() or len(self._modules) > 1
            stage = "recompute" if recomputing else "backward"
        if stage == self._stage:
            return
        if stage == "backward":  # whatever the forward has not freed by now was saved for backward
            for storage in self._storages[self._stage_began :]:
                if isinstance(storage, _LiveStorage) and storage.kind is None and storage() is not None:
                    storage.kind = "activations"
        self._stage, self._stage_began = stage, len(self._storages)

    def _module(self) -> str:
        """Return the path of the module that is running, or whose backward is running."""
        if self._stage != "backward":
            return self._modules[-1]
        module = self._module_of_node()
        if module is not None:
            self._last_node_module = module
        return self._last_node_module

    def _module_of_node(self) -> str | None:
        """Return the module that created the autograd node that is running; None if that is unknown."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        # Autograd numbers nodes in the order of their creation, from which follows the module that created this one.
        number = node._sequence_nr()
        # Nodes that accumulate weight gradients have the highest possible number: they keep the module before them.
        if number >= torch._C._autograd._get_sequence_nr():
            return None
        return self._node_modules[bisect_right(self._node_numbers, number) - 1]

    def _counted_module(self) -> str:
        """Return the module or weight to count an operation for, even where storages belong to none.

        What a node of autograd recomputes by itself, and the backward of that, counts for the module of the node.
        """
        if self.placing:
            return self.placing
        if self._stage not in ("backward", "recompute") or len(self._modules) > 1:
            return self._modules[-1]
        self._counted = self._module_of_node() or self._counted
        return self._counted

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._modules.append(name)
        self._mark_nodes()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()
        self._mark_nodes()

    def _mark_nodes(self) -> None:
        """Remember that autograd nodes created from now on belong to the innermost running module."""
        number: int = torch._C._autograd._get_sequence_nr()
        if number == self._node_numbers[-1]:
            self._node_modules[-1] = self._modules[-1]
        else:
            self._node_numbers.append(number)
            self._node_modules.append(self._modules[-1])

    def _as_storage(self, storage: _LiveStorage | Storage) -> Storage:
        """Return a storage as it appears in the trace, of kind "optimizer" if it outlives the optimizer step."""
        if isinstance(storage, Storage):
            return storage
        alive = storage() is not None
        kind: StorageKind = "optimizer" if alive and storage.stage == "optimizer" else "temporary"
        return Storage(storage.bytes, storage.kind or kind, storage.module, storage.stage, storage.name)

    def _as_work(self, stage: str, key: tuple[Any, ...], count: int) -> Work:
        call = self._calls[key]
        return Work(self._operators[key[0]].work, call.dtype, stage, call.flops, call.bytes, count)

    def _look_up(self, func: OpOverload) -> _Operator:
        """Determine the properties of an operator from its schema, cache and return them."""
        packet = func.overloadpacket
        kind: WorkKind = "other"
        if packet in _GEMMS:
            kind = "gemm"
        elif packet in _CONVOLUTIONS:
            kind = "conv"
        elif "attention" in packet.__name__:
            kind = "attention"
        # A result with alias information is a view of an argument, or the argument itself.
        returns = func._schema.returns
        # Only these in-place operations change values alone; others, such as resize_, may change the storage.
        plain = torch.Tag.pointwise in func.tags or packet.__name__.startswith("_foreach")
        operator = self._operators[func] = _Operator(
            returns_new=bool(returns) and all(value.alias_info is None for value in returns),
            touches_memory=not is_view(func),
            allocates=is_allocation(func),
            in_place=plain and func._schema.is_mutable and packet.__name__.endswith("_"),
            writes_out=packet in _GEMMS and func._overloadname == "out",
            work=kind,
            flops=flop_registry.get(packet),
            replacement=_REPLACEMENTS.get(func),
        )
        return operator


@contextmanager
def recording(kernel: AttentionKernel, times: Times | None = None) -> Iterator[Tracer]:
    """Yield an active tracer; operations allocate as on a GPU that computes attention with ``kernel``.

    ``times`` is as in `Tracer`.

    This replaces functions of PyTorch for the whole process, so nothing else may use PyTorch during the block.
    """
    tracer = Tracer(times)
    collecting = gc.isenabled()
    gc.disable()  # otherwise storages in reference cycles would be freed at unpredictable moments
    try:
        with as_on_cuda(kernel), tracer:
            yield tracer
    finally:
        tracer.close()
        if collecting:
            gc.enable()


def _signature(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return everything about an operation's arguments that its results may depend on."""
    facts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            facts.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif isinstance(value, (tuple, list)):
            facts.append(_signature(value))
        else:
            # The class too: 1, 1.0 and True are equal, but give results of different dtypes.
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
        return _Call(False, None, False, (), (), "", 0, 0)
    return _Call(
        on_meta=True,
        made=_result_specs(results, inputs) if operator.returns_new else None,
        single=isinstance(result, Tensor),
        hidden=hidden_bytes(func, args),
        workspaces=convolution_operands(func, args, outputs) if operator.work == "conv" else (),
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        flops=operator.flops(*args, **kwargs, out_val=result) if operator.flops else 0,
        bytes=sum(tensor.numel() * tensor.itemsize for tensor in tensors) - _output_argument_bytes(outputs, kwargs),
    )


def _output_argument_bytes(outputs: Sequence[Tensor], kwargs: Mapping[str, Any]) -> int:
    """Return the bytes of ``out`` arguments, which are also results and would otherwise be counted twice."""
    places = [tensor for tensor in _tensors(kwargs.values()) if any(tensor is one for one in outputs)]
    return sum(tensor.numel() * tensor.itemsize for tensor in places)


def _result_specs(results: Sequence[Any], inputs: Sequence[Tensor]) -> tuple[_TensorSpec | None, ...] | None:
    """Return specs to recreate results; None unless each is a new meta tensor that fills its own storage."""
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
