"""What the images page takes from a job that nobody has opened yet, and what it changes there."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from app.core.disk.datasets import Datasets
from app.core.health.groups import NATIVE_RESOLUTIONS, JudgingTarget, judging_target
from app.core.jobs.jobs import Jobs, write_new
from app.core.jobs.target import TargetTracker
from app.core.settings.preferences import Settings
from tests.support.desk import Desk, a_desk
from tests.support.opened import picture
from trainer.config.base import NATIVE_RESOLUTION
from trainer.files.assets import asset_path


class Page:
    """The images page without its window: an open folder, jobs, and what it shows of them."""

    def __init__(self, desk: Desk, folder: Path) -> None:
        self.desk, self.folder = desk, folder
        self.jobs, self.datasets = Jobs(desk.tasks, folder / "jobs"), Datasets(desk.library, desk.tasks)
        self.settings = Settings(folder / "preferences.toml")
        self.target = TargetTracker(self.jobs, self.datasets, self.settings, desk.tasks)
        self.images = folder / "bilder ü"
        picture(self.images / "a.png")

    def job(self, name: str, changed: float, **tables: Any) -> Path:
        """Write a job for the images."""
        dataset = {"folders": [{"path": str(self.images)}], **tables.pop("dataset", {})}
        path = write_new(self.jobs.folder, {"schema": 3, "name": name, "dataset": dataset, **tables})
        os.utime(path, (changed, changed))
        return path

    def open(self) -> TargetTracker:
        """Open the images, and let the page know all that it finds out by itself."""
        known: list[object] = []
        self.datasets.known.connect(known.append)
        self.datasets.open(self.images)
        self.desk.until(lambda: known)
        looked: list[object] = []
        self.jobs.refresh(lambda: looked.append(None))
        self.desk.until(lambda: looked)
        return self.target


@pytest.fixture
def page(tmp_path: Path) -> Any:
    with a_desk() as desk:
        made = Page(desk, tmp_path)
        yield made
        made.datasets.stop()
        made.jobs.close()


def test_without_a_job_the_choice_is_kept_for_the_next_new_one(page: Page) -> None:
    target = page.open()
    assert (target.target, target.job, target.for_new_job()) == (JudgingTarget(), "", {})
    target.set("resolution", 1024)
    target.set("lines", "variants")
    assert target.target == JudgingTarget(1024, 75, "variants")
    assert target.for_new_job() == {"recipe.resolution": 1024, "dataset.lines": "variants"}
    page.settings.file.settle()
    assert Settings(page.settings.file.path).preferences.judging.resolution == 1024


def test_the_latest_job_for_the_images_counts_and_its_base_is_looked_at(page: Page) -> None:
    page.job("old", 1.0, recipe={"resolution": 768})
    page.job("new", 2.0, base={"model": str(asset_path("demo", "base"))}, recipe={"token_chunks": 150})
    write_new(page.jobs.folder, {"name": "other", "dataset": {"folders": [{"path": str(page.folder / "x")}]}})
    target = page.open()
    page.desk.until(lambda: target.target.resolution == 512)  # the native one of SD 1.5
    assert (target.job, target.target.tokens) == ("new", 150)
    assert target.for_new_job() == {"recipe.token_chunks": 150}


def test_a_change_opens_the_job_and_is_in_its_file(page: Page) -> None:
    path = page.job("mine", 1.0, base={"model": "a/base", "family": "sdxl"})
    target, opened = page.open(), []
    page.jobs.opened_changed.connect(opened.append)
    target.set("resolution", 768)
    page.desk.until(lambda: target.target.resolution == 768)
    assert [draft.path for draft in opened if draft] == [path]
    page.jobs.close()
    assert tomllib.loads(path.read_text(encoding="utf-8"))["recipe"]["resolution"] == 768
    assert target.for_new_job() == {"recipe.resolution": 768}


def test_a_closed_folder_leaves_its_job(page: Page) -> None:
    page.job("mine", 1.0, recipe={"resolution": 768})
    target = page.open()
    assert target.job == "mine"
    page.datasets.close(page.images)
    assert (target.job, target.target.resolution) == ("", 1024)


@pytest.mark.parametrize("wrong", [None, "512", 7, 9999, 500, True, [512]])
def test_a_wrong_value_counts_as_absent(wrong: object) -> None:
    values = {"recipe": {"resolution": wrong, "token_chunks": wrong}, "dataset": {"lines": wrong}}

    assert judging_target(values, 512) == JudgingTarget(512, 75, "caption")
    assert judging_target({"recipe": wrong, "dataset": 3}, 512) == JudgingTarget(512, 75, "caption")


def test_native_resolutions_are_those_of_the_trainer() -> None:
    assert dict(NATIVE_RESOLUTIONS) == NATIVE_RESOLUTION
