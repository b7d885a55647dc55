"""CUDA graphs for micro-batches: forward and backward are captured once per shape, then replayed (experimental).

With small batches the GPU waits for the host, which launches thousands of kernels per step; a replay is a single
launch. It repeats exactly what was captured: the same kernels, the same addresses, the same Python numbers. Therefore
everything that changes from step to step (the micro-batch, the loss scale) is copied into fixed tensors before each
replay, random numbers are drawn outside the graph (except for dropout, whose generator graphs support), and gradients
accumulate in the master weights' `.grad`, whose addresses stay fixed (docs/decisions/0018).

The gain has not been measured on a GPU yet. Forecasts include the memory that graphs need
(trainer.memory.forecast.schedule).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from trainer.config.fit import MAX_CUDA_GRAPHS, FitConfig
from trainer.training.device.offload import empty_cache
from trainer.training.device.out_of_memory import is_out_of_memory
from trainer.training.engine import Engine
from trainer.training.step import MicroBatch

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest allowed norm-relative difference between eager and replayed gradients; atomic sums have no fixed order.

Generous: a wrong graph is off by about 1. In deterministic mode the difference must be 0."""

OnNotice = Callable[[str, str], object]
"""Callback that receives a notice for the user: its code and its sentence."""
Shape = tuple[torch.Size, ...]
# In older versions a failed capture left PyTorch's allocator unusable: https://github.com/pytorch/pytorch/pull/180395
MIN_TORCH = "2.13"


@dataclass(frozen=True)
class CudaRecording:
    """A captured CUDA graph with its output tensor, which each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


class CudaRecorder:
    """Captures CUDA graphs as described under "Whole-network capture" in PyTorch's notes on CUDA semantics.

    All recordings share one memory pool, so only one may be replayed at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], Tensor]) -> CudaRecording:
        """Run ``work`` once on a side stream to warm up, then capture it there; may raise any exception."""
        outside = torch.cuda.current_stream(self.device)
        empty_cache(self.device)  # cached blocks belong to one stream, so the side stream could not reuse them
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(outside)
            # The warm-up initializes cuBLAS and cuDNN and lets them choose kernels, which is not allowed in a capture.
            with torch.cuda.stream(self._stream):
                work()
            outside.wait_stream(self._stream)
            # The prefetch thread may pin host memory during this; in the default mode "global" that aborts the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = work()
        finally:
            torch.cuda.set_stream(outside)  # after a failed capture PyTorch leaves the side stream current
        return CudaRecording(graph, result)


RECORDERS: dict[str, Callable[[torch.device], CudaRecorder]] = {"cuda": CudaRecorder}
"""Recorder class by device type; other device types always run eagerly."""


def make_graphs(fit: FitConfig, device: torch.device, tell: OnNotice) -> GraphedSteps | None:
    """Return the graphs for a run if its job requests them and its device supports them; None otherwise."""
    recorder = RECORDERS.get(device.type)
    if not fit.cuda_graphs or recorder is None:
        return None
    if torch.__version__ < MIN_TORCH:  # a TorchVersion: compares by number, not as text
        tell(
            "graphs",
            f"fit.cuda_graphs needs PyTorch {MIN_TORCH} or newer, but {torch.__version__} is installed, "
            "so the run continues without CUDA graphs. Install a newer PyTorch to use them.",
        )
        return None
    return GraphedSteps(lambda: recorder(device), tell)


@dataclass(frozen=True)
class _Graph:
    """CUDA graph of one micro-batch shape, with its fixed input tensors."""

    inputs: MicroBatch
    scale: Tensor
    recording: CudaRecording

    @classmethod
    def of(cls, engine: Engine, micro: MicroBatch, recorder: CudaRecorder) -> _Graph:
        """Return a captured graph for micro-batches with the shape of ``micro``."""
        inputs = micro.to(engine.device, copy=True)
        scale = torch.full((), engine.loss_scale, device=engine.device)
        return cls(inputs, scale, recorder.record(lambda: _run_eagerly(engine, inputs, scale)))

    def replay(self, micro: MicroBatch, loss_scale: float) -> Tensor:
        """Copy ``micro`` into the fixed inputs and replay; the returned loss is valid until the next replay."""
        for fixed, current in zip(self.inputs.tensors(), micro.tensors(), strict=True):
            fixed.copy_(current, non_blocking=True)
        self.scale.fill_(loss_scale)
        self.recording.replay()
        return self.recording.result


class GraphedSteps:
    """Runs micro-batches through CUDA graphs.

    The first micro-batch of each shape runs eagerly, the second is captured, and later ones are replayed. A graph is
    used only if its first replay gives the same gradients as an eager pass over the same micro-batch. If a capture
    fails or its results differ, that is reported once, and the micro-batches affected run eagerly.
    """

    def __init__(self, recorders: Callable[[], CudaRecorder], tell: OnNotice) -> None:
        self._recorders = recorders
        self._tell = tell
        self._recorder: CudaRecorder | None = None
        self._graphs: dict[Shape, _Graph] = {}
        self._seen: set[Shape] = set()
        self._refused: set[Shape] = set()  # graphs of these shapes gave wrong gradients
        self._enabled = True
        self._reported: set[str] = set()
        self._weights: list[tuple[Tensor, int]] = []
        self._gradients: list[Tensor] = []

    def run(self, engine: Engine, micro: MicroBatch) -> Tensor:
        """Add the micro-batch's gradients to those of the master weights and return its loss; see StepRecorder."""
        shape = tuple(tensor.shape for tensor in micro.tensors())
        # Checked before every replay; costs a comparison per weight on the host, without waiting for the GPU.
        if self._graphs and not self._is_unmoved(engine):
            self.forget()
        if shape in self._graphs:
            return self._graphs[shape].replay(micro, engine.loss_scale)
        if self._should_capture(engine, shape):
            return self._run_and_capture(engine, micro, shape)
        self._seen.add(shape)
        return _run_eagerly(engine, micro)

    def forget(self) -> None:
        """Free all graphs; each known shape is captured again at its next micro-batch."""
        self._graphs.clear()
        # PyTorch forbids another capture into a pool whose graphs are all deleted: the next one needs a new pool.
        self._recorder = None
        self._weights, self._gradients = [], []

    def give_up(self) -> None:
        """Free all graphs and stop capturing for good, because memory ran out."""
        if self.in_use:
            self._report("GPU memory ran out, so CUDA graphs are off and their memory is released")
        self._turn_off()

    def _turn_off(self) -> None:
        self.forget()
        self._enabled = False

    @property
    def in_use(self) -> bool:
        """Return whether any graph exists or may still be captured."""
        return self._enabled or bool(self._graphs)

    def _should_capture(self, engine: Engine, shape: Shape) -> bool:
        # The first micro-batch of a run allocates the gradients; before that they have no fixed address.
        wanted = self._enabled and shape in self._seen and shape not in self._refused
        return wanted and len(self._graphs) < MAX_CUDA_GRAPHS and bool(engine.master_weights.gradients())

    def _run_and_capture(self, engine: Engine, micro: MicroBatch, shape: Shape) -> Tensor:
        """Run the micro-batch eagerly, then try to capture it; the step uses the eager gradients whatever happens.

        Needs memory for three sets of gradients: from earlier micro-batches, the eager pass and the replay.
        """
        gradients, seed = engine.master_weights.gradients(), torch.initial_seed()
        accumulated = _copies(gradients)
        torch._foreach_zero_(gradients)
        loss = _run_eagerly(engine, micro)
        eager = _copies(gradients)
        if math.isfinite(norm := _norm(eager)) and norm:  # with gradients of 0 or NaN there is nothing to compare
            torch.manual_seed(seed)  # so that dropout draws the same masks again
            self._capture(engine, micro, shape, [loss, *eager])
        if not self._enabled:  # not earlier: the failed graph was still referenced
            empty_cache(engine.device)
        torch._foreach_copy_(gradients, eager)
        torch._foreach_add_(gradients, accumulated)
        return loss

    def _capture(self, engine: Engine, micro: MicroBatch, shape: Shape, eager: Sequence[Tensor]) -> None:
        """Capture the micro-batch; keep the graph if it reproduces the loss and gradients in ``eager``."""
        seed = torch.initial_seed()
        try:
            self._recorder = self._recorder or self._recorders()
            graph = _Graph.of(engine, micro, self._recorder)
            torch.manual_seed(seed)
            engine.master_weights.zero_grad(keep=True)  # the warm-up before the capture added its gradients
            loss = graph.replay(micro, engine.loss_scale)
            difference = _relative_difference([loss, *engine.master_weights.gradients()], eager)
        except Exception as error:  # noqa: BLE001 (captures fail in many ways)
            engine.master_weights.zero_grad(keep=True)
            self._fail(error)
            return
        exact = torch.are_deterministic_algorithms_enabled()
        if not difference <= (0.0 if exact else TOLERANCES.get(engine.models.dtype, 0.0)):
            self._refused.add(shape)
            self._report(f"gradients of a CUDA graph differ from those of a normal step by {100 * difference:.3g}%")
            return
        self._graphs[shape] = graph
        self._remember_addresses(engine)

    def _fail(self, error: Exception) -> None:
        if is_out_of_memory(error):
            self._report(
                "GPU memory ran out while a CUDA graph was captured, so CUDA graphs are off; PyTorch may hold that "
                "memory until the run is paused and resumed"
            )
            self._turn_off()
            return
        self._enabled = False
        message = (str(error).splitlines() or [""])[0]
        self._report(f"capturing a CUDA graph failed ({type(error).__name__}: {message})")

    def _remember_addresses(self, engine: Engine) -> None:
        """Remember the weights' addresses and the gradient tensors, which graphs read and write directly."""
        models = (engine.models.unet, *engine.models.text_encoders)
        weights = chain.from_iterable((*model.parameters(), *model.buffers()) for model in models)
        self._weights = [(weight, weight.data_ptr()) for weight in weights]
        self._gradients = engine.master_weights.gradients()

    def _is_unmoved(self, engine: Engine) -> bool:
        """Return whether weights and gradients are still at the addresses that the graphs use.

        Previews may have offloaded the UNet and loaded it back. A replay would then read and write freed memory.
        """
        gradients = engine.master_weights.gradients()
        return (
            len(gradients) == len(self._gradients)
            and all(now is before for now, before in zip(gradients, self._gradients, strict=True))
            and all(weight.data_ptr() == address for weight, address in self._weights)
        )

    def _report(self, message: str) -> None:
        """Report a message to the user unless it was reported before."""
        if message not in self._reported:
            self._reported.add(message)
            self._tell("graphs", f"fit.cuda_graphs: {message}. Affected steps run normally, without a CUDA graph.")


def _run_eagerly(engine: Engine, micro: MicroBatch, scale: Tensor | None = None) -> Tensor:
    """Run forward and backward of a micro-batch eagerly; add its gradients to those of the master weights."""
    loss = engine.micro_step(micro, scale)
    engine.master_weights.accumulate()
    return loss


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the joint norm of all tensors; waits for the device."""
    return float(torch.stack([tensor.double() for tensor in torch._foreach_norm(list(tensors))]).norm())


def _relative_difference(replayed: Sequence[Tensor], eager: Sequence[Tensor]) -> float:
    """Return the norm-relative difference of the loss or of all gradients, whichever is larger."""
    differences = torch._foreach_sub(list(replayed), list(eager))
    return max(_norm(differences[:1]) / (_norm(eager[:1]) or 1.0), _norm(differences[1:]) / _norm(eager[1:]))
