"""Time training steps of full-size bases with random weights on a GPU, and the effect of each technique.

    python tests/benchmarks/speed.py --time [--family sdxl] [--minutes 8] [--small]

The most important rows come first, so that an interrupted run has them. Rows that share a loaded base share a process;
a failure is reported in its row, and a crash ends only its process. After every row the table and the same as JSON are
written to tests/benchmarks/results, with the date and the GPU. A step is that of trainer.training.engine with one
micro-batch, which is already in pinned memory: --overhead measures what assembling it costs the host. TFLOP/s counts
what a step without checkpointing computes, from its trace, so that recomputation does not count as work. The GPU's
limit is what it reaches in one large matrix product in the row's dtype.

Eight minutes are about enough for one family: --family sdxl and --family sd15 are two calls.

With --small tiny models run on the CPU through the same code; the numbers are meaningless.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from diffusers.models.attention_processor import Attention
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.speed_rows import Base, Bench, Case, Checkpointing, Row, Timing, say
from tests.benchmarks.speed_techniques import applied
from tests.support.apart import Apart
from tests.support.counting import StepCounter
from tests.support.real_phases import RealRun
from trainer import gpu
from trainer.adapter import attach, lean
from trainer.adapter.lean.transformer import install, lean_attention
from trainer.base.quantized import set_int8_directions
from trainer.config.base import Family
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.meta_models import bare_unet, dtype_of
from trainer.memory.trace.store import TraceStore
from trainer.training.acceleration.int8_autotune import choose_int8, linear_calls, time_all
from trainer.training.device.device import attention_kernels
from trainer.training.device.gradient_checkpointing import checkpointing_blocks, set_checkpointing
from trainer.training.engine import Engine
from trainer.training.optim.master_weights import measure
from trainer.training.optim.optimizer import set_learning_rates
from trainer.training.step import MicroBatch

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
WARM_UP = 3
MOST_STEPS = 30
LEAST_STEPS = 2
ROW_SECONDS = 3.0
"""For the timed steps of a row."""
LONGEST_START, LONGEST_ROW, LONGEST_COMPILING = 60.0, 40.0, 120.0
"""Time limits in seconds for loading a base, a row, and compiling for a row: several times what they need, to end
hangs."""
TINY = 8  # factor by which tests.support.truth_jobs reduces the size of images

TOKENS = 77
"""Tokens of an encoded caption."""

LEAST_SECONDS = 10.0
"""If fewer seconds are left, no further row is started."""

_IN_GRAPHS: tuple[tuple[int, Checkpointing], ...] = ((1, "none"), (4, "none"), (4, "full"))

Group = tuple[Base, tuple[Case, ...]]


def groups(family: Family) -> list[Group]:
    """Return the cases of a family, the most important first."""
    side = 1024 if family == "sdxl" else 512
    other_sides = [size for size in (512, 768, 1024) if size != side]
    main = Base(family)
    return [
        (main, (Case(side, 1), Case(side, 4), Case(side, 4, "full"), Case(side, 1, "full"), Case(side, 8, "full"))),
        (Base(family, "peft"), (Case(side, 1), Case(side, 4))),
        (main, tuple(Case(side, batch, way, technique="graphs") for batch, way in _IN_GRAPHS)),
        (Base(family, "layers"), (Case(side, 1), Case(side, 4), Case(side, 4, "full"))),
        (
            main,
            (
                Case(side, 1, "selective"),
                Case(side, 1, attention="cudnn"),
                Case(side, 4, attention="cudnn"),
                Case(side, 1, attention="efficient"),
                Case(side, 8),
                *(Case(size, batch) for size in other_sides for batch in (1, 4)),
                *(Case(size, 8, "full") for size in other_sides),
            ),
        ),
        (Base(family, quantize="nf4"), (Case(side, 1), Case(side, 1, "full"))),
        (Base(family, quantize="int8"), (Case(side, 1), Case(side, 1, "full"))),
        (Base(family, quantize="int8_products"), (Case(side, 1), Case(side, 4))),
        (Base(family, deterministic=True), (Case(side, 1), Case(side, 4))),
        (main, (Case(side, 1, technique="channels_last"), Case(side, 4, technique="channels_last"))),
        (Base(family, dtype="fp16"), (Case(side, 1), Case(side, 1, technique="fp16_accumulation"))),
        (Base(family, dtype="fp32"), (Case(side, 1),)),
        (main, (Case(side, 1, technique="compiled"), Case(side, 4, technique="compiled"))),
    ]


def in_turn(families: Sequence[Family]) -> list[Group]:
    """Interleave the groups of several families."""
    return [group for same in zip(*map(groups, families), strict=True) for group in same]


def time_group(base: Base, cases: Sequence[Case], seconds: float, small: bool) -> Iterator[Row]:
    """Time the cases in this process, on the GPU unless ``small``; start none after so many seconds."""
    until = time.monotonic() + seconds
    device = CPU if small else torch.device("cuda", 0)
    with _as_stated(base, device):
        workload = base.workload(cases[0].resolution, small=small)
        run = RealRun(workload, device)
        run.load()
        assert run.engine is not None
        limit = matmul_limit(device, dtype_of(workload), small=small)
        for case in cases:
            if time.monotonic() > until:
                yield Row(base, case, failure="no time was left")
                continue
            try:
                if base.quantize == "int8_products":
                    _choose_products(run, run.engine, case, small=small)
                yield Row(base, case, Stopwatch(run, run.engine, case, small=small).time(limit))
            except Exception as error:  # noqa: BLE001 (whatever it was, it is named in the table)
                yield Row(base, case, failure=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            _tidy_up(run.engine, device)


@contextmanager
def _as_stated(base: Base, device: torch.device) -> Iterator[None]:
    """Set up layers, determinism and workspaces as trainer.training.device.device.numerics does."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        workspace = gpu.cublas_workspace(capability, deterministic=base.deterministic)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", workspace)
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(base.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        blocks = install if base.adapters == "lean" else _install_attention
        with patch.object(lean, "ENABLED", base.adapters != "peft"), patch.object(attach, "install", blocks):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _install_attention(unet: nn.Module) -> None:
    """Install the part of trainer.adapter.lean.transformer.install that recomputes nothing in backward."""
    for module in unet.modules():
        if isinstance(module, Attention):
            lean_attention(module)


def _choose_products(run: RealRun, engine: Engine, case: Case, *, small: bool) -> None:
    """Autotune int8 products as a run does when it starts, and print the measurements."""
    side = case.resolution // (TINY if small else 1)
    empty, *_ = bare_unet(replace(run.workload, fit=run.workload.fit.replaced(quantize="none")))
    layers = linear_calls(empty, (side, side), case.batch, TOKENS, live_text=False)
    timings = time_all(layers, run.device, dtype_of(run.workload))
    for one in timings:
        say(f"{'int8' if one.is_faster else 'as it was'}: {one.direction} {one.sentence}")
    set_int8_directions(engine.models.unet, choose_int8(timings))


def _tidy_up(engine: Engine, device: torch.device) -> None:
    """Release everything of a step before the next case, in particular after a failure."""
    for weight in engine.master_weights.working.values():
        weight.grad = None
    engine.master_weights.zero_grad()
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # a failed capture may leave PyTorch's allocator in this state
            torch.cuda.empty_cache()


class Stopwatch:
    """Times the steps of one case."""

    def __init__(self, run: RealRun, engine: Engine, case: Case, *, small: bool) -> None:
        self.run = run
        self.engine = engine
        self.case = case
        self.device = run.device
        side = case.resolution // (TINY if small else 1)
        micro = run._batch((side, side), case.batch)
        self.micro: MicroBatch = micro.pinned() if self.device.type == "cuda" else micro
        self.host = 0.0
        unet = engine.models.unet
        blocks = list(checkpointing_blocks(unet))
        middle = blocks.index("mid_block")
        chosen = (
            tuple(blocks[middle - 1 : middle + 2])
            if case.gradient_checkpointing == "selective"
            else case.gradient_checkpointing
        )
        set_checkpointing(unet, engine.models.text_encoders, chosen, dropouts=False)

    def time(self, limit: float) -> Timing:
        """Return the time of a step after warm-up; the peak is that of these steps."""
        with (
            attention_kernels(self.case.attention, self.device, self.engine.models.dtype),
            applied(self.case.technique, self.engine),
        ):
            for _ in range(WARM_UP if self.device.type == "cuda" else 1):
                one = self._seconds(1)
            self._forget_peak()
            most = MOST_STEPS if self.device.type == "cuda" else LEAST_STEPS
            seconds = self._seconds(max(LEAST_STEPS, min(most, math.ceil(ROW_SECONDS / one))))
            host, (allocated, reserved) = self.host, self._peak()
            counted = (_or_none(count) for count in (self._launched, self._operations, self._waits))
            return Timing(seconds, host, limit, allocated, reserved, *counted)

    def step(self) -> None:
        """Run a step as trainer.training.engine.Engine.train_step, but accept overflows (random weights)."""
        engine, started = self.engine, time.perf_counter()
        set_learning_rates(engine.optimizer, 1.0)
        total = torch.zeros((), device=self.device)
        engine.accumulate_gradients(self.micro, total)
        read = measure(total, engine.master_weights, engine.loss_scale)
        self.host += time.perf_counter() - started
        read.tolist()
        started = time.perf_counter()
        engine.optimizer_step(1.0, 1.0)
        self.host += time.perf_counter() - started

    def _seconds(self, steps: int) -> float:
        """Return the mean time of a step; store the host's share in ``host``."""
        self.host = 0.0
        self._wait()
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._wait()
        self.host /= steps
        return (time.perf_counter() - started) / steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self) -> tuple[int | None, int | None]:
        if self.device.type != "cuda":
            return None, None
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def _operations(self) -> int | None:
        if self.case.technique == "compiled":  # nothing can be compiled beneath a dispatch mode
            return None
        counter = StepCounter(self.device)
        with counter, counter.stage("step"):
            self.step()
        return counter.total()

    def _waits(self) -> int:
        self._wait()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with _telling_waits(self.device):
                self.step()
        return sum("synchroniz" in str(warning.message) for warning in caught)

    def _launched(self) -> int:
        activity, wanted = ProfilerActivity.CPU, DeviceType.CPU
        if self.device.type == "cuda":
            activity, wanted = ProfilerActivity.CUDA, DeviceType.CUDA
        with profile(activities=[activity]) as profiler:
            self.step()
            self._wait()
        assert profiler.profiler is not None
        return sum(event.device_type() == wanted for event in profiler.profiler.kineto_results.events())


def _or_none(count: Callable[[], int | None]) -> int | None:
    """Return a count, or None if it fails, which does not invalidate the times."""
    try:
        return count()
    except Exception as error:  # noqa: BLE001 (whatever it was)
        say(f"not counted: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return None


@contextmanager
def _telling_waits(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cache
def matmul_limit(device: torch.device, dtype: torch.dtype, *, small: bool) -> float:
    """Return the FLOP/s of one large matrix product: the median of several tries."""
    side = 256 if small else 8192
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    taken = []
    for _ in range(6):
        _synchronise(device)
        started = time.perf_counter()
        for _ in range(4):
            left @ right
        _synchronise(device)
        taken.append((time.perf_counter() - started) / 4)
    return 2 * side**3 / median(taken[1:])


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def picture_flops(family: Family, resolution: int, small: bool) -> int:
    """Return the FLOP that a step without checkpointing computes for one image, from its trace."""
    workload = Base(family).workload(resolution, small=small)
    with TemporaryDirectory() as folder:
        steps = TraceLibrary(TraceStore(Path(folder))).steps(workload, workload.buckets[0].size, 1)
    return sum(work.flops * work.count for work in steps.micro_first.work)


def time_steps(
    families: Sequence[Family], minutes: float, folder: Path, *, small: bool = False, most: int | None = None
) -> int:
    """Time what there is time for; return 0 if at least one row was timed. ``most`` limits the number of groups."""
    until = time.monotonic() + 60 * minutes - 15  # for the table and the shutdown
    if small:
        torch.set_num_threads(1)
    card = "the CPU" if small else torch.cuda.get_device_properties(0).name
    name = f"speed_{'cpu_small' if small else card.lower().replace(' ', '_')}"
    folder.mkdir(parents=True, exist_ok=True)
    chosen = in_turn(families)[:most]
    sizes = dict.fromkeys((base.family, case.resolution) for base, cases in chosen for case in cases)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool, Apart("tests.benchmarks.speed_time") as apart:
        bench = Bench(card, folder, name, small, {key: pool.submit(picture_flops, *key, small) for key in sizes})
        for base, cases in chosen:
            left = until - time.monotonic()
            if left < LEAST_SECONDS:
                bench.remarks.append(f"No time was left for {asdict(base)}.")
                continue
            compiling = LONGEST_COMPILING * sum(case.technique == "compiled" for case in cases)
            limit = min(left, LONGEST_START + LONGEST_ROW * len(cases) + compiling)
            result = apart.run(limit, time_group, base, cases, limit - LEAST_SECONDS, small, on_item=bench.keep)
            if result.failure:
                bench.remarks.append(f"{asdict(base)}: {result.failure}")
                say(bench.remarks[-1])
        for future in bench.flops.values():
            _wait_for(future, until)
        pool.shutdown(cancel_futures=True)
        bench.write()
    say(f"{bench.table()}\nwritten to {folder / name}.md and .json")
    return 0 if any(row.timing for row in bench.rows) else 1


def _wait_for(future: Future[int], until: float) -> None:
    """Wait for a trace; if it fails or is too late, its cells stay empty."""
    try:
        future.result(timeout=max(0.0, until - time.monotonic()))
    except Exception as error:  # noqa: BLE001 (the times are what counts)
        say(f"no FLOP: {type(error).__name__}: {error}")
