"""A finished run on the demo base, with LoRA files that have a visible effect, to test what follows a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy
from PIL import Image

from tests.support import ROOT
from tests.support.runs import write_events
from trainer.config.load import parse_job
from trainer.config.write import dump_job
from trainer.dataset.dataset import write_listing
from trainer.dataset.folders import scan_folders
from trainer.dataset.image import ImageRecord
from trainer.protocol import events
from trainer.protocol.run_directory import RunDirectory, Status

DEMO = ROOT / "assets" / "demo"
STEPS = {100: 0.1431, 200: 0.0832, 300: 0.0917}
"""Saved steps with their validation loss."""
PROMPTS = ("neontube, a blue house on a white background", "a red star")
_LAYERS = [("mid_block_attentions_0", 128), ("down_blocks_0_attentions_0", 32), ("down_blocks_1_attentions_0", 64)]


def write_lora(file: Path, seed: int) -> None:
    """Write a LoRA of rank 2 for some layers of the demo base, strong enough to be visible."""
    stream = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for block, width in _LAYERS:
        for layer in ("attn1_to_q", "attn1_to_v"):
            name = f"lora_unet_{block}_transformer_blocks_0_{layer}"
            tensors[f"{name}.lora_down.weight"] = stream.normal(size=(2, width)).astype(np.float16)
            tensors[f"{name}.lora_up.weight"] = stream.normal(size=(width, 2)).astype(np.float16)
            tensors[f"{name}.alpha"] = np.array(1.0, np.float32)
    metadata = {
        "modelspec.title": "neon",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.trigger_phrase": "neontube",
        "ss_output_name": file.stem,
    }
    safetensors.numpy.save_file(tensors, file, metadata)


def write_finished_run(parent: Path, pictures: Path = DEMO / "pictures") -> RunDirectory:
    """Write a run of 300 steps that has ended; everything exists except the checkpoints."""
    run = RunDirectory.create(parent, "neon")
    run.begin_attempt({"device": "cpu"})
    prompts = ", ".join(
        f"{{prompt = '{text}', width = 128, height = 128, steps = 2, guidance = 2.0}}" for text in PROMPTS
    )
    text = f"""schema = 3
name = "neon"
base = {{model = '{DEMO / "base"}'}}
[[dataset.folders]]
path = '{pictures}'
trigger = "neontube"
[recipe]
steps = 300
resolution = 128
[fit]
device = "cpu"
[report.previews]
prompts = [{prompts}]
"""
    job = parse_job(text, "job.toml", parent)
    run.job.write_text(dump_job(job, comments=False), encoding="utf-8")
    write_listing(run.listing, [_frozen(one.path, one.captions) for one in scan_folders(job.dataset, {}).candidates])
    written: list[events.Event] = []
    for step, loss in STEPS.items():
        written.append(events.Validation(step=step, loss=loss, held_out=True, per_timestep={}))
        written += [_preview(run, step, index) for index in range(len(PROMPTS))]
        written.append(_saved(run, step, f"neon-step{step:06d}"))
    written += [_saved(run, 300, "neon"), events.Finished(outcome="done", step=300, file="output/neon.safetensors")]
    write_events(run, written)
    run.write_status(Status("done", None, 300, 300, 1, 0.0))
    return run


def _saved(run: RunDirectory, step: int, stem: str) -> events.Saved:
    file = run.output / f"{stem}.safetensors"
    write_lora(file, step)
    return events.Saved(step=step, file=f"output/{file.name}", sha256="0" * 64)


def _preview(run: RunDirectory, step: int, index: int) -> events.Preview:
    """Write a preview that differs from every other: one of the demo's own images, more saturated at later steps."""
    file = run.samples / f"step-{step:08d}-{index}.png"
    with Image.open(DEMO / "pictures" / f"neon-{step // 100 + 3 * index:02d}.png") as neon:
        gray = neon.convert("L").convert("RGB")
        Image.blend(gray, neon.convert("RGB"), step / 300).save(file)
    return events.Preview(step=step, index=index, file=f"samples/{file.name}", seconds=1.0)


def _frozen(path: Path, captions: tuple[str, ...]) -> ImageRecord:
    return ImageRecord(
        "0" * 64, path, 128, 128, "train", 1, 1.0, captions, "neontube", "", "none", None, None, None, (128, 128)
    )
