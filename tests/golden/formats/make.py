"""Write samples of every file that Impasto persists, with the code that writes them for users.

`python -m tests.golden.formats.make VERSION` writes tests/golden/formats/VERSION and never replaces a folder: samples
of a released version are what later versions have to read. It works in /data/impasto, which must not exist, so that no
path of the machine gets into a sample, and removes that folder at the end. Linux only, with the right to write to /.

Every value differs from its default wherever that is possible, so that a reader that ignores a key is noticed.
Keys that are newer than EVERY_KEY are in the jobs of `unreleased`, which become jobs of the version; remove them there.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image

from tests.golden.formats.base import write_base
from tests.golden.formats.names import command_names
from tests.golden.formats.user_folder import write_user_folder
from tests.support.exhaustion import Exhaustion, Trial, step_begins
from tests.support.optimizers import NAMES, every_argument
from trainer.adapter.export import ExportFacts, write_side_files
from trainer.cli import main as command_line
from trainer.config.load import parse_job
from trainer.config.optimizers.kinds import OPTIMIZERS
from trainer.config.presets.exchange import save_as_image
from trainer.config.presets.preset import Preset, dump_preset
from trainer.config.recipe import RecipeConfig
from trainer.config.write import dump_job
from trainer.dataset.dataset import write_listing
from trainer.dataset.image import ImageRecord
from trainer.dataset.sidecar import Sidecar, write_sidecar
from trainer.protocol import commands, events, files
from trainer.protocol.forecast import Forecast, Peak, PhaseForecast, write_forecast
from trainer.protocol.report import CachingReport, Memory, PhaseReport, RunReport, write_report
from trainer.protocol.run_directory import RunDirectory, Status
from trainer.training.engine import TrainingProgress
from trainer.training.run.resume import resume

HERE = Path(__file__).parent
ROOT = Path("/data/impasto")
HOST = "studio"

EVERY_KEY = """
schema = 2
name = "every-key"
preset = "sd15/style"
[base]
model = "base.safetensors"
family = "sd15"
prediction = "v"
zero_terminal_snr = true
vae = "vae.safetensors"
revision = "0123456789abcdef0123456789abcdef01234567"
continue_from = "earlier.safetensors"
[dataset]
lines = "variants"
background = "#102030"
masks = "files"
linked_folders = ["elsewhere"]
max_megapixels = 50.0
validation_share = 0.25
[[dataset.folders]]
path = "pictures"
repeats = 3
recursive = true
trigger = "sks"
class_words = "person"
weight = 0.5
[[dataset.folders]]
path = "others"
kind = "regularization"
[recipe]
adapter = "lora"
layers = "all"
rank = 3
alpha = 1.5
conv_rank = 2
conv_alpha = 0.5
learning_rate = 2e-4
dropout = 0.1
rank_dropout = 0.2
module_dropout = 0.3
images_seen = 120
effective_batch = 5
max_grad_norm = 0.5
clip_skip = 2
token_chunks = 150
caption_padding = "limit"
resolution = 512
seed = 7
text_encoder = {learning_rate = 1e-5, rank = 4, alpha = 2.0}
text_encoder_2 = {learning_rate = 2e-5, rank = 5, alpha = 2.5}
optimizer = {name = "adamw", beta1 = 0.8, beta2 = 0.99, eps = 1e-7, weight_decay = 0.02}
schedule = {kind = "restarts", warmup = 10, end = 0.1, cycles = 3, power = 2.0}
[recipe.images]
buckets = false
bucket_step = 32
bucket_min = 256
bucket_max = 1024
max_upscale = 1.5
crop = "random"
flip = true
[recipe.captions]
prefix = "photo of "
suffix = ", film grain"
separator = ";"
shuffle = true
keep_tokens = 2
keep_separator = "|||"
dropout = 0.05
tag_dropout = 0.06
wildcards = true
[recipe.objective]
loss = "huber"
huber_c = 0.2
min_snr_gamma = 5.0
noise_offset = 0.04
multires_discount = 0.3
multires_iterations = 4
input_perturbation = 0.1
prior_weight = 0.9
unmasked_weight = 0.2
timesteps = "logit_normal"
timestep_min = 10
timestep_max = 980
[fit]
device = "cuda:1"
dtype = "bf16"
quantize = "int8_products"
vae_dtype = "bf16"
vae_encode_tiling = true
text_encoder_batch_size = 2
micro_batch = 2
gradient_checkpointing = ["down_blocks.1", "mid_block"]
attention = "efficient"
vae_tiling = true
preview_offload = true
allow_quantized = true
threads = 3
cuda_graphs = true
compile = true
channels_last = true
fp16_accumulation = true
deterministic = false
cache_gigabytes = 12.5
[[fit.int8_products]]
inputs = 320
outputs = 640
forward = 4096
backward = 1024
[[fallbacks]]
exact = true
gradient_checkpointing = "full"
vae_tiling = true
preview_offload = true
[[fallbacks]]
exact = false
micro_batch = 1
vae_dtype = "bf16"
vae_encode_tiling = true
text_encoder_batch_size = 1
quantize = "nf4"
[report]
tensorboard = true
max_skipped = 11
validation = {every = 50, timesteps = [200, 800]}
saving = {every_steps = 100, keep = 4, checkpoint_every = 25, checkpoint_keep = 3}
[report.previews]
every = 60
[[report.previews.prompts]]
prompt = "sks, a lighthouse"
negative = "blurry"
width = 512
height = 640
seed = 9
steps = 12
guidance = 5.5
sampler = "dpmpp_2m"
[output]
runs = "elsewhere/runs"
dtype = "bf16"
diffusers = true
author = "Ada"
license = "CC-BY-4.0"
description = "Gouache on rough paper."
tag_frequency = true
"""

# What a job states in other ways than EVERY_KEY does: each replaces a line of it or follows on its table.
VARIANTS: dict[str, tuple[str, ...]] = {
    "epochs": ("recipe.epochs=12", "report.saving.every_epochs=2", 'fit.gradient_checkpointing="full"'),
    "steps": ("recipe.steps=900", "recipe.objective.debiased_estimation=true", 'fit.attention="math"'),
    "adafactor": (
        'recipe.optimizer={name="adafactor", relative_step=true, scale_parameter=true, warmup_init=true, '
        "clip_threshold=0.9, decay_rate=-0.7, beta1=0.8, weight_decay=0.02}",
        "recipe.schedule.kind=constant",
        "recipe.schedule.warmup=0",
    ),
    "prodigy": (
        'recipe.optimizer={name="prodigy", beta1=0.8, beta2=0.99, weight_decay=0.02, d_coef=0.9, d0=1e-5, '
        "growth_rate=1.02, safeguard_warmup=false, bias_correction=false}",
        "recipe.learning_rate=0.5",
        "recipe.text_encoder.learning_rate=0.5",
        "recipe.text_encoder_2.learning_rate=0.5",
    ),
    "schedulefree": (
        'recipe.optimizer={name="schedulefree", beta1=0.8, beta2=0.99, eps=1e-7, weight_decay=0.02, warmup_steps=9}',
        "recipe.schedule.kind=constant",
        "recipe.schedule.warmup=0",
    ),
}
for other in (name for name in NAMES if name not in ("adamw", *VARIANTS)):
    constant = ("recipe.schedule.kind=constant", "recipe.schedule.warmup=0")
    VARIANTS[other] = (every_argument(other), *(constant if OPTIMIZERS[other].method.averages else ()))
LENGTH = "images_seen = 120\n"

RUN_JOB = f"""
schema = 2
name = "sample"
[base]
model = "{ROOT}/sample-base.safetensors"
[dataset]
validation_share = 0.25
[[dataset.folders]]
path = "{ROOT}/pictures"
trigger = "sks"
[recipe]
steps = 3
effective_batch = 2
resolution = 64
layers = "attention"
rank = 1
alpha = 1.0
learning_rate = 1e-3
pictures = {{bucket_step = 16, bucket_min = 32, bucket_max = 128}}
[fit]
device = "cpu"
micro_batch = 2
threads = 1
[report]
validation = {{every = 2, timesteps = [500]}}
saving = {{every_steps = 2, checkpoint_every = 2, checkpoint_keep = 1}}
[report.previews]
every = 2
prompts = [{{prompt = "sks, a lighthouse", negative = "blurry", seed = 9, steps = 2, width = 64, height = 64}}]
[output]
dtype = "fp32"
author = "Ada"
license = "CC-BY-4.0"
description = "Gouache."
tag_frequency = true
[[fallbacks]]
exact = true
gradient_checkpointing = "full"
"""

EVENTS: tuple[events.Event, ...] = (
    events.AttemptStarted(pid=4321, device="cuda:1", step_seconds=0.75),
    events.PhaseStarted(phase="cache_pictures", total=20),
    events.PhaseProgress(phase="cache_texts", done=5, total=21),
    events.PhaseFinished(phase="load", seconds=3.5),
    events.CachingSpeed(phase="cache_pictures", count=20, seconds=4.0, decode=9.0, encode=8.0, write=70.0),
    events.StepEvent(
        step=12, epoch=2, loss=0.125, grad_norm=0.5, learning_rates={"unet": 1e-4, "text_encoder": 5e-5}, images=4,
        seconds=0.25, skipped=True, loss_scale=1024.0, memory=123456789,
    ),
    events.Validation(step=10, loss=0.1, held_out=True, per_timestep={"100": 0.05, "900": None}),
    events.Preview(step=10, index=1, file="samples/step000010-1.png", seconds=2.5),
    events.Saved(step=10, file="output/sample-step000010.safetensors", sha256="ab" * 32),
    events.CheckpointEvent(step=10, folder="checkpoints/step-00000010"),
    events.Skipped(step=11, reason="gradient"),
    events.CommandEvent(name="sample", outcome="done", detail="previews of step 10"),
    events.Notice(code="plan", sentence="It fits."),
    events.MemoryExhausted(
        phase="first_step", step=3, requested=20971520, stage="backward", module="unet.mid_block", allocated=8000000000,
        reserved=8100000000, forecast=7900000000,
    ),
    events.SteppedDown(
        step=3, fallback=2, changes={"micro_batch": 1, "gradient_checkpointing": ["mid_block"]}, exact=True
    ),
    events.Slow(step=40, seconds=3.0, median=1.0, reason="others", detail="chrome.exe 1.1 GiB"),
    events.DataWait(step=60, share=0.05, fixed=["loader_workers"]),
    events.MemoryLeak(
        step=160, memory="gpu", since=35, rate=0.03, held=4000000000, grown=100000000,
        grew={"float32 4x64x64": 50000000},
    ),
    events.MemorySample(phase="preview", allocated=1000, reserved=2000),
    events.PhaseMemory(phase="train", seconds=60.0, allocated=1000, reserved=2000, device=3000, host=4000),
    events.ErrorEvent(code="disk.full", sentence="There is no room.", remedy="Free disk space."),
    events.Finished(outcome="paused", step=41, file="output/sample.safetensors", run="sample"),
)  # fmt: skip

FORECAST = Forecast(
    gpu="NVIDIA GeForce RTX 3060",
    phases=(
        PhaseForecast(
            phase="quantise",
            allocated=100,
            reserved=200,
            host=300,
            seconds=4.5,
            peaks=(
                Peak(
                    name="backward of the first up block",
                    module="unet.up_blocks.0",
                    stage="backward",
                    allocated=90,
                    by_kind={"weights": 50, "activations": 40},
                    largest=(("unet.up_blocks.0", 30), ("unet.mid_block", 20)),
                ),
            ),
            timeline=((10, 20), (90, 100)),
        ),
    ),
    allocated=101,
    reserved=202,
    outside=303,
    margin=404,
    budget=505,
    fits=True,
    seconds=606.5,
    step_seconds={"64x64": 0.5, "48x80": 0.25},
    exact=False,
    error=0.125,
    time_factor=1.5,
    flops=7e9,
    flops_limit=8e12,
    encodes_alone=True,
)

REPORT = RunReport(
    gpu="NVIDIA GeForce RTX 3060",
    system="Linux",
    versions={"torch": "2.10.0", "driver": "570.00"},
    seconds=700.0,
    forecast_seconds=606.5,
    images_per_second=3.5,
    flops_per_second=2.5e12,
    share_of_limit=0.4,
    phases={
        "train": PhaseReport(
            seconds=600.0,
            forecast=Memory(7 << 30, 8 << 30, 9 << 30),
            forecast_seconds=500.0,
            measured=Memory(6 << 30, 17 << 29, 19 << 29),
            shortfall=0,
        ),
        "preview": PhaseReport(
            seconds=50.0,
            forecast=Memory(1 << 30, 2 << 30, 3 << 30),
            forecast_seconds=40.0,
            measured=Memory(1 << 30, 2 << 30, 3 << 30),
            shortfall=1 << 20,
        ),
    },
    time_factor=1.25,
    exhausted=1,
    caching={"cache_texts": CachingReport(count=21, seconds=2.0, decode=30.0, encode=12.0, write=90.0)},
)

PRESETS: dict[str, dict[str, object]] = {
    "recipe": {"recipe": {"rank": 8, "learning_rate": 2e-4, "objective": {"min_snr_gamma": 5.0}}},
    "fit": {
        "fit": {"quantize": "int8", "allow_quantized": True, "micro_batch": 2, "gradient_checkpointing": ["mid_block"]},
        "gpu": {"gigabytes": 12.0, "name": "NVIDIA GeForce RTX 3060", "bf16": True},
    },
    "both": {
        "recipe": {"rank": 8, "captions": {"shuffle": True}},
        "fit": {"dtype": "bf16"},
        "examples": [{"prompt": "sks, a lighthouse", "negative": "blurry", "seed": 9, "steps": 12, "guidance": 5.5}],
    },
}


def main() -> None:
    """Write the samples of one version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="such as v0.1.0")
    target = HERE / parser.parse_args().version
    for folder in (target, ROOT):
        if folder.exists():
            parser.error(f"{folder} is there already")
    with _neutral_place():
        samples = ROOT / "samples"
        write_jobs(samples / "jobs")
        write_presets(samples / "presets")
        write_records(samples / "records")
        write_run(samples)
        write_user_folder(samples / "user", ROOT, [REPORT, dataclasses.replace(REPORT, seconds=350.0)])
        (samples / "commands.txt").write_text("\n".join(command_names()) + "\n", encoding="utf-8")
        shutil.copytree(samples, target)


@contextmanager
def _neutral_place() -> Iterator[None]:
    """Work in ROOT on a computer with another name, and clean up."""
    ROOT.mkdir(parents=True)
    former = Path.cwd()
    os.chdir(ROOT)
    try:
        with (
            mock.patch("socket.gethostname", return_value=HOST),
            mock.patch.dict(os.environ, {"IMPASTO_HOME": str(ROOT / "home"), "HOME": str(ROOT)}),
        ):
            yield
    finally:
        os.chdir(former)
        shutil.rmtree(ROOT)


def write_jobs(folder: Path) -> None:
    """Write jobs as the command `new` does, and as runs freeze them with every key there is."""
    folder.mkdir(parents=True)
    every = parse_job(EVERY_KEY, "job.toml", ROOT)
    files.write_text(folder / "every_key.toml", dump_job(every, comments=False))
    for name, settings in VARIANTS.items():
        text = EVERY_KEY.replace(LENGTH, "") if name in ("epochs", "steps") else EVERY_KEY
        if name == "epochs":
            text = text.replace("every_steps = 100, ", "")
        if name == "steps":
            text = text.replace("min_snr_gamma = 5.0\n", "")
        job = parse_job(text, "job.toml", ROOT, settings)
        files.write_text(folder / f"{name}.toml", dump_job(job, comments=False))
    for path in (HERE / "unreleased" / "jobs").glob("*.toml"):
        job = parse_job(path.read_text(encoding="utf-8"), path.name, ROOT)
        files.write_text(folder / f"added_{path.name}", dump_job(job, comments=False))
    write_pictures(ROOT / "pictures")
    arguments = ["new", "--base", str(write_base(ROOT)), "--images", "pictures", "--trigger", "sks", "new-job"]
    assert command_line(arguments) == 0
    shutil.move(ROOT / "new-job" / "job.toml", folder / "new.toml")


def write_pictures(folder: Path) -> None:
    """Write four tiny images with captions."""
    folder.mkdir()
    for number, (width, height) in enumerate(((64, 64), (80, 56), (56, 80), (64, 72))):
        rows, columns = np.mgrid[0:height, 0:width]
        waves = [(np.sin(rows / (3 + number + part)) + np.cos(columns / (4 + part))) * 60 + 128 for part in range(3)]
        Image.fromarray(np.stack(waves, 2).astype(np.uint8) // 32 * 32).save(folder / f"{number}.png", optimize=True)
        (folder / f"{number}.txt").write_text(f"wave {number}, blue\n", encoding="utf-8")


def write_presets(folder: Path) -> None:
    """Write presets with a recipe, with a fit, with both, and one inside an image."""
    folder.mkdir()
    whole = {
        "schema": 1,
        "name": "soft-gouache",
        "author": "Ada",
        "license": "CC-BY-4.0",
        "notes": "Flat colors.",
        "trigger_words": ["sks", "gouache"],
        "base": {"family": "sdxl", "name": "model.safetensors", "sha256": "cd" * 32},
    }
    small = BytesIO()
    Image.new("RGB", (8, 8), (200, 100, 50)).save(small, "PNG")
    preview = {"image": base64.b64encode(small.getvalue()).decode("ascii")}
    for name, more in PRESETS.items():
        preset = Preset.model_validate({**whole, **more, "preview": preview})
        files.write_text(folder / f"{name}.toml", dump_preset(preset))
    save_as_image(preset, folder / "carried.png")


def write_records(folder: Path) -> None:
    """Write the files of a run whose every value differs from its default."""
    folder.mkdir()
    with events.EventWriter(folder / "events.jsonl", attempt=2) as writer:
        for event in EVENTS:
            writer.write(event)
    write_forecast(folder / "forecast.json", FORECAST)
    write_report(folder / "report.json", REPORT)
    run = RunDirectory(folder)
    assert run.write_status(Status("paused", "cache_texts", 41, 90, 2, 1_760_000_000.5))
    progress = TrainingProgress(
        step=41,
        images=82,
        skipped=3,
        skipped_in_row=2,
        back_offs=1,
        best_step=30,
        best_loss=0.125,
        unvalidated=True,
        stale_validations=2,
    )
    files.write_json(folder / "progress.json", dataclasses.asdict(progress))
    write_listing(
        folder / "dataset.jsonl",
        [
            ImageRecord(
                id="ef" * 32, path=ROOT / "pictures" / "0.png", width=64, height=72, kind="regularization", repeats=3,
                weight=0.5, captions=("wave, blue", "a wave"), trigger="sks", class_words="water", mask="file",
                mask_path=ROOT / "pictures" / "0-masklabel.png", mask_id="12" * 32, crop=(0.1, 0.2, 0.9, 0.8),
                bucket=(64, 80),
            ),
            ImageRecord(
                id="01" * 32, path=ROOT / "pictures" / "1.png", width=80, height=56, kind="validation", repeats=1,
                weight=1.0, captions=(), trigger="", class_words="", mask="none", mask_path=None, mask_id=None,
                crop=None, bucket=(80, 48),
            ),
        ],
    )  # fmt: skip
    notes = Sidecar().with_folder(repeats=3, regularization=True, trigger="sks")
    write_sidecar(folder, notes.with_image("0.png", excluded=True, rating=4, crop=(0.1, 0.2, 0.9, 0.8)))
    facts = ExportFacts(
        title="Gouache", family="sdxl", prediction="epsilon", zero_terminal_snr=False, recipe=RecipeConfig(),
        dtype="fp16", base_name="model.safetensors", base_sha256="cd" * 32, step=90, epoch=2, epochs=3, images=20,
        regularization_images=1, started_at=1_760_000_000.0, trigger_words=("sks",), description="Flat colors.",
    )  # fmt: skip
    write_side_files(folder / "lora.safetensors", facts, None)


def write_run(samples: Path) -> None:
    """Train a tiny run that runs out of memory, pause it before its last step, keep that, and finish the original."""
    job = ROOT / "job.toml"
    job.write_text(RUN_JOB, encoding="utf-8")
    exhaustion = Exhaustion(step_begins(2), at=1, times=2)

    def act(event: events.Event) -> None:
        exhaustion.tell(event)
        if isinstance(event, events.Saved):
            commands.send(trial.run.commands, "pause")

    trial = Trial(job, act=act)
    trial.start()
    assert trial.code == 75, trial.error
    run = trial.run
    _leave_commands(run)
    shutil.copytree(run.path, samples / "run", ignore=shutil.ignore_patterns("*.lock", "lock", "console.log"))
    shutil.copytree(ROOT / "pictures", samples / "pictures")
    _keep_first(ROOT / "home" / "cache", samples / "cache")
    assert resume(run, lambda event: None) == 0
    shutil.copy(run.output / "sample.safetensors", samples / "finished.safetensors")


def _leave_commands(run: RunDirectory) -> None:
    """Leave a command pending, one accepted, and one with each outcome."""
    outcomes: Iterable[commands.CommandOutcome] = ("done", "refused", "failed", "void", "withdrawn")
    for outcome in outcomes:
        commands.send(run.commands, "sample", {"reason": outcome})
        commands.finish(commands.pending(run.commands)[-1], outcome, f"It is {outcome}.")
    commands.send(run.commands, "save")
    assert commands.accept(commands.pending(run.commands)[-1])
    commands.send(run.commands, "stop", {"why": "late"})


def _keep_first(cache: Path, target: Path) -> None:
    for kind in ("pictures", "texts"):
        first = min((cache / kind).rglob("*.safetensors"))
        (target / kind / first.parent.name).mkdir(parents=True)
        shutil.copy(first, target / kind / first.parent.name)


if __name__ == "__main__":
    main()
