"""Keys that jobs, presets and run directories have had since 0.1.0 are read with the same meaning by later versions.

Together with the samples of 0.1.0, those in formats/unreleased state every key of jobs. They are added to, but what a
sample says is never changed. A release writes samples of its own with `python -m tests.golden.formats.make`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.test_formats import SAMPLES, here
from trainer.config.job import CaptionOverlay, ImagesOverlay, Job, RecipeOverlay
from trainer.config.load import parse_job
from trainer.config.optimizers.kinds import OPTIMIZERS
from trainer.config.presets.exchange import load_preset
from trainer.config.schema import Section, fields, sections_in
from trainer.dataset.dataset import read_listing
from trainer.dataset.image import ImageRecord
from trainer.protocol import events
from trainer.protocol.records import build
from trainer.training.engine import TrainingProgress

UNRELEASED = SAMPLES.parent / "unreleased"
ROOT = Path("/data/impasto")
JOBS = sorted((UNRELEASED / "jobs").iterdir())


def stated(section: Section) -> dict[str, Any]:
    """Return what a job or preset states, but not the version of its schema, to which it is migrated."""
    data = section.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    return {name: value for name, value in data.items() if name != "schema"}


def raw(path: Path) -> dict[str, Any]:
    """Return the data of a job or preset, but not the version of its schema."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in data.items() if name != "schema"}


def keys(data: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values, with * for the places of a list of tables."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from keys(value, f"{path}.{name}".lstrip("."))
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        for item in data:
            yield from keys(item, f"{path}.*")
    else:
        yield re.sub(r"(?<=^recipe\.optimizer\.args)\..*", "", path)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_keeps_every_value(path: Path) -> None:
    assert stated(parse_job(path.read_text(encoding="utf-8"), path.name, ROOT)) == here(raw(path))


def test_samples_state_every_key_of_jobs() -> None:
    """A new key belongs in a job of formats/unreleased, with another value than its default."""
    found: set[str] = set()
    for path in ((SAMPLES / "jobs").iterdir(), JOBS):
        for file in path:
            job = parse_job(file.read_text(encoding="utf-8"), file.name, ROOT)
            found |= set(keys(stated(job)))
    values = [field for field in fields(Job) if not sections_in(field.annotation)]
    assert {re.sub(r"\[\w+\]", "", field.key) for field in values} - found == {"schema"}


def test_samples_state_every_optimizer() -> None:
    files = [*(SAMPLES / "jobs").iterdir(), *JOBS]
    names = [
        tomllib.loads(file.read_text(encoding="utf-8"))["recipe"].get("optimizer", {}).get("name") for file in files
    ]
    assert OPTIMIZERS.keys() <= set(names)


def test_a_preset_keeps_every_value() -> None:
    path = UNRELEASED / "presets" / "new_keys.toml"
    assert stated(load_preset(path)) == raw(path)


def test_a_listing_keeps_the_settings_of_folders() -> None:
    (found,) = read_listing(UNRELEASED / "records" / "dataset.jsonl")
    assert found == ImageRecord(
        id="ef" * 32,
        path=ROOT / "pictures" / "0.png",
        width=640,
        height=720,
        kind="train",
        repeats=3,
        weight=0.5,
        captions=("wave, blue",),
        trigger="sks",
        class_words="",
        mask="file",
        mask_path=ROOT / "masks" / "0.png",
        mask_id="12" * 32,
        crop=None,
        bucket=(512, 576),
        overlay=RecipeOverlay(
            captions=CaptionOverlay(shuffle=True, keep_tokens=2, token_warmup_step=0.5),
            images=ImagesOverlay(flip=True),
            timestep_min=20,
            timestep_max=900,
            resolution=512,
        ),
    )


def test_events_keep_their_new_values() -> None:
    found, _ = events.read_events(UNRELEASED / "records" / "events.jsonl")
    step, preview, saved = found
    assert isinstance(step, events.StepEvent) and (step.data_seconds, step.reserved) == (0.125, 234567890)
    assert isinstance(preview, events.Preview) and preview.ema is True
    assert isinstance(saved, events.Saved) and saved.ema is True


def test_counters_keep_early_stopping() -> None:
    text = (UNRELEASED / "records" / "progress.json").read_text(encoding="utf-8")
    assert build(TrainingProgress, json.loads(text)).stale_validations == 2
