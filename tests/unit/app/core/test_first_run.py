"""The first start: shown once, and the demo as the tour sets it up."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import pytest

from app.core.first_run import MachineCheck, demo_images, demo_job, read_machine_facts
from app.core.settings import recent
from app.core.settings.recent import is_first_start, remember_welcome
from trainer import gpu
from trainer.config.load import load_job
from trainer.errors import ImpastoError
from trainer.files.assets import asset_path
from trainer.protocol import places


def test_the_welcome_comes_once() -> None:
    assert is_first_start()
    remember_welcome()
    assert not is_first_start()


def test_who_had_a_window_before_is_not_new() -> None:
    recent.write_window_state({"geometry": ""})
    assert not is_first_start()


def test_the_demo_is_a_copy_whose_edits_stay(tmp_path: Path) -> None:
    folder = demo_images()
    assert {path.name for path in folder.iterdir()} == {path.name for path in asset_path("demo", "pictures").iterdir()}
    (folder / "neon-01.txt").write_text("mine", encoding="utf-8")
    assert demo_images() == folder
    assert (folder / "neon-01.txt").read_text(encoding="utf-8") == "mine"
    job = load_job(demo_job(tmp_path / "jobs"))
    assert Path(job.dataset.folders[0].path) == folder
    assert Path(job.base.model) == asset_path("demo", "base")
    assert job.recipe.steps == 300


def test_a_second_tour_has_the_first_ones_job_while_its_base_is_there(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    first = demo_job(jobs)
    assert demo_job(jobs) == first
    text = first.read_text(encoding="utf-8")
    first.write_text(text.replace(str(asset_path("demo", "base")), str(tmp_path / "gone")), encoding="utf-8")
    second = demo_job(jobs)
    assert second != first
    assert load_job(second).base.model == str(asset_path("demo", "base"))


def test_this_machine_with_cards_and_with_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    card = gpu.Gpu(0, "GPU-0", "NVIDIA GeForce RTX 3060", 12 << 30, 11 << 30, "581.15", (13, 1), (8, 6), ())
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card])
    monkeypatch.setattr(places, "free_bytes", {places.home(): 9 << 30}.__getitem__)  # the real one changes at any time
    found = read_machine_facts()
    assert found.gpus == (card,)
    assert found.folder == places.home()
    assert found.free == 9 << 30

    def broken() -> list[gpu.Gpu]:
        raise ImpastoError("gpu.driver", "The NVIDIA driver does not work: it is lost.", "Restart the computer.")

    monkeypatch.setattr(gpu, "list_gpus", broken)
    assert read_machine_facts().fault == "The NVIDIA driver does not work: it is lost. Restart the computer."


def test_a_check_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    monkeypatch.setenv("IMPASTO_CACHE_GB", "many")  # no part of the check; the next line breaks the engine itself
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise RuntimeError('half an installation')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    check = MachineCheck(posted.put)
    check.start()
    while not check.done:
        posted.get(timeout=60)()
    assert check.problem == "RuntimeError: half an installation"
    check.close()
