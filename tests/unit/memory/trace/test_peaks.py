"""High points of small hand-made tapes: which they are, and what they are called."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.memory.forecast.peaks import high_points
from trainer.memory.trace.memory_trace import MemoryTrace, Storage

UP, DOWN, MIDDLE = "unet.up_blocks.0.resnets.0", "unet.down_blocks.0.resnets.0", "unet.mid_block.attentions.0"


def tape(*steps: tuple[int, str, str]) -> MemoryTrace:
    """Each step is (bytes, module, stage); bytes below zero: all that lives dies, but for so much of it."""
    storages: list[Storage] = []
    events: list[int] = []
    alive: list[int] = []
    for size, module, stage in steps:
        if size < 0:
            while sum(storages[index].bytes for index in alive) > -size - 1:
                events.append(~alive.pop())
            continue
        alive.append(len(storages))
        events.append(len(storages))
        storages.append(Storage(size, "temporary", module, stage))
    return MemoryTrace("made", tuple(storages), np.array(events, dtype=np.int32), ())


def names(made: MemoryTrace) -> list[str]:
    return [point.name for point in high_points(made)]


def test_a_forward_that_only_rises_has_one_high_point_at_its_end() -> None:
    steps = [(100, f"unet.down_blocks.{block}.resnets.{layer}", "forward") for block in range(3) for layer in range(4)]
    made = tape(*steps, (-1, "", ""))
    (point,) = high_points(made)
    assert (point.name, point.bytes, point.event) == ("forward through the last down block", 1200, 11)


def test_checkpointed_blocks_stand_out_one_by_one_in_the_order_of_time() -> None:
    made = tape(
        (100, DOWN, "forward"),
        (-21, "", ""),
        (10, DOWN, "forward"),
        (120, MIDDLE, "forward"),
        (-11, "", ""),
        (90, UP, "recompute"),
        (40, UP, "backward"),
        (-6, "", ""),
        (80, DOWN, "recompute"),
        (-1, "", ""),
        (60, "", "optimizer"),
    )
    assert names(made) == [
        "forward through the last down block",
        "forward through the middle block",
        "backward through the last up block (highest layer)",
        "backward through the last down block",
        "end of the batch: optimizer step",
    ]
    assert [point.bytes for point in high_points(made)] == [100, 130, 140, 80, 60]


def test_small_ripples_are_no_high_points() -> None:
    made = tape((960, MIDDLE, "forward"), (40, MIDDLE, "forward"), (-961, "", ""), (30, UP, "forward"))
    assert names(made) == ["forward through the middle block"]


def test_of_points_with_one_name_the_highest_is_told() -> None:
    made = tape((50, MIDDLE, "forward"), (-1, "", ""), (20, UP, "forward"), (-1, "", ""), (70, MIDDLE, "forward"))
    assert [(point.name, point.bytes) for point in high_points(made)] == [
        ("forward through the last up block (highest layer)", 20),
        ("forward through the middle block", 70),
    ]


@pytest.mark.parametrize(
    ("stage", "module", "name"),
    [
        ("quantise", "", "quantizing the weights"),
        ("load", "unet.mid_block.resnets.0.conv1", "loading the middle block"),
        ("texts", "text_encoder_2.text_model", "encoding a text: the second text encoder"),
        ("encode 832x1216", "vae.encoder", "VAE encode of a 832x1216 image"),
        ("decode 1024x1024", "vae.decoder.up_blocks.3", "VAE decode of a 1024x1024 preview"),
        ("draw 512x768", MIDDLE, "rendering a 512x768 preview: the middle block"),
        ("validate 512x512", "unet.conv_in", "validation at 512x512: the input layer"),
        ("forward", "", "the center: the loss, between forward and backward"),
        ("accumulate", UP, "end of the micro-batch: gradient accumulation"),
        ("save", "", "copying to system memory"),
    ],
)
def test_every_stage_has_words(stage: str, module: str, name: str) -> None:
    assert names(tape((10, module, stage))) == [name]


def test_workspaces_and_empty_tapes_have_no_high_points() -> None:
    workspace = MemoryTrace("w", (Storage(9, "workspace", "cudnn", "forward"),), np.array([0, -1], dtype=np.int32), ())
    assert high_points(workspace) == high_points(tape()) == ()
