"""Find the nine kinds of peaks of Salisbury, "Predicting Peak VRAM Usage in Local Fine-tuning of LLMs" (2024).

The paper names them A to I. A UNet's highest layer is its last up block with the output layer; its lowest layer is the
first down block that backward reaches. `docs/memory.md` explains the mapping.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.memory.forecast.peaks import moment_name
from trainer.memory.forecast.schedule import RunSchedule, bounding_shapes, parts
from trainer.memory.trace.memory_trace import MemoryTrace, running_bytes, summary_of, total_in_sequence, unet_block
from trainer.protocol.plan import KnownPeak, PeakReason

_SUBLAYER = re.compile(r"^unet\.(?:\w+_blocks\.\d+|mid_block)\.\w+\.\d+|^unet\.\w+")
_OUTPUT_LAYER = ("unet.conv_norm_out", "unet.conv_act", "unet.conv_out")


@dataclass(frozen=True, slots=True)
class _Moment:
    """An allocation in a step."""

    event: int
    stage: str
    module: str
    bytes: int
    """Bytes allocated after it, those that stay allocated between steps included."""

    @property
    def sublayer(self) -> str:
        """Return the resnet, attention or single layer of the UNet; "" outside of the UNet."""
        found = _SUBLAYER.match(self.module)
        return found.group() if found else ""

    @property
    def is_backward(self) -> bool:
        """Return whether this belongs to the backward pass, recomputed activations included."""
        return self.stage in ("recompute", "backward")


def known_peaks(schedule: RunSchedule) -> tuple[KnownPeak, ...]:
    """Return the peaks A to I of a run, each with its bytes or the reason why it does not occur.

    Training is looked at once its memory has settled, in the shape that needs the most. Missing traces are recorded.
    """
    shape = bounding_shapes(schedule.workload)[0]
    steps = schedule.steps(shape)
    lasting = _net([steps.weights, steps.micro_first, steps.optimizer_first])
    gradients = _net([steps.micro_first])
    several = parts(schedule.workload, shape) > 1
    # From the second micro-batch of a step on, the gradients of the first one are allocated as well.
    micro, base = (steps.micro_more, lasting + gradients) if several else (steps.micro_first, lasting)
    moments = _moments(micro, base)
    optimizer = _moments(steps.optimizer, lasting + gradients)
    return (
        _quantization(schedule),
        *_until_backward(micro, moments),
        *_backward(micro, moments),
        _end_of_batch(micro, moments, steps.optimizer, optimizer),
    )


def _net(traces: Iterable[MemoryTrace]) -> int:
    return total_in_sequence(map(summary_of, traces)).net


def _moments(trace: MemoryTrace, base: int) -> list[_Moment]:
    running, found = running_bytes(trace).tolist(), []
    for event, index in enumerate(trace.events.tolist()):
        if index >= 0 and (storage := trace.storages[index]).kind != "workspace":
            found.append(_Moment(event, storage.stage, storage.module, base + running[event]))
    return found


def _quantization(schedule: RunSchedule) -> KnownPeak:
    """Return peak A: quantizing the weights, which happens once."""
    traces = schedule.traces("quantise")
    if not traces:
        return KnownPeak("A", occurs=False, reason="not_quantized")
    trace = max(traces, key=lambda trace: running_bytes(trace).max(initial=0))
    highest = max(_moments(trace, 0), key=lambda moment: moment.bytes)
    return KnownPeak("A", occurs=True, bytes=highest.bytes, moment=moment_name(trace, highest.event))


def _until_backward(trace: MemoryTrace, moments: Sequence[_Moment]) -> tuple[KnownPeak, ...]:
    """Return peak B, forward through the highest layer, and C and D, the loss and its gradient."""
    top = _highest_block(moments)
    forward = _highest(moment for moment in moments if moment.stage == "forward" and _is_in(moment, top))
    loss = _highest(moment for moment in moments if _is_loss(moment, forward, "forward"))
    gradient = _highest(moment for moment in moments if _is_loss(moment, forward, "backward"))
    return (
        _found("B", trace, forward),
        _found("C", trace, loss, at_least=forward, otherwise="small_output"),
        _found("D", trace, gradient, at_least=forward, otherwise="small_output", name="the gradient of the loss"),
    )


def _backward(trace: MemoryTrace, moments: Sequence[_Moment]) -> tuple[KnownPeak, ...]:
    """Return peaks E and F of the highest layer, and G and H of the lowest: the middle and the end of each."""
    backward = [moment for moment in moments if moment.is_backward and moment.sublayer]
    lowest = next((block for moment in reversed(backward) if (block := unet_block(moment.module))), None)
    found: list[KnownPeak] = []
    for letters, block in (("EF", _highest_block(moments)), ("GH", lowest)):
        of_block = [moment for moment in backward if _is_in(moment, block)]
        last = of_block[-1].sublayer if of_block else ""
        middle = _highest(moment for moment in of_block if moment.sublayer != last)
        end = _highest(moment for moment in of_block if moment.sublayer == last)
        found.append(_found(letters[0], trace, middle or end))
        found.append(_found(letters[1], trace, end, at_least=middle, otherwise="lower_than_middle"))
    return tuple(found)


def _end_of_batch(
    micro: MemoryTrace, moments: Sequence[_Moment], optimizer: MemoryTrace, later: Sequence[_Moment]
) -> KnownPeak:
    """Return peak I: the gradients are added up, or the optimizer takes its step."""
    accumulated = _highest(moment for moment in moments if moment.stage == "accumulate")
    step = _highest(later)
    if accumulated is None or (step is not None and step.bytes > accumulated.bytes):
        return _found("I", optimizer, step)
    return _found("I", micro, accumulated)


def _highest(moments: Iterable[_Moment]) -> _Moment | None:
    return max(moments, key=lambda moment: moment.bytes, default=None)


def _highest_block(moments: Sequence[_Moment]) -> str | None:
    """Return the last block of the forward pass, which is the UNet's last up block."""
    forward = (moment for moment in reversed(moments) if moment.stage == "forward")
    return next((block for moment in forward if (block := unet_block(moment.module))), None)


def _is_in(moment: _Moment, block: str | None) -> bool:
    """Return whether a moment belongs to a block; the output layer belongs to the last up block."""
    here = unet_block(moment.module)
    is_last = block is not None and block.startswith("up_blocks.") and moment.module.startswith(_OUTPUT_LAYER)
    return is_last or (here is not None and here == block)


def _is_loss(moment: _Moment, forward: _Moment | None, stage: str) -> bool:
    return forward is not None and moment.event > forward.event and moment.stage == stage and not moment.module


def _found(
    letter: str,
    trace: MemoryTrace,
    moment: _Moment | None,
    *,
    at_least: _Moment | None = None,
    otherwise: PeakReason = "not_reached",
    name: str = "",
) -> KnownPeak:
    """Return a peak, which occurs only if it is higher than another moment."""
    if moment is None:
        return KnownPeak(letter, occurs=False, reason="not_reached")
    occurs = at_least is None or moment.bytes > at_least.bytes
    named = name or moment_name(trace, moment.event)
    return KnownPeak(letter, occurs, moment.bytes, named, None if occurs else otherwise)
