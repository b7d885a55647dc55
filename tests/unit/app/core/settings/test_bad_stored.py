"""The app starts whatever its files hold, says which were of no use, and keeps them aside; each page reads the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from app.core.runs.summary import summarize
from app.core.session import Session
from app.core.settings import recent
from app.core.settings.preferences import Preferences
from tests.support.bad_contents import BAD, SPECIAL, make_special
from tests.support.desk import Desk
from tests.support.jobs import write_job
from tests.support.runs import write_run
from trainer.dataset.sidecar import FILE_NAME, read_sidecar
from trainer.errors import DatasetError
from trainer.protocol.queue import Queue

STORED = ("preferences.toml", "folders.json", "filters.json", "models.json", "jobs/list.json", "window.json")
CACHES = ("unfinished.json", "hashes.json", "cache/models.json", "cache/pictures.sqlite", "cache/thumbnails.sqlite")
OF_A_RUN = (
    "run.json", "status.json", "events.jsonl", "forecast.json", "report.json", "job.toml", "console.log", "lock",
)  # fmt: skip
EVERY = [*BAD, *SPECIAL]


def spoil(path: Path, what: str) -> bool:
    """Make a file bad; False where this system has no such thing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if what in SPECIAL:
        return make_special(path, what)
    path.write_bytes(BAD[what])
    return True


@pytest.mark.parametrize("what", EVERY)
def test_the_app_starts_without_any_of_its_files(what: str, per_user_folder: Path, desk: Desk) -> None:
    for name in (*STORED, *CACHES):
        if not spoil(per_user_folder / name, what):
            pytest.skip("this system has no such thing")
    session = Session(desk.post)
    try:
        _, window_notice = recent.read_window_state()
        assert session.settings.preferences == Preferences()
        assert session.filters.of() == [] and session.jobs.all == ()
        assert session.models.recent == (("a\0b",) if what == "nul in a path" else ())
        if what not in ("empty", "control characters", "nul"):  # an empty TOML file is one
            for name in ("folders.json", "filters.json", "models.json", "window.json"):
                _assert_kept(per_user_folder / name, what)
        told = (session.recent.notice, session.models.notice, session.filters.file.notice, window_notice)
        assert all("damaged" in notice for notice in told if notice)
    finally:
        session.close()


def _assert_kept(path: Path, what: str) -> None:
    aside = path.with_suffix(f".damaged{path.suffix}")
    kept = aside.exists() or aside.is_symlink()
    assert kept or path.is_file(), f"{path.name} is gone"
    if kept and what in BAD:
        assert aside.read_bytes() == BAD[what]


@pytest.mark.parametrize("what", EVERY)
def test_a_bad_member_costs_the_runs_and_the_queue_itself_alone(
    what: str, per_user_folder: Path, tmp_path: Path, desk: Desk
) -> None:
    good = write_run(tmp_path / "runs", "good", steps=20)
    job = write_job(tmp_path / "job", tmp_path / "base.safetensors", tmp_path)
    queue = Queue()
    bad_entry, kept = queue.add(job), queue.add(job)
    if not spoil(per_user_folder / "queue" / "entries" / f"{bad_entry.id}.json", what):
        pytest.skip("this system has no such thing")
    for name in OF_A_RUN:
        bad = write_run(tmp_path / "runs", f"bad {name}", steps=20, state="paused")
        (bad.path / name).unlink(missing_ok=True)
        spoil(bad.path / name, what)
    session = Session(desk.post)
    try:
        session.runs.refresh()
        desk.until(lambda: session.runs.looked)
        assert good.path in [each.path for each in session.runs.all]
        assert summarize(good.path).state == "done"
        for each in session.runs.all:
            run = session.runs.open(each.path)
            run.read()
            desk.until(lambda run=run: not run._reading.busy)
        reading = queue.read()
        assert [entry.id for entry in reading.entries] == [kept.id]
        assert [fault.id for fault in reading.faults] == [bad_entry.id] and bad_entry.id in reading.faults[0].sentence
        session.queue.look()
        desk.until(lambda: session.queue.entries)
    finally:
        session.close()


@pytest.mark.parametrize("what", ["deep list", "empty"])
def test_a_run_whose_status_cannot_be_read_says_so(what: str, tmp_path: Path) -> None:
    """It was said to have been killed, although it had been paused."""
    run = write_run(tmp_path, "paused", steps=20, state="paused")
    run.status.write_bytes(BAD[what])
    assert summarize(run.path).status_fault.startswith(f"Could not read {run.status}: ")
    run.status.unlink()
    assert summarize(run.path).status_fault == ""


@pytest.mark.parametrize("what", [what for what in EVERY if what != "endless"])  # that is a link, and not followed
def test_notes_that_cannot_be_read_are_a_finding_until_they_can(what: str, tmp_path: Path, desk: Desk) -> None:
    Image.new("RGB", (40, 30), "teal").save(tmp_path / "a.png")
    notes = tmp_path / FILE_NAME
    if not spoil(notes, what):
        pytest.skip("this system has no such thing")
    session = Session(desk.post)

    def look() -> None:
        session.datasets.refresh(whole=True)
        desk.until(lambda: not any(each.scanning or each.sizing for each in session.datasets._open.values()))
        desk.until(lambda: bool(session.health.judge))

    def damaged() -> list[str]:
        return [finding.sentence for finding in session.health._findings() if finding.code == "sidecar.damaged"]

    try:
        session.datasets.open(tmp_path)
        look()
        try:
            read_sidecar(tmp_path)
            refused = False
        except DatasetError:
            refused = True  # and so `check` and `train` refuse the folder
        assert [str(notes) in sentence for sentence in damaged()] == ([True] if refused else [])
        assert refused or what in ("empty", "wrong types", "nul in a path")  # keys that other programs may use
        notes.rmdir() if notes.is_dir() else notes.unlink()
        notes.write_text('{"file": "a.png", "rating": 4}\n', encoding="utf-8")
        look()
        assert damaged() == []
    finally:
        session.close()
