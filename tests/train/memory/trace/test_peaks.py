"""The high points of full-size training steps, and that quantizing is one."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support.tiny import Family
from tests.support.traced_steps import trace_steps
from tests.train.memory.trace.test_other_phases import subject
from trainer.config.fit import FitConfig
from trainer.memory.forecast.peaks import high_points
from trainer.memory.trace import other_phases
from trainer.memory.trace.memory_trace import totals


def names_of_step(
    family: Family, resolution: int, checkpointing: Literal["none", "full"]
) -> tuple[list[str], list[str]]:
    """Of a micro-batch with one picture, and of the optimizer's step."""
    wanted = subject(family, resolution, FitConfig(gradient_checkpointing=checkpointing))
    steps = trace_steps(wanted, [(resolution, resolution)], 1)
    micro = steps.micro_more[resolution, resolution]
    points = high_points(micro)
    assert max(point.bytes for point in points) <= totals(micro).peak
    return [point.name for point in points], [point.name for point in high_points(steps.optimizer_first)]


def test_sd15_without_checkpointing_has_its_peak_where_forward_turns() -> None:
    """Just after: the gradients of q, k and v are laid together while all of forward is still kept.

    At the other end is a lower one, as the largest maps are made again there when little else is left.
    """
    micro, optimizer = names_of_step("sd15", 512, "none")
    assert micro == [
        "backward through the last up block (highest layer)",
        "backward through the first down block (lowest layer)",
    ]
    assert optimizer == ["end of the batch: optimizer step"]


@pytest.mark.slow
def test_sdxl_with_checkpointing_has_a_peak_in_every_block_there_and_back() -> None:
    micro, _ = names_of_step("sdxl", 1024, "full")
    forward = [name for name in micro if name.startswith("forward")]
    backward = [name for name in micro if name.startswith("backward")]
    assert micro == [*forward, *backward, "end of the micro-batch: gradient accumulation"]
    assert forward[-1] == "forward through the last up block (highest layer)"
    assert "forward through the middle block" in forward
    assert backward[:2] == [
        "backward through the output layer (highest layer)",  # its norm is made again
        "backward through the last up block (highest layer)",
    ]
    assert backward[-1] == "backward through the second down block"


def test_quantizing_is_named() -> None:
    (tape,) = other_phases.quantise(subject("sd15", 512, FitConfig(quantize="nf4")))
    assert [point.name for point in high_points(tape)] == ["quantizing the last weights"]
