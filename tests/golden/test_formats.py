"""Files that Impasto 0.1.0 wrote are read with the same meaning: jobs, presets, run directories.

What is expected is written down here, or read from the samples by plain JSON, TOML and safetensors parsers, never by
the reader under test. The samples are never changed; `python -m tests.golden.formats.make` writes those of a version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from tests.golden.formats.base import NAME, SHA256, write_base
from trainer.adapter.export import TIME_KEYS
from trainer.base.drawing import parameters_line
from trainer.config.load import load_job, parse_job
from trainer.config.presets.creating import preset_of_lora
from trainer.config.presets.exchange import load_preset, load_preset_or_image
from trainer.config.presets.preset import Preset
from trainer.config.schema import Section
from trainer.dataset.dataset import read_listing
from trainer.dataset.image import ImageRecord
from trainer.dataset.sidecar import FolderSettings, ImageSettings, read_sidecar
from trainer.files.header import read_header
from trainer.protocol import commands, events
from trainer.protocol.forecast import Forecast, Peak, PhaseForecast, read_forecast
from trainer.protocol.records import build
from trainer.protocol.report import CachingReport, Memory, PhaseReport, RunReport, read_report
from trainer.protocol.run_directory import RunDirectory, Status
from trainer.training.active_plan import ActivePlan
from trainer.training.callbacks.checkpoints import is_restorable
from trainer.training.checkpoint import load_checkpoint
from trainer.training.data.latent_cache import EntryStore
from trainer.training.engine import TrainingProgress
from trainer.training.run.resume import resume

SAMPLES = Path(__file__).parent / "formats" / "v0.1.0"
RECORDS = SAMPLES / "records"
ROOT = "/data/impasto"

RENAMED: dict[str, str] = {
    "recipe.max_grad_norm": "clip_gradient",
    "recipe.images": "pictures",
    "recipe.images_seen": "pictures_seen",
    "recipe.objective.debiased_estimation": "debiased",
    "recipe.objective.multires_iterations": "multires_levels",
    "fit.quantize": "quantise",
    "fit.allow_quantized": "allow_quantised",
    "fit.gradient_checkpointing": "checkpointing",
    "fit.cuda_graphs": "graphs",
    "fallbacks": "ladder",
    "fallbacks.quantize": "quantise",
    "fallbacks.gradient_checkpointing": "checkpointing",
    "output.license": "licence",
    "license": "licence",
    "gpu": "card",
    "preview.image": "picture",
}
"""The last part of each key of jobs and presets that was renamed since 0.1.0, by its present dotted key.

Stated apart from the program's own migrations, which are tested against it: {"fit.quantize": "quantise"}.
"""
RENAMED_VALUES: dict[object, object] = {"regularization": "regularisation"}
"""Words that are values of those keys and were renamed since, by the present word."""

RENAMED_EVENT_KEYS: dict[str, dict[str, str]] = {"step": {"images": "pictures"}, "stepped_down": {"fallback": "rung"}}
"""The former keys of events that were renamed since, by the event's type and the present key."""

ADDED_EVENT_KEYS: dict[str, tuple[str, ...]] = {
    "step": ("data_seconds", "reserved"),
    "preview": ("ema",),
    "saved": ("ema",),
}
"""Keys that events have had since later versions, by the event's type; they are None in those of 0.1.0."""

JOBS = sorted(path.name for path in (SAMPLES / "jobs").iterdir() if path.name != "new.toml")


def as_written(value: Any, path: str = "") -> Any:
    """Return the data of a job or preset under the keys and words of 0.1.0; `path` is its present dotted key."""
    if isinstance(value, dict):
        keys = {name: f"{path}.{name}".lstrip(".") for name in value}
        return {RENAMED.get(keys[name], name): as_written(inner, keys[name]) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_written(item, path) for item in value]
    return RENAMED_VALUES.get(value, value)


def stated(section: Section, *, unset: bool) -> dict[str, Any]:
    """Return what a job or preset holds, as 0.1.0 would have written it; with `unset` also what is not stated."""
    data = section.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=not unset)
    return {**as_written(data), "schema": 2 if "dataset" in data else 1}


def here(value: Any) -> Any:
    """Return data with the paths of the samples as this system writes them: Windows adds a drive."""
    if isinstance(value, dict):
        return {key: here(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [here(item) for item in value]
    return os.path.abspath(value) if isinstance(value, str) and value.startswith(ROOT) else value  # noqa: PTH100


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- jobs and presets


@pytest.mark.parametrize("name", JOBS)
def test_a_job_with_every_key_keeps_every_value(name: str) -> None:
    text = (SAMPLES / "jobs" / name).read_text(encoding="utf-8")
    assert stated(parse_job(text, name, Path(ROOT)), unset=True) == here(tomllib.loads(text))


def test_no_value_of_these_jobs_is_its_default() -> None:
    """Else a reader that ignores a key would go unnoticed."""
    defaults = parse_job(
        'schema = 2\nname = "x"\n[base]\nmodel = "x"\n[[dataset.folders]]\npath = "x"\n', "job.toml", Path(ROOT)
    )
    plain = dict(leaves(stated(defaults, unset=True)))
    sample = dict(leaves(tomllib.loads((SAMPLES / "jobs" / "every_key.toml").read_text(encoding="utf-8"))))
    alike = {key for key, value in sample.items() if plain.get(key) == value}
    # Others of the jobs state these: a folder of regularization images, every optimizer, and debiased estimation.
    elsewhere = {"dataset.folders.0.kind", "recipe.optimizer.name", "recipe.objective.debiased"}
    assert alike == {"schema", "recipe.adapter", *elsewhere}
    assert plain.keys() - sample.keys() <= {"ladder", "report.previews.prompts"}  # empty, and not empty in the sample


def leaves(data: Mapping[str, Any] | list[Any], path: str = "") -> Any:
    pairs = data.items() if isinstance(data, Mapping) else ((str(place), item) for place, item in enumerate(data))
    for name, value in pairs:
        key = f"{path}.{name}".lstrip(".")
        if isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
            yield from leaves(value, key)
        else:
            yield key, value


def test_a_job_as_the_command_new_writes_it() -> None:
    text = (SAMPLES / "jobs" / "new.toml").read_text(encoding="utf-8")
    expected = tomllib.loads(text)
    expected["base"]["model"] = f"{ROOT}/{NAME}"
    expected["dataset"]["folders"][0]["path"] = f"{ROOT}/pictures"
    found = stated(parse_job(text, "job.toml", Path(ROOT, "new-job")), unset=False)
    found.pop("output", None)  # where runs go, made absolute
    assert found == here(expected)


@pytest.mark.parametrize("name", ["recipe", "fit", "both"])
def test_a_preset_keeps_every_value(name: str) -> None:
    path = SAMPLES / "presets" / f"{name}.toml"
    expected = tomllib.loads(path.read_text(encoding="utf-8"))
    found = stated(load_preset(path), unset=False)
    for preview in (found["preview"], expected["preview"]):
        preview["picture"] = "".join(preview["picture"].split())
    assert found == expected


def test_a_preset_inside_an_image() -> None:
    expected = tomllib.loads((SAMPLES / "presets" / "both.toml").read_text(encoding="utf-8"))
    del expected["preview"]
    found: Preset = load_preset_or_image(SAMPLES / "presets" / "carried.png")
    assert stated(found.replaced(preview=None), unset=False) == expected


# --- what a run writes, each value another than its default


def test_every_event() -> None:
    found, _ = events.read_events(RECORDS / "events.jsonl")
    expected = (
        events.AttemptStarted(pid=4321, device="cuda:1", step_seconds=0.75),
        events.PhaseStarted(phase="cache_pictures", total=20),
        events.PhaseProgress(phase="cache_texts", done=5, total=21),
        events.PhaseFinished(phase="load", seconds=3.5),
        events.CachingSpeed(phase="cache_pictures", count=20, seconds=4.0, decode=9.0, encode=8.0, write=70.0),
        events.StepEvent(
            step=12,
            epoch=2,
            loss=0.125,
            grad_norm=0.5,
            learning_rates={"unet": 1e-4, "text_encoder": 5e-5},
            images=4,
            seconds=0.25,
            skipped=True,
            loss_scale=1024.0,
            memory=123456789,
        ),
        events.Validation(step=10, loss=0.1, held_out=True, per_timestep={"100": 0.05, "900": None}),
        events.Preview(step=10, index=1, file="samples/step000010-1.png", seconds=2.5),
        events.Saved(step=10, file="output/sample-step000010.safetensors", sha256="ab" * 32),
        events.CheckpointEvent(step=10, folder="checkpoints/step-00000010"),
        events.Skipped(step=11, reason="gradient"),
        events.CommandEvent(name="sample", outcome="done", detail="previews of step 10"),
        events.Notice(code="plan", sentence="It fits."),
        events.MemoryExhausted(
            phase="first_step",
            step=3,
            requested=20971520,
            stage="backward",
            module="unet.mid_block",
            allocated=8000000000,
            reserved=8100000000,
            forecast=7900000000,
        ),
        events.SteppedDown(
            step=3, fallback=2, changes={"micro_batch": 1, "gradient_checkpointing": ["mid_block"]}, exact=True
        ),
        events.Slow(step=40, seconds=3.0, median=1.0, reason="others", detail="chrome.exe 1.1 GiB"),
        events.PhaseMemory(phase="train", seconds=60.0, allocated=1000, reserved=2000, device=3000, host=4000),
        events.ErrorEvent(code="disk.full", sentence="There is no room.", remedy="Free disk space."),
        events.Finished(outcome="paused", step=41, file="output/sample.safetensors", run="sample"),
    )
    lines = lines_of(RECORDS / "events.jsonl")
    assert found == [
        type(event)(**{**vars(event), "time": line["time"], "attempt": 2})
        for event, line in zip(expected, lines, strict=True)
    ]
    assert {line["type"] for line in lines} <= events.TYPES.keys()


@pytest.mark.parametrize("file", ["records/events.jsonl", "run/events.jsonl"])
def test_events_are_written_as_before(file: str) -> None:
    """Other programs read them; only the words of `RENAMED_EVENT_KEYS` were replaced."""
    for line in lines_of(SAMPLES / file):
        written = json.loads(events.to_line(events.from_line(json.dumps(line))))
        if "changes" in written:
            written["changes"] = as_written(written["changes"], "fit")
        former = RENAMED_EVENT_KEYS.get(line["type"], {})
        for key in ADDED_EVENT_KEYS.get(line["type"], ()):
            assert written.pop(key) is None
        assert {former.get(key, key): value for key, value in written.items()} == line


def test_a_status() -> None:
    found = RunDirectory(RECORDS).read_status()
    assert found == Status(state="paused", phase="cache_texts", step=41, steps=90, attempt=2, heartbeat=1_760_000_000.5)


def test_the_counters_of_a_checkpoint() -> None:
    found = build(TrainingProgress, json.loads((RECORDS / "progress.json").read_text(encoding="utf-8")))
    assert found == TrainingProgress(
        step=41,
        images=82,
        skipped=3,
        skipped_in_row=2,
        back_offs=1,
        best_step=30,
        best_loss=0.125,
        unvalidated=True,
    )


def test_a_listing() -> None:
    first, second = read_listing(RECORDS / "dataset.jsonl")
    assert first == ImageRecord(
        id="ef" * 32,
        path=Path(ROOT, "pictures", "0.png"),
        width=64,
        height=72,
        kind="regularization",
        repeats=3,
        weight=0.5,
        captions=("wave, blue", "a wave"),
        trigger="sks",
        class_words="water",
        mask="file",
        mask_path=Path(ROOT, "pictures", "0-masklabel.png"),
        mask_id="12" * 32,
        crop=(0.1, 0.2, 0.9, 0.8),
        bucket=(64, 80),
    )
    assert second.captions == () and (second.mask_path, second.mask_id, second.crop) == (None, None, None)
    assert (second.kind, second.mask) == ("validation", "none")


def test_notes_of_a_folder() -> None:
    found = read_sidecar(RECORDS)
    assert found.folder == FolderSettings(impasto=1, repeats=3, regularization=True, trigger="sks")
    assert dict(found.images) == {
        "0.png": ImageSettings(file="0.png", excluded=True, rating=4, crop=(0.1, 0.2, 0.9, 0.8))
    }


def test_a_forecast() -> None:
    peak = Peak(
        name="backward of the first up block",
        module="unet.up_blocks.0",
        stage="backward",
        allocated=90,
        by_kind={"weights": 50, "activations": 40},
        largest=(("unet.up_blocks.0", 30), ("unet.mid_block", 20)),
    )
    phase = PhaseForecast(
        phase="quantise",
        allocated=100,
        reserved=200,
        host=300,
        seconds=4.5,
        peaks=(peak,),
        timeline=((10, 20), (90, 100)),
    )
    assert read_forecast(RECORDS / "forecast.json") == Forecast(
        gpu="NVIDIA GeForce RTX 3060",
        phases=(phase,),
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


def test_a_report() -> None:
    gib = 1 << 30
    assert read_report(RECORDS / "report.json") == RunReport(
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
                forecast=Memory(allocated=7 * gib, reserved=8 * gib, device=9 * gib),
                forecast_seconds=500.0,
                measured=Memory(allocated=6 * gib, reserved=17 * gib // 2, device=19 * gib // 2),
                shortfall=0,
            ),
            "preview": PhaseReport(
                seconds=50.0,
                forecast=Memory(allocated=gib, reserved=2 * gib, device=3 * gib),
                forecast_seconds=40.0,
                measured=Memory(allocated=gib, reserved=2 * gib, device=3 * gib),
                shortfall=1 << 20,
            ),
        },
        time_factor=1.25,
        exhausted=1,
        caching={"cache_texts": CachingReport(count=21, seconds=2.0, decode=30.0, encode=12.0, write=90.0)},
    )


# --- the run directory of a run that was paused before its last step


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """The sample run in a place of its own, with its base and images: paths in its files are changed accordingly."""
    assert hashlib.sha256(write_base(tmp_path).read_bytes()).hexdigest() == SHA256
    shutil.copytree(SAMPLES / "pictures", tmp_path / "pictures")
    shutil.copytree(SAMPLES / "run", tmp_path / "run")
    found = RunDirectory(tmp_path / "run")
    before = hashlib.sha256(found.listing.read_bytes()).hexdigest()
    for file in (found.job, found.run, found.listing):
        moved = re.sub(rf'{ROOT}([^"]*)', lambda match: escaped(tmp_path, match[1]), file.read_text(encoding="utf-8"))
        file.write_text(moved, encoding="utf-8", newline="\n")
    text = found.run.read_text(encoding="utf-8")
    assert before in text
    after = hashlib.sha256(found.listing.read_bytes()).hexdigest()
    found.run.write_text(text.replace(before, after), encoding="utf-8")
    for folder in (found.commands / "done", found.samples):
        folder.mkdir(parents=True, exist_ok=True)
    return found


def escaped(root: Path, rest: str) -> str:
    return json.dumps(str(Path(f"{root}{rest}")))[1:-1]


def test_a_run_is_read(run: RunDirectory) -> None:
    assert run.state() == "paused"
    (attempt,) = run.attempts()
    raw = json.loads(run.run.read_text(encoding="utf-8"))["attempts"][0]
    assert attempt == raw
    assert attempt["segments"] == [[0, 3, False]]
    assert {"number", "pid", "host", "started", "job", "base", "listing", "device", "threads", "versions"} < set(raw)
    typed = run.read_user_recipe()
    assert typed is not None
    assert (typed["steps"], typed["rank"], typed["images"]) == (
        3,
        1,
        {"bucket_step": 16, "bucket_min": 32, "bucket_max": 128},
    )
    text = run.job.read_text(encoding="utf-8")
    assert stated(load_job(run.job), unset=True) == tomllib.loads(text)
    assert [each.repeats for each in read_listing(run.listing)] == [1] * 4


def test_the_commands_of_a_run(run: RunDirectory) -> None:
    (waiting,) = commands.pending(run.commands)
    assert (waiting.name, waiting.arguments) == ("stop", {"why": "late"})
    assert waiting.sent == json.loads(waiting.path.read_text(encoding="utf-8"))["sent"]
    ending = commands.ending(run.commands)
    assert ending is not None and (ending.name, ending.accepted) == ("stop", False)
    done = sorted((run.commands / "done").iterdir())
    answers = [commands.answer(run.commands / path.name) for path in done]
    assert answers == [
        commands.CommandResult("done", "paused at step 2"),
        commands.CommandResult("done", "It is done."),
        commands.CommandResult("refused", "It is refused."),
        commands.CommandResult("failed", "It is failed."),
        commands.CommandResult("void", "It is void."),
        commands.CommandResult("withdrawn", "It is withdrawn."),
    ]


def test_a_checkpoint() -> None:
    folder = SAMPLES / "run" / "checkpoints" / "step-00000002"
    found = load_checkpoint(folder)
    assert found is not None and is_restorable(found)
    for name, tensors in (("adapter", found.adapter), ("optimizer", found.optimizer)):
        plain = load_file(folder / f"{name}.safetensors")
        assert tensors.keys() == plain.keys()
        assert all(np.array_equal(tensors[key].numpy(), plain[key]) for key in plain)
    raw = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    assert found.step == raw["progress"]["step"] == 2
    assert build(TrainingProgress, raw["progress"]) == TrainingProgress(
        step=2, images=3, best_step=2, best_loss=raw["progress"]["best_loss"]
    )
    plan = ActivePlan(load_job(SAMPLES / "run" / "job.toml").fit, ())
    plan.load(raw)
    (taken,) = plan.applied
    assert (taken.step, taken.number) == (1, 1)
    written = {key: value for key, value in raw["rungs"][0]["rung"].items() if value is not None}
    assert as_written(taken.fallback.model_dump(mode="json", exclude_none=True), "fallbacks") == written
    assert plan.at(1).gradient_checkpointing == "full" and plan.at(0).gradient_checkpointing == "none"


def test_a_paused_run_is_resumed_to_the_same_lora(run: RunDirectory) -> None:
    """Within the rounding of another processor or library: a lost state of the optimizer is ten times further off."""
    assert resume(run, lambda event: None) == 0
    found, golden = run.output / "sample.safetensors", SAMPLES / "finished.safetensors"
    lora, expected = load_file(found), load_file(golden)
    assert lora.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(lora[name], values, rtol=1e-3, atol=1e-5, err_msg=name)
    told, before = read_header(found, "lora").metadata, read_header(golden, "lora").metadata
    changing = {*TIME_KEYS, "sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", "modelspec.thumbnail"}
    assert told.keys() == before.keys()
    assert as_written(json.loads(told.pop("impasto_recipe")), "recipe") == json.loads(before.pop("impasto_recipe"))
    assert {key for key in told if told[key] != before[key]} <= changing


def test_what_an_image_says_of_its_making() -> None:
    from PIL import Image

    with Image.open(SAMPLES / "run" / "samples" / "step-00000000-0.png") as image:
        settings = json.loads(image.info["impasto"])
        line = image.info["parameters"]
    assert settings["prompt"] == "sks, a lighthouse" and settings["seed"] == 9 and settings["run"] == "sample"
    assert parameters_line(settings) == line


# --- LoRA files and cached latents and texts


def test_a_lora_gives_its_recipe() -> None:
    path = SAMPLES / "finished.safetensors"
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    raw = json.loads(header["__metadata__"]["impasto_recipe"])
    made = preset_of_lora(path)
    assert made.preset.recipe is not None
    found = as_written(made.preset.recipe.model_dump(mode="json", by_alias=True, exclude_none=True), "recipe")
    del raw["text_encoder_2"]  # SD 1.5 has one text encoder
    assert {key: found.get(key) for key in raw} == raw
    assert (made.preset.author, made.preset.license) == ("Ada", "CC-BY-4.0")


@pytest.mark.parametrize(("kind", "names"), [("pictures", {"mean", "std"}), ("texts", {"hidden"})])
def test_cached_latents_and_texts(kind: str, names: set[str]) -> None:
    (path,) = (SAMPLES / "cache" / kind).rglob("*.safetensors")
    found = EntryStore(SAMPLES / "cache" / kind).read(path.stem)
    assert found is not None and found.keys() == names
    assert all(np.array_equal(found[key].numpy(), plain) for key, plain in load_file(path).items())
    assert load_tensors(path).keys() == names


def test_resuming_finds_what_was_cached(run: RunDirectory, per_user_folder: Path) -> None:
    """The keys of the cache are the same: else every user's images were encoded again."""
    shutil.copytree(SAMPLES / "cache", per_user_folder / "cache")
    before = {path.name for path in (per_user_folder / "cache").rglob("*.safetensors")}
    assert resume(run, lambda event: None) == 0
    after = list((per_user_folder / "cache").rglob("*.safetensors"))
    # What the remaining steps need; another number would mean that what is there was encoded again under other keys.
    assert len(after) == 8 and before <= {path.name for path in after}
