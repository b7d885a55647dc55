"""The peaks A to I of Salisbury's paper in training steps of published models, each against a walk through a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from trainer.cli.planning import request_for_preset
from trainer.config.base import Family
from trainer.memory.forecast.forecast import forecast_of
from trainer.memory.forecast.known_peaks import known_peaks
from trainer.memory.forecast.schedule import RunSchedule
from trainer.memory.trace.library import Steps, TraceLibrary
from trainer.memory.trace.memory_trace import MemoryTrace, Storage
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import BucketUse, complete_fit
from trainer.protocol.plan import KnownPeak

MIB = 2**20
WORKSPACES = 160 * MIB
"""More than the workspaces of cuBLAS and cuDNN, which a forecast includes."""


def schedule_of(family: Family, *, rank: int = 32, batch: int = 1, side: int | None = None, **fit: Any) -> RunSchedule:
    """Return the run of the built-in style recipe, whose traces ship, with the whole batch at once."""
    asked = request_for_preset(family, "style", "8GB")
    values = {"dtype": "bf16", "quantize": "none", "gradient_checkpointing": "none", "micro_batch": batch, **fit}
    workload = replace(asked.workload.at_rank(rank), fit=complete_fit(asked.workload.fit.replaced(**values)))
    buckets = (BucketUse(side, side, 20),) if side else workload.buckets
    workload = replace(workload, recipe=workload.recipe.replaced(effective_batch=batch), buckets=buckets)
    return RunSchedule(workload, TraceLibrary(TraceStore.of_user()), asked.counts, asked.device_state.rate)


@cache
def peaks_of(family: Family, **settings: Any) -> dict[str, KnownPeak]:
    found = known_peaks(schedule_of(family, **settings))
    assert [peak.peak for peak in found] == list("ABCDEFGHI")
    return {peak.peak: peak for peak in found}


@cache
def steps_of(family: Family, **settings: Any) -> Steps[MemoryTrace]:
    schedule = schedule_of(family, **settings)
    return schedule.steps(schedule.workload.buckets[0].size)


def walk(*traces: MemoryTrace) -> Iterator[tuple[Storage, int]]:
    """Yield each allocation of traces in sequence, with the bytes then allocated, by a plain list of what lives."""
    named: dict[str, int] = {}
    total = 0
    for trace in traces:
        here: dict[int, int] = {}
        for event in trace.events.tolist():
            storage = trace.storages[event if event >= 0 else ~event]
            size = 0 if storage.kind == "workspace" else -(-storage.bytes // 512) * 512
            if event >= 0:
                here[event], total = size, total + size
                if storage.name is not None:
                    named[storage.name] = size
                yield storage, total
            elif ~event in here:
                total -= here.pop(~event)
            else:
                total -= named.pop(str(storage.name))


def highest(family: Family, of: Callable[[Storage], bool], **settings: Any) -> int:
    """Return the most bytes at an allocation in a later step of a run that answers to ``of``."""
    steps = steps_of(family, **settings)
    before = sum(1 for _ in walk(steps.weights, steps.micro_first, steps.optimizer_first))
    whole = walk(steps.weights, steps.micro_first, steps.optimizer_first, steps.micro_first, steps.optimizer)
    return max(total for place, (storage, total) in enumerate(whole) if place >= before and of(storage))


def test_a_quantizing_occurs_with_a_quantized_base_only() -> None:
    schedule = schedule_of("sdxl", batch=2, quantize="int8")
    found = {peak.peak: peak for peak in known_peaks(schedule)}["A"]
    forecast = forecast_of(schedule, request_for_preset("sdxl", "style", "8GB").device_state, brief=True)
    phase = forecast.of("quantise")
    assert phase is not None and found.occurs and found.moment.startswith("quantizing ")
    assert found.bytes is not None and 0 <= phase.allocated - found.bytes < WORKSPACES
    plain = peaks_of("sd15")["A"]
    assert (plain.occurs, plain.bytes, plain.reason) == (False, None, "not_quantized")


def test_b_forward_reaches_its_height_in_the_last_up_block() -> None:
    found = peaks_of("sd15")["B"]
    assert found.occurs and found.moment == "forward through the last up block (highest layer)"
    assert found.bytes == highest("sd15", lambda s: s.stage == "forward" and s.module.startswith("unet.up_blocks.3"))
    assert found.bytes == highest("sd15", lambda s: s.stage == "forward")


def test_c_the_loss_is_no_peak_because_a_prediction_is_as_small_as_the_latents() -> None:
    found = peaks_of("sd15", batch=2)["C"]
    held = highest("sd15", lambda s: s.stage == "forward" and s.module == "unet.conv_out", batch=2)
    latents = 2 * 4 * 64 * 64 * 4  # two images of 512 pixels, four channels, fp32
    assert not found.occurs and found.reason == "small_output"
    assert found.moment == "the center: the loss, between forward and backward"
    assert found.bytes is not None and found.bytes - held < 10 * latents < 0.001 * found.bytes


def test_d_the_gradient_of_the_loss_is_no_peak_for_the_same_reason() -> None:
    one, two = peaks_of("sd15")["D"], peaks_of("sd15", batch=2)["D"]
    assert (one.occurs, one.reason, one.moment) == (False, "small_output", "the gradient of the loss")
    assert one.bytes == highest("sd15", lambda s: s.stage == "backward" and not s.module)
    assert two.bytes is not None and two.bytes < (peaks_of("sd15", batch=2)["E"].bytes or 0)


def test_e_the_middle_of_backward_through_the_last_up_block_is_the_peak_without_checkpointing() -> None:
    found = peaks_of("sd15")["E"]
    assert found.occurs and found.moment == "backward through the last up block (highest layer)"
    assert found.bytes == highest("sd15", lambda s: s.stage != "")  # of everything in a step
    # The forecast names the same moment, and adds the workspaces.
    schedule = schedule_of("sd15")
    train = forecast_of(schedule, request_for_preset("sd15", "style", "8GB").device_state).of("train")
    assert train is not None
    (named,) = [peak for peak in train.peaks if peak.name == found.moment]
    assert 0 <= named.allocated - found.bytes < WORKSPACES


def test_f_the_end_of_that_block_is_higher_only_if_less_is_freed_than_added() -> None:
    low, high = peaks_of("sd15"), peaks_of("sdxl", gradient_checkpointing="full")
    assert (low["F"].occurs, low["F"].reason) == (False, "lower_than_middle")
    of_first_sublayer = highest(
        "sd15", lambda s: s.stage == "backward" and s.module.startswith("unet.up_blocks.3.resnets.0")
    )
    assert low["F"].bytes == of_first_sublayer < (low["E"].bytes or 0)
    # The first resnet of SDXL's last up block has more channels; checkpointed blocks keep nothing that it could free.
    assert high["F"].occurs and (high["F"].bytes or 0) > (high["E"].bytes or 0)


def test_g_backward_through_the_lowest_layer_that_it_reaches() -> None:
    found = peaks_of("sd15")["G"]
    assert found.occurs and found.moment == "backward through the first down block (lowest layer)"
    assert found.bytes == highest(
        "sd15", lambda s: s.stage == "backward" and s.module.startswith("unet.down_blocks.0.attentions.1")
    )
    # SDXL's first down block has no layer with an adapter, so backward ends above it.
    sdxl = peaks_of("sdxl", gradient_checkpointing="full")["G"]
    assert sdxl.moment == "backward through the second down block"


def test_h_the_end_of_the_lowest_layer_is_higher_if_its_gradients_outweigh_what_is_freed() -> None:
    usual, small = peaks_of("sd15"), peaks_of("sd15", rank=256, side=128)
    assert (usual["H"].occurs, usual["H"].reason) == (False, "lower_than_middle")
    assert usual["H"].bytes == highest(
        "sd15", lambda s: s.stage == "backward" and s.module.startswith("unet.down_blocks.0.attentions.0")
    )
    assert small["H"].occurs and (small["H"].bytes or 0) > (small["G"].bytes or 0)


def test_i_at_the_end_of_a_batch_gradients_are_added_up_in_fp32_while_those_in_bf16_still_exist() -> None:
    found, steps = peaks_of("sd15")["I"], steps_of("sd15")
    assert found.occurs and found.moment == "end of the micro-batch: gradient accumulation"
    assert found.bytes == highest("sd15", lambda s: s.stage in ("accumulate", "optimizer"))
    masters = sum(s.bytes for s in steps.micro_first.storages if (s.name or "").startswith("master_gradient."))
    before = sum(1 for _ in walk(steps.weights, steps.micro_first, steps.optimizer_first))
    first, total = list(walk(steps.weights, steps.micro_first, steps.optimizer_first, steps.micro_first))[before]
    lasting = total - -(-first.bytes // 512) * 512
    # The gradients in fp32, and half as much for those in bf16.
    assert 1.49 * masters < found.bytes - lasting < 1.51 * masters
