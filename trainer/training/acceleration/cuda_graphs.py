"""Forward and backward of a micro-batch recorded once for each shape and then replayed at once: CUDA graphs.

At small batches a card waits for the host, which gives it thousands of orders a step; a replay is one order. It does
exactly what was recorded: the same kernels, on the same addresses, with the same numbers where those stood in the
program. So all that changes from step to step lies in memory which is written before each replay (the micro-batch, the
loss scale), chance is drawn outside (dropouts by the device's own generator, which replays follow), and gradients are
added up in the masters, which keep them in one place (docs/decisions/0018).

An experiment until a GPU has shown what it gains; the forecast counts the memory it takes
(trainer.memory.forecast.schedule).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from trainer.config.fit import MOST_GRAPHS, FitConfig
from trainer.training.device.offload import release
from trainer.training.device.out_of_memory import is_out_of_memory
from trainer.training.loop import Engine
from trainer.training.step import MicroBatch

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Norm-relative: by how much gradients of two plain runs may differ where sums have no fixed order, taken widely. What
is recorded wrongly is off by about 1. In deterministic mode nothing may differ."""

Tell = Callable[[str, str], object]
"""Called with a code and a sentence for the user."""
Shape = tuple[torch.Size, ...]
# Before, a recording that failed left PyTorch's allocator unusable: https://github.com/pytorch/pytorch/pull/180395
MINIMUM = "2.13"


class Recording(Protocol):
    """Work that can be done again."""

    @property
    def result(self) -> Tensor:
        """What the work gave; each replay writes it anew."""

    def replay(self) -> None:
        """Does all of it again, on what now lies in the memory that it reads."""


class Recorder(Protocol):
    """Makes recordings, of which one is replayed at a time: they share the memory in which they compute."""

    def record(self, work: Callable[[], Tensor]) -> Recording:
        """Records ``work``, which is done for that once or several times. May fail in any way."""


@dataclass(frozen=True)
class CudaRecording:
    """A CUDA graph."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> None:
        """On the stream that is in use."""
        self.graph.replay()


class CudaRecorder:
    """Records CUDA graphs as PyTorch's notes on CUDA semantics have it ("Whole-network capture")."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], Tensor]) -> Recording:
        """Does ``work`` once on a stream of its own, and records it there."""
        outside = torch.cuda.current_stream(self.device)
        release(self.device)  # what is cached for one stream serves no other
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                work()
            outside.wait_stream(self._stream)
            # "thread_local": beside it a thread goes on with the next micro-batch and pins memory for it.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = work()
        finally:
            torch.cuda.set_stream(outside)  # where recording fails PyTorch leaves its own in place
        return CudaRecording(graph, result)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""By the kind of device; others take every operation as it comes."""


def graphs_of(fit: FitConfig, device: torch.device, tell: Tell) -> RecordedSteps | None:
    """What records the steps of a run, where its job asks for it and its device can."""
    recorder = RECORDERS.get(device.type)
    if not fit.graphs or recorder is None:
        return None
    if torch.__version__ < MINIMUM:  # which PyTorch compares number by number
        tell(
            "graphs",
            f"fit.graphs needs PyTorch {MINIMUM} or newer, and this is {torch.__version__}: steps are computed as "
            "without it. Install a newer one to have them recorded.",
        )
        return None
    return RecordedSteps(lambda: recorder(device), tell)


@dataclass(frozen=True)
class _Graph:
    """The step of one shape."""

    still: MicroBatch
    scale: Tensor
    recording: Recording

    @classmethod
    def of(cls, engine: Engine, micro: MicroBatch, recorder: Recorder) -> _Graph:
        still = micro.to(engine.device, copy=True)
        scale = torch.full((), engine.loss_scale, device=engine.device)
        return cls(still, scale, recorder.record(lambda: _plainly(engine, still, scale)))

    def replay(self, micro: MicroBatch, loss_scale: float) -> Tensor:
        for kept, given in zip(self.still.tensors(), micro.tensors(), strict=True):
            kept.copy_(given, non_blocking=True)
        self.scale.fill_(loss_scale)
        self.recording.replay()
        return self.recording.result


class RecordedSteps:
    """Learns from micro-batches: the first of a shape plainly, the second too and recorded, the others by replays.

    A recording is used once its first replay has given what the same micro-batch gave plainly. What fails or differs
    is told and goes on plainly.
    """

    def __init__(self, recorders: Callable[[], Recorder], tell: Tell) -> None:
        self._recorders = recorders
        self._tell = tell
        self._recorder: Recorder | None = None
        self._graphs: dict[Shape, _Graph] = {}
        self._shown: set[Shape] = set()
        self._refused: set[Shape] = set()
        self._records = True
        self._told: set[str] = set()
        self._weights: list[tuple[Tensor, int]] = []
        self._gradients: list[Tensor] = []

    def learn(self, engine: Engine, micro: MicroBatch) -> Tensor:
        """See trainer.training.loop.StepRecorder."""
        shape = tuple(tensor.shape for tensor in micro.tensors())
        if self._graphs and not self._in_place(engine):
            self.forget()
        if shape in self._graphs:
            return self._graphs[shape].replay(micro, engine.loss_scale)
        if self._is_worth_it(engine, shape):
            return self._learn_and_record(engine, micro, shape)
        self._shown.add(shape)
        return _plainly(engine, micro)

    def forget(self) -> None:
        """See trainer.training.loop.StepRecorder. Shapes that were shown are recorded again when they come next."""
        self._graphs.clear()
        # PyTorch lets nothing be recorded into a pool whose recordings are gone.
        self._recorder = None
        self._weights, self._gradients = [], []

    def give_up(self) -> None:
        """See trainer.training.loop.StepRecorder."""
        if self.in_use:
            self._say("memory ran out, so no step is recorded any more, and what graphs held is free")
        self._end()

    def _end(self) -> None:
        self.forget()
        self._records = False

    @property
    def in_use(self) -> bool:
        """See trainer.training.loop.StepRecorder."""
        return self._records or bool(self._graphs)

    def _is_worth_it(self, engine: Engine, shape: Shape) -> bool:
        wanted = self._records and shape in self._shown and shape not in self._refused
        return wanted and len(self._graphs) < MOST_GRAPHS and bool(engine.masters.gradients())

    def _learn_and_record(self, engine: Engine, micro: MicroBatch, shape: Shape) -> Tensor:
        """What the step learns from is computed plainly, whatever comes of recording it."""
        gradients, seed = engine.masters.gradients(), torch.initial_seed()
        former = _copies(gradients)
        torch._foreach_zero_(gradients)
        loss = _plainly(engine, micro)
        learned = _copies(gradients)
        if math.isfinite(size := _norm(learned)) and size:  # else nothing can be compared with it
            torch.manual_seed(seed)
            self._record(engine, micro, shape, [loss, *learned])
        if not self._records:  # only now is nothing left that refers to what failed
            release(engine.device)
        torch._foreach_copy_(gradients, learned)
        torch._foreach_add_(gradients, former)
        return loss

    def _record(self, engine: Engine, micro: MicroBatch, shape: Shape, plain: Sequence[Tensor]) -> None:
        """``plain`` is what the micro-batch gave plainly: loss and gradients."""
        seed = torch.initial_seed()
        try:
            self._recorder = self._recorder or self._recorders()
            graph = _Graph.of(engine, micro, self._recorder)
            torch.manual_seed(seed)
            engine.masters.zero_grad(keep=True)
            loss = graph.replay(micro, engine.loss_scale)
            off = _off([loss, *engine.masters.gradients()], plain)
        except Exception as error:  # noqa: BLE001 (libraries fail in many ways here, and the step is computed already)
            engine.masters.zero_grad(keep=True)
            self._fail(error)
            return
        exact = torch.are_deterministic_algorithms_enabled()
        if not off <= (0.0 if exact else TOLERANCES.get(engine.models.dtype, 0.0)):
            self._refused.add(shape)
            self._say(f"a CUDA graph gave other gradients than the step that it was recorded from ({off:.2g} of them)")
            return
        self._graphs[shape] = graph
        self._note_places(engine)

    def _fail(self, error: Exception) -> None:
        if is_out_of_memory(error):
            self._say(
                "memory ran out while a step was recorded, so none is any more; PyTorch may hold what that took until "
                "the run is paused and resumed"
            )
            self._end()
            return
        self._records = False
        words = (str(error).splitlines() or [""])[0]
        self._say(f"recording a step as a CUDA graph failed ({type(error).__name__}: {words})")

    def _note_places(self, engine: Engine) -> None:
        """What graphs read and write that others could move."""
        models = (engine.models.unet, *engine.models.text_encoders)
        weights = chain.from_iterable((*model.parameters(), *model.buffers()) for model in models)
        self._weights = [(weight, weight.data_ptr()) for weight in weights]
        self._gradients = engine.masters.gradients()

    def _in_place(self, engine: Engine) -> bool:
        """Whether all of that lies where it lay: previews may have sent the UNet into main memory and back."""
        present = engine.masters.gradients()
        return (
            len(present) == len(self._gradients)
            and all(one is other for one, other in zip(present, self._gradients, strict=True))
            and all(weight.data_ptr() == place for weight, place in self._weights)
        )

    def _say(self, what: str) -> None:
        """Each thing once."""
        if what not in self._told:
            self._told.add(what)
            self._tell("graphs", f"fit.graphs: {what}; such steps are computed as without fit.graphs.")


def _plainly(engine: Engine, micro: MicroBatch, scale: Tensor | None = None) -> Tensor:
    """Learns from a micro-batch, every operation as it comes."""
    loss = engine.micro_step(micro, scale)
    engine.masters.accumulate()
    return loss


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _norm(tensors: Sequence[Tensor]) -> float:
    """Of all of them together; read from the device."""
    return float(torch.stack([tensor.double() for tensor in torch._foreach_norm(list(tensors))]).norm())


def _off(found: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """How far loss and gradients are from the plain ones, each as a share of these; the greater of the two."""
    apart = torch._foreach_sub(list(found), list(plain))
    return max(_norm(apart[:1]) / (_norm(plain[:1]) or 1.0), _norm(apart[1:]) / _norm(plain[1:]))
