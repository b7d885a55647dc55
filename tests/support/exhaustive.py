"""A search for the best plan that evaluates every candidate with its own arithmetic, as a reference for planners."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from tests.support.plans import device_state_with
from trainer.config.fit import FitConfig
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.forecast import RunSimulator, Simulation
from trainer.memory.forecast.schedule import MOST_ROUNDS, PhaseCounts, RunSchedule
from trainer.memory.planner.evaluator import time_step
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import MemoryTrace
from trainer.memory.trace.workload import Workload

OCCASIONS = PhaseCounts(images=10, texts=10, measured=4, validations=3, previews=3)
AMPLE = 400 * 2**20
"""Bytes that are more than any candidate takes."""


def highest(sequence: list[MemoryTrace]) -> int:
    """Return the largest sum of live storages, each rounded up to 512 bytes, without workspaces."""
    living, most = 0, 0
    for trace in sequence:
        for event in trace.events.tolist():
            storage = trace.storages[event if event >= 0 else ~event]
            size = 0 if storage.kind == "workspace" else (storage.bytes + 511) // 512 * 512
            living += size if event >= 0 else -size
            most = max(most, living)
    return most


@dataclass(eq=False)
class Exhaustive:
    """All fits of a workload with their true order of preference, and the memory they take without a limit."""

    workload: Workload
    traces: TraceLibrary

    def __post_init__(self) -> None:
        self.timeline = cache(self._course)
        self.figures = cache(self._figures)
        self.free = cache(self._free)
        self.runs = lru_cache(maxsize=2)(lambda budget: RunSimulator(device_state_with(budget)))

    def _course(self, fit: FitConfig) -> RunSchedule:
        return RunSchedule(replace(self.workload, fit=fit), self.traces, OCCASIONS, device_state_with(AMPLE).rate)

    def _figures(self, fit: FitConfig) -> tuple[float, float, int]:
        """Return the seconds of all steps and of all previews, and the bytes of the peak."""
        workload, rate = self.workload, device_state_with(AMPLE).rate
        steps = self.traces.steps(replace(workload, fit=fit), workload.buckets[0].size, fit.micro_batch or 1)
        most = fit.micro_batch or 1
        parts, rest = divmod(workload.recipe.effective_batch, most)
        step = roofline.seconds([*steps.micro_first.work, *steps.optimizer.work], rate)
        step += (parts - 1) * roofline.seconds(steps.micro_more.work, rate)
        if rest:  # as many operations, each of them smaller
            share = rest / most
            less = [replace(one, flops=share * one.flops, bytes=share * one.bytes) for one in steps.micro_more.work]
            step += roofline.seconds(less, rate)
        more = [steps.micro_more] if parts + bool(rest) > 1 else []
        first = [steps.weights, steps.micro_first, *more, steps.optimizer_first]
        need = highest([*first, steps.micro_first, *more, steps.optimizer])
        drawing = 0.0
        if workload.previews:
            drawn = list(self.traces.phase(replace(workload, fit=fit), "preview"))
            drawing = OCCASIONS.previews * sum(roofline.seconds(trace.work, rate) for trace in drawn)
            need = max(need, highest([steps.weights, steps.micro_first, steps.optimizer_first, *drawn]))
        return step * (workload.recipe.steps or 1), drawing, need

    def retrying(self, fit: FitConfig, device_state: DeviceState) -> float | None:
        """Return the seconds that allocator retries cost over all steps; None if the fit does not fit."""
        if self.free(fit) <= device_state.budget:
            return 0.0
        schedule = self.timeline(fit)
        if self.figures(fit)[2] > device_state.budget:
            return None  # its tensors alone take too much
        if self.runs(device_state.budget).simulate(schedule, device_state.budget).failure is not None:
            return None
        playing = Simulation(device_state, device_state.budget)
        for act in (*schedule.before_training(), *schedule.at_start()):
            playing.play(act.phase, act.traces)
        playing.play("first_step", schedule.first_step())
        for _ in range(MOST_ROUNDS):  # as long as memory grows
            reserved, counts = playing.allocator.reserved, []
            for trace in schedule.round():
                before = playing.allocator.retries
                playing.play("train", [trace])
                counts.append(playing.allocator.retries - before)
            if playing.allocator.reserved == reserved:
                break
        first, *more, last = counts
        parts = -(-self.workload.recipe.effective_batch // (fit.micro_batch or 1))
        return roofline.RETRY_SECONDS * (first + sum(more) * (parts - 1) + last) * (self.workload.recipe.steps or 1)

    def _free(self, fit: FitConfig) -> int:
        return self.runs(AMPLE).simulate(self.timeline(fit), None).reserved

    def training(self, fit: FitConfig) -> int:
        """Return the bytes that training alone takes."""
        schedule = self.timeline(fit)
        return highest(
            [*schedule.traces("load"), *schedule.traces("quantise"), *schedule.first_step(), *schedule.round()]
        )

    def chosen(self, choices: list[FitConfig], device_state: DeviceState, *, free_choice: bool) -> FitConfig | None:
        """Return the best fit that works by the rule of DESIGN: unquantized, then 8 bits, then 4 bits.

        An 8-bit base comes before an unquantized, streamed one that takes more than 1.5 times as long.
        """

        def best_of(quantize: str) -> FitConfig | None:
            alike = [fit for fit in choices if fit.quantize == quantize]
            return (self.picks(alike, device_state, free_choice=False) or [None])[-1]

        def seconds(fit: FitConfig) -> float:
            return self.figures(fit)[0] + (self.retrying(fit, device_state) or 0.0)

        if free_choice:
            return (self.picks(choices, device_state, free_choice=True) or [None])[-1]
        found = [fit for quantize in ("none", "int8", "nf4") if (fit := best_of(quantize)) is not None]
        if not found:
            return None
        first, *others = found
        for other in others:
            much_faster = time_step(seconds(first)) > time_step(seconds(other)) + time_step(1.5)
            if first.stream == "full" and other.quantize == "int8" and much_faster:
                return other
        return first

    def encodes(self, device_state: DeviceState) -> bool:
        """Return whether images can be encoded within the budget."""
        caching = self.traces.phase(self.workload, "cache_pictures")
        return Simulation(device_state, device_state.budget).play("cache_pictures", caching)

    def picks(self, choices: list[FitConfig], device_state: DeviceState, *, free_choice: bool) -> list[FitConfig]:
        """Return the first fit by speed without retries, then each later one that is better counting retries."""
        best: tuple[tuple[int, ...], FitConfig] | None = None
        picks: list[FitConfig] = []
        for fit in sorted(choices, key=lambda fit: self.order(fit, 0.0, free_choice=free_choice)):
            if best is not None and self.order(fit, 0.0, free_choice=free_choice) >= best[0]:
                break  # retries only add to the time
            if (retrying := self.retrying(fit, device_state)) is not None:
                found = self.order(fit, retrying, free_choice=free_choice)
                if best is None or found < best[0]:
                    best = (found, fit)
                    picks.append(fit)
        return picks

    def order(self, fit: FitConfig, retrying: float, *, free_choice: bool) -> tuple[int, ...]:
        """Return a sort key, smaller is better; ``retrying`` is the time that allocator retries cost, in seconds."""
        seconds, drawing, need = self.figures(fit)
        quality = 0 if free_choice else ("none", "int8", "nf4").index(fit.quantize or "none")
        usual = (
            fit.quantize == "none",
            fit.stream == "none",
            fit.gradient_checkpointing == "none",
            fit.vae_tiling is True,
        )
        usual += (fit.preview_offload is False, fit.micro_batch == self.workload.recipe.effective_batch)
        return quality, time_step(seconds + retrying), len(usual) - sum(usual), time_step(drawing), need


def every_fit(workload: Workload, written: FitConfig, sets: tuple[object, ...]) -> list[FitConfig]:
    """Return all fits that keep what is written, with these choices of checkpointing; streamed ones need no others.

    The most precise fits come first.
    """
    batch = workload.recipe.effective_batch
    start = workload.fit.replaced(dtype=written.dtype or "bf16", allow_quantized=written.allow_quantized)

    def values(name: str, free: tuple[object, ...]) -> tuple[object, ...]:
        stated = getattr(written, name)
        return free if stated is None else (stated,)

    previews = bool(workload.previews)
    return [
        start.replaced(
            quantize=quantize,
            stream=stream,
            gradient_checkpointing=chosen,
            micro_batch=size,
            vae_tiling=tiling,
            preview_offload=offload,
        )
        for number, quantize in enumerate(values("quantize", ("none", "int8", "nf4")))
        for stream in (("none", "full") if number == 0 else ("none",))
        for chosen in values("gradient_checkpointing", sets)
        if stream == "none" or chosen in ("none", "full", written.gradient_checkpointing)
        for size in values("micro_batch", tuple({-(-batch // part): None for part in range(1, batch + 1)}))
        for tiling in values("vae_tiling", (True, False) if previews else (True,))
        for offload in values("preview_offload", (False, True) if previews else (False,))
    ]
