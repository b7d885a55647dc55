"""What comes after a run, without a window: its candidates, the file that goes out, what was edited since."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from app.core.after.export import (
    FileExistsConflict,
    LoraSummary,
    SavedSteps,
    candidates,
    export,
    model_card,
    read_summary,
)
from app.core.after.run_jobs import Edited, edited
from trainer.config.job import Job
from trainer.dataset.dataset import write_listing
from trainer.dataset.folders import scan_folders
from trainer.dataset.image import ImageRecord
from trainer.errors import LoraFileError
from trainer.files.header import read_header
from trainer.files.rewriting import rewrite_metadata
from trainer.protocol import events
from trainer.protocol.run_directory import RunDirectory

METADATA = {
    "ss_output_name": "old",
    "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
    "modelspec.title": "Zürich",
    "modelspec.author": "a",
    "modelspec.trigger_phrase": "sks",
    "other": "kept",
}


def payload(file: Path) -> bytes:
    data = file.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    path = tmp_path / "run é" / "style-step000500.safetensors"
    path.parent.mkdir()
    stream = np.random.default_rng(1)
    tensors = {f"lora_unet_{name}.lora_up.weight": stream.normal(size=(40, 4)).astype(np.float16) for name in "ab"}
    safetensors.numpy.save_file({**tensors, "lora_unet_a.alpha": np.float32([2])}, path, METADATA)
    return path


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path, told = tmp_path / "preview.png", PngInfo()
    told.add_itxt("parameters", "a secret prompt")
    noise = np.random.default_rng(2).integers(0, 255, (600, 400, 3), np.uint8)
    Image.fromarray(noise).save(path, pnginfo=told, icc_profile=b"of somebody's screen")
    return path


def test_only_the_header_is_written_anew(lora: Path) -> None:
    tensors, before = safetensors.numpy.load_file(lora), payload(lora)
    digest = rewrite_metadata(lora, lora, {"modelspec.title": "größer " * 999, "modelspec.author": None})
    assert digest == hashlib.sha256(before).hexdigest() == hashlib.sha256(payload(lora)).hexdigest()
    again = safetensors.numpy.load_file(lora)
    assert again.keys() == tensors.keys() and all(np.array_equal(again[key], tensors[key]) for key in tensors)
    said = read_header(lora, "lora").metadata
    assert said["modelspec.title"] == "größer " * 999 and "modelspec.author" not in said and said["other"] == "kept"
    assert said["sshs_model_hash"] == digest and said["modelspec.hash_sha256"] == f"0x{digest}"


def test_what_is_no_lora_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"<html>")
    with pytest.raises(LoraFileError):
        rewrite_metadata(broken, tmp_path / "new.safetensors", {})
    assert [path.name for path in tmp_path.iterdir()] == ["broken.safetensors"]


def test_an_export_holds_what_it_says_of_itself_and_other_programs_find_its_picture(
    lora: Path, picture: Path, tmp_path: Path
) -> None:
    told = LoraSummary("Title", "Ä", "CC0", "What it does", "sks, neon", picture)
    made = export(lora, tmp_path / "ComfyUI" / "loras", "neon: v1", told)
    assert made.file.name == "neon- v1.safetensors" and payload(made.file) == payload(lora)
    assert read_summary(made.file) == LoraSummary("Title", "Ä", "CC0", "What it does", "sks, neon")
    said = read_header(made.file, "lora").metadata
    assert said["ss_output_name"] == "neon- v1", "A1111 and Forge call it by this"
    kind, _, data = said["modelspec.thumbnail"].partition(",")
    assert kind == "data:image/jpeg;base64" and len(data) < 64 * 1024
    with Image.open(BytesIO(base64.b64decode(data))) as small:
        assert small.format == "JPEG" and max(small.size) == 256
    with Image.open(made.file.with_suffix(".png")) as beside:
        assert beside.size == (400, 600) and not beside.info, "the prompt is not given away"
    words = json.loads(made.file.with_suffix(".json").read_text(encoding="utf-8"))
    assert (words["sd version"], words["activation text"]) == ("SDXL", "sks, neon")
    assert set(made.file.parent.iterdir()) == {made.file, *made.extra_files}


def test_nothing_is_overwritten_without_being_asked(lora: Path, picture: Path, tmp_path: Path) -> None:
    folder = tmp_path / "loras"
    folder.mkdir()
    (folder / "neon.png").write_bytes(b"of somebody")
    with pytest.raises(FileExistsConflict, match=r"neon\.png"):
        export(lora, folder, "neon", LoraSummary("t", image=picture))
    assert [path.name for path in folder.iterdir()] == ["neon.png"]
    export(lora, folder, "neon", LoraSummary("t", image=picture), replace=True)
    assert (folder / "neon.png").read_bytes() != b"of somebody"
    with pytest.raises(LoraFileError, match="own file"):
        export(lora, lora.parent, lora.stem, LoraSummary("t"), replace=True)


@pytest.mark.parametrize("fault", ["image", "folder"])
def test_what_cannot_be_exported_is_said_in_words(lora: Path, tmp_path: Path, fault: str) -> None:
    (tmp_path / "text").write_text("x")
    told = LoraSummary("t", image=tmp_path / "text" if fault == "image" else None)
    with pytest.raises(LoraFileError) as refused:
        export(lora, tmp_path / "text" if fault == "folder" else tmp_path / "new", "neon", told)
    assert refused.value.code == f"export.{fault}" and refused.value.remedy
    assert not list(tmp_path.rglob("neon*"))


def test_candidates_are_the_saved_steps_that_are_there_and_the_best_has_the_lowest_held_out_loss(
    tmp_path: Path,
) -> None:
    (tmp_path / "output").mkdir()
    saved = [
        events.Saved(step=step, file=f"output/a-step{step:06d}.safetensors", sha256="") for step in (10, 20, 30, 40)
    ]
    saved.append(events.Saved(step=40, file="output/a.safetensors", sha256=""))
    for one in saved[1:]:
        (tmp_path / one.file).touch()
    losses = {0: 0.01, 10: 0.05, 20: 0.2, 30: 0.1, 40: None}
    measured = [
        events.Validation(step=step, loss=loss, held_out=True, per_timestep={}) for step, loss in losses.items()
    ]
    measured.append(events.Validation(step=20, loss=0.001, held_out=False, per_timestep={}))
    drawn = events.Preview(step=30, index=1, file="samples/b.png", seconds=1.0)
    found = candidates(SavedSteps(tmp_path, tuple(saved), tuple(measured), (drawn,)))
    assert [(one.step, one.loss, one.best, one.last) for one in found] == [
        (20, 0.2, False, False),
        (30, 0.1, True, False),
        (40, None, False, True),
    ]
    assert found[1].images == {1: tmp_path / "samples/b.png"} and found[2].file.name == "a.safetensors"


def test_the_moving_average_is_the_candidate_because_previews_show_it(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    saved = []
    for step, stem in ((10, "a-step000010"), (20, "a")):
        saved.append(events.Saved(step=step, file=f"output/{stem}.safetensors", sha256=""))
        saved.append(events.Saved(step=step, file=f"output/{stem}-ema.safetensors", sha256="", ema=True))
    for one in saved:
        (tmp_path / one.file).touch()
    found = candidates(SavedSteps(tmp_path, tuple(saved), (), ()))
    assert [(one.file.name, one.last, one.ema) for one in found] == [
        ("a-step000010-ema.safetensors", False, True), ("a-ema.safetensors", True, True),
    ]  # fmt: skip
    (tmp_path / "output" / "a-step000010-ema.safetensors").unlink()
    assert [one.ema for one in candidates(SavedSteps(tmp_path, tuple(saved), (), ()))] == [False, True]


def test_without_held_out_images_the_best_candidate_has_the_lowest_loss_on_training_images(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    saved = [events.Saved(step=step, file=f"output/a-step{step:06d}.safetensors", sha256="") for step in (10, 20)]
    for one in saved:
        (tmp_path / one.file).touch()
    measured = [
        events.Validation(step=step, loss=loss, held_out=False, per_timestep={})
        for step, loss in ((0, 0.01), (10, 0.05), (20, 0.2))
    ]
    found = candidates(SavedSteps(tmp_path, tuple(saved), tuple(measured), ()))
    assert [(one.step, one.loss, one.held_out, one.best) for one in found] == [
        (10, 0.05, False, True),
        (20, 0.2, False, False),
    ]


def test_the_result_is_known_whatever_the_job_is_called(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    files = ((10, "output/a two-step000020 dance-step000010.safetensors"), (20, "output/a two-step000010.safetensors"))
    for _, file in files:
        (tmp_path / file).touch()
    told = SavedSteps(tmp_path, tuple(events.Saved(step=step, file=file, sha256="") for step, file in files), (), ())
    assert [(one.step, one.last) for one in candidates(told)] == [(10, False), (20, True)]


def job_on(folder: Path) -> Job:
    return Job.model_validate(
        {
            "schema": 1,
            "name": "neon",
            "base": {"model": "/models/my_base.safetensors"},
            "dataset": {"folders": [{"path": str(folder)}]},
            "recipe": {"steps": 300, "resolution": 512},
        }
    )


def test_edits_since_the_start_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in "abc":
        Image.new("RGB", (8, 8)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a {name}\n", encoding="utf-8")
    job, run = job_on(folder), RunDirectory.create(tmp_path / "runs", "neon")
    write_listing(
        run.listing,
        [frozen(candidate.path, candidate.captions) for candidate in scan_folders(job.dataset, {}).candidates],
    )
    os.utime(run.listing, ns=(10**18, 10**18))  # a disk's clock may stand still for what follows
    assert edited(run, job) == Edited() and not edited(run, job)
    (folder / "a.txt").write_text("a  b", encoding="utf-8")
    (folder / "b.png").unlink()
    (folder / "d.png").write_bytes((folder / "a.png").read_bytes())
    assert edited(run, job) == Edited(captions=1, added=1, removed=1)
    os.utime(folder / "d.png", ns=(10**17, 10**17))  # a copy keeps the old image's modification date
    assert edited(run, job) == Edited(captions=1, added=1, removed=1)
    run.listing.write_text("damaged")
    assert not edited(run, job)


def test_images_that_the_run_skipped_are_not_counted_as_added(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"damaged")
    job, run = job_on(folder), RunDirectory.create(tmp_path / "runs", "neon")
    write_listing(run.listing, [])
    later = time.time_ns() + 10**9  # later than the image even on a file system with coarse times
    os.utime(run.listing, ns=(later, later))
    assert edited(run, job) == Edited()


def frozen(path: Path, captions: tuple[str, ...]) -> ImageRecord:
    return ImageRecord("0" * 64, path, 8, 8, "train", 1, 1.0, captions, "", "", "none", None, None, None, (8, 8))


def test_the_model_card_tells_what_the_run_knows_and_shows_texts_as_they_are(tmp_path: Path, lora: Path) -> None:
    told = LoraSummary("Neon | *signs*", "Ä", "", "Glows", "sks")
    (candidate,) = candidates(
        SavedSteps(lora.parent, (events.Saved(step=500, file=lora.name, sha256=""),),
             (events.Validation(step=500, loss=0.0832, held_out=True, per_timestep={}),), ())
    )  # fmt: skip
    card = model_card(job_on(tmp_path), told, candidate, "neon", 18)
    assert card.startswith("# Neon \\| \\*signs\\*\n\nGlows\n\n## How to use it\n")
    parts = (
        "Made for my\\_base.safetensors.",
        "`sks`",
        "<lora:neon:1>",
        "| Images | 18 |",
        "| Validation loss | 0.0832 |",
    )
    for part in (*parts, "Author: Ä"):
        assert part in card, part
    assert "License" not in card and "/models" not in card
