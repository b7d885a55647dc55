"""Another program takes the memory in the middle of each phase: the run heals, or pauses with advice and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.emulated_gpu.machine import EmulatedGpu
from trainer.config.base import Family
from trainer.files.header import read_header

RAW = ("CUDACachingAllocator.cpp", "[W", "Traceback")
STEPS = 4
# Random crops, so that the images of each epoch are encoded; one epoch has three steps.
SETTINGS = """
[recipe]
steps = 4
effective_batch = 2
resolution = {resolution}
rank = {rank}
images = {{max_upscale = 16.0, crop = "random"}}
captions = {{shuffle = true}}
optimizer = {{name = "{optimizer}"}}
[fit]
device = "cuda"
threads = 1
{fit}
[report]
validation = {{every = 2, timesteps = [500]}}
saving = {{every_steps = 2, checkpoint_every = 2}}
[report.previews]
every = 2
prompts = [{{prompt = "sks, a cat", steps = 2, width = 512, height = 512}}]
"""


@dataclass(frozen=True)
class Shortage:
    """A moment of a run at which another program takes the memory."""

    phase: str
    """Phase in which memory runs out first."""
    function: str
    """Function within which it is taken; see EmulatedGpu.fill_in."""
    call: int = 1
    stage: str = ""
    """Stage of the step in which memory runs out."""
    paused: bool = True
    """Whether the run pauses with advice; otherwise it heals and ends with a LoRA."""
    advice: str = ""
    """What the advice contains besides closing the other program."""
    leave_mib: int = 0
    resolution: int = 512
    rank: int = 4
    optimizer: str = "adamw"
    fit: str = ""
    family: Family = "sd15"


SOURCE = "trainer.base.source:BaseSource"
BUILD = "trainer.training.build:build_engine"
ENGINE = "trainer.training.engine:Engine"
EXPORT = "trainer.training.callbacks.lora_export"
# One epoch of six images at 512 and at 64 pixels, so that the next one is encoded while the models are loaded.
SHARDS, SMALL_SHARDS = "cache_gigabytes = 1e-3", "cache_gigabytes = 8e-5"
SMALL_STEPS = 'micro_batch = 1\ngradient_checkpointing = "full"'
SMALLER = "start a new run at a lower resolution, with a lower rank, or with fit.allow_quantized = true"
SHORTAGES = {
    "loading": Shortage("load", BUILD, advice="or start a new run with fit.allow_quantized = true; `resume` starts"),
    "quantizing_to_int8": Shortage("quantise", BUILD, fit='quantize = "int8"', advice='with fit.quantize = "nf4"; '),
    "quantizing_to_nf4": Shortage("quantise", BUILD, fit='quantize = "nf4"', advice="GiB); `resume` starts"),
    "VAE_loading": Shortage("cache_pictures", f"{SOURCE}.load_vae", advice="or start a new run at a lower resolution;"),
    "VAE_caching": Shortage("cache_pictures", "trainer.base.encoding:posterior", leave_mib=4),
    "text_caching": Shortage("cache_texts", f"{SOURCE}.load_text_encoders"),
    "validation": Shortage("validate", "trainer.training.callbacks.validation:losses_of_image", advice=SMALLER),
    "forward": Shortage("first_step", f"{ENGINE}.micro_step", stage="forward", advice=SMALLER),
    "backward": Shortage("first_step", "trainer.training.step:timestep_weights", stage="backward"),
    "optimizer": Shortage("first_step", f"{ENGINE}.optimizer_step", stage="optimizer", resolution=64, rank=128),
    "a_later_step": Shortage("train", f"{ENGINE}.micro_step", call=3, stage="forward"),
    "sampling_a_preview": Shortage("preview", "trainer.training.callbacks.preview:draw_latents", advice="smaller"),
    "decoding_a_preview": Shortage("preview", f"{SOURCE}.load_vae", call=2, advice="make the images under report"),
    # Writing needs no GPU memory, so the next preview is the first to run short.
    "checkpoint": Shortage("preview", "trainer.training.checkpoint:save_checkpoint", advice="from step 0."),
    "export": Shortage("preview", f"{EXPORT}:export_lora", advice="from step 2."),
    "export_of_averaged_weights": Shortage("preview", f"{EXPORT}:averaged_weights", call=4, optimizer="schedulefree"),
    "images_between_epochs": Shortage("cache_pictures", f"{SOURCE}.load_vae", call=4, fit=f"{SHARDS}\n{SMALL_STEPS}"),
    # One text encoder fits into what a step leaves free in the allocator's cache; two do not.
    "texts_between_epochs": Shortage(
        "cache_texts", f"{SOURCE}.load_text_encoders", call=2, fit=SMALL_SHARDS, resolution=64, family="sdxl"
    ),
}


@pytest.mark.timeout(900)  # two programs, each of which takes ten seconds on an idle core
@pytest.mark.parametrize("name", SHORTAGES)
def test_a_run_survives_a_shortage_during(name: str, emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path]) -> None:
    shortage, job = SHORTAGES[name], tiny_job(SHORTAGES[name].family)
    values = {key: getattr(shortage, key) for key in ("resolution", "rank", "optimizer", "fit")}
    text = job.read_text(encoding="utf-8")
    job.write_text(text[: text.index("[recipe]")] + SETTINGS.format(**values), encoding="utf-8")
    run = job.parent / "runs" / "test"
    program = emulated_gpu.fill_in(
        shortage.function,
        job.parent / "entered",
        leave_mib=shortage.leave_mib,
        call=shortage.call,
        events=run / "events.jsonl",
    )
    done = emulated_gpu.python(*program, "train", job)
    said, seen = done.stdout + done.stderr, events(run)
    first = next((each for each in seen if each["type"] == "memory_exhausted"), None)
    assert first is not None, said
    assert (first["phase"], first["stage"]) == (shortage.phase, shortage.stage)
    assert done.returncode == (75 if shortage.paused else 0), said
    assert not any(raw in said for raw in RAW), said
    if shortage.paused:
        (error,) = [each for each in seen if each["type"] == "error"]
        assert "no smaller plan is left" in error["sentence"]
        assert error["remedy"].startswith("Close other programs that use the GPU (python 11.")
        assert shortage.advice in error["remedy"]
        emulated_gpu.release()
        resumed = emulated_gpu.trainer("resume", run)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    steps = [each["step"] for each in events(run) if each["type"] == "step"]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert len(steps) == STEPS, "finished steps were repeated"
    read_header(run / "output" / "test.safetensors", "lora")


RENDER = "trainer.render.renderer"


@pytest.mark.parametrize(
    "function", [f"{SOURCE}.load_unet", f"{SOURCE}.load_vae", f"{RENDER}:encode_texts", f"{RENDER}:draw_latents"]
)
def test_render_says_that_the_gpu_is_full_during(
    function: str, emulated_gpu: EmulatedGpu, tmp_path: Path, base_of: Callable[[Any], Path]
) -> None:
    images = tmp_path / "images"
    program = emulated_gpu.fill_in(function, tmp_path / "entered", leave_mib=0)
    words = ("--base", str(base_of("sdxl")), "--prompt", "a cat", "--steps", "2", "--out", str(images))
    done = emulated_gpu.python(*program, "render", *words)
    said = done.stdout + done.stderr
    assert done.returncode in (1, 2), said
    assert "Could not render the image: NVIDIA GeForce RTX 3060 does not have enough free memory" in said
    assert "Close other programs that use the GPU (python 11." in said
    assert not any(raw in said for raw in RAW), said
    assert not list(images.glob("*"))


def events(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
