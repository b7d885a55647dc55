"""Test the list of jobs: opening, duplicating, trashing and closing jobs, and errors of reading and writing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.core.jobs import essentials, job_file
from app.core.jobs import jobs as jobs_module
from app.core.jobs.draft import Draft
from app.core.jobs.job_file import Values
from app.core.jobs.jobs import Jobs
from app.core.tasks import Tasks, reraise
from tests.support.desk import Desk
from tests.support.drafts import BARE, on_disk, refuse_writing, write_bare
from trainer.errors import JobError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_bare(tmp_path)


@pytest.fixture
def jobs(tasks: Tasks, tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tasks, tmp_path / "per user" / "jobs")
    yield jobs
    jobs.close()


def done(desk: Desk, ask: Callable[..., None], *what: Any) -> Any:
    """Ask for something, and return what came of it; raise what it was refused for."""
    came: list[Any] = []
    refused: list[JobError] = []
    ask(*what, came.append, refused.append)
    desk.until(lambda: bool(came or refused))
    if refused:
        raise refused[0]
    return came[0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("schema = 99\nname = 'x'", "job.newer"),
        ("name = ", "job.toml"),
        ("\ud800".encode("utf-8", "surrogatepass"), "job.encoding"),
    ],
)
def test_what_cannot_be_opened_is_told_and_left_as_it_is(desk, jobs, file, text, code):
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = file.read_bytes()
    with pytest.raises(JobError) as reported:
        done(desk, jobs.open, file)
    assert reported.value.code == code and file.read_bytes() == before and jobs.last is None


def new(name: str, folder: Path) -> Values:
    return essentials.new_values(name, [], folder, {})


def test_a_place_that_cannot_be_written_keeps_the_changes_and_at_the_end_they_are_among_our_jobs(
    desk, tasks, tmp_path, file, monkeypatch
):
    jobs = Jobs(tasks, tmp_path / "jobs")
    draft = done(desk, jobs.open, file)
    errors: list[JobError] = []
    draft.file.failed.connect(errors.append)
    refuse_writing(file.parent, monkeypatch)
    draft.set("recipe.rank", 77)
    desk.until(lambda: bool(errors))
    assert errors[0].code == "job.unwritable" and draft.get("recipe.rank") == 77 and draft.file.unsaved
    reported: list[Path] = []
    jobs.rescued.connect(reported.append)
    jobs.close()
    (rescued,) = (tmp_path / "jobs").glob("*/job.toml")
    assert reported == [rescued]
    assert on_disk(rescued)["recipe"]["rank"] == 77
    assert on_disk(rescued)["dataset"]["folders"][0]["path"] == str(file.parent / "pictures of cats")
    assert file.read_text(encoding="utf-8") == BARE


def test_jobs_are_listed_duplicated_thrown_away_and_brought_back(desk, jobs, file):
    path = done(desk, jobs.create, "Höhle: 1", new)
    assert path == jobs.folder / "Höhle- 1" / "job.toml"
    draft = done(desk, jobs.open, path)
    draft.set("recipe.rank", 5)
    copy = done(desk, jobs.duplicate, path)
    assert on_disk(copy) == {**draft.values, "name": "Höhle: 1 2"}
    done(desk, jobs.open, file)
    looked: list[None] = []
    jobs.refresh(lambda: looked.append(None))
    desk.until(lambda: bool(looked))
    assert {entry.name for entry in jobs.all} == {"Höhle: 1", "Höhle: 1 2", "höhle"}
    desk.until(lambda: on_disk(path).get("recipe") == {"rank": 5})  # the one that was open goes there behind the next
    (path.parent / "runs").mkdir()
    thrown = done(desk, jobs.trash, path)
    assert not path.exists() and (path.parent / "runs").is_dir() and thrown.moved_to is not None
    done(desk, jobs.restore, thrown)
    assert on_disk(path)["recipe"]["rank"] == 5
    assert done(desk, jobs.trash, file).moved_to is None and file.exists()  # one of others' is only taken off the list
    assert file not in [entry.path for entry in jobs.all]


def test_a_job_that_the_trash_does_not_take_stays_open(desk, jobs):
    path = done(desk, jobs.create, "kept", new)
    draft = done(desk, jobs.open, path)
    (jobs.folder.parent / "trash").write_text("no folder", encoding="utf-8")
    with pytest.raises(JobError):
        done(desk, jobs.trash, path)
    assert path.exists() and done(desk, jobs.open, path) is draft


def test_the_list_of_jobs_elsewhere_outlives_the_session(desk, tasks, tmp_path, file):
    jobs = Jobs(tasks, tmp_path / "jobs")
    done(desk, jobs.open, file)
    jobs.close()
    later = Jobs(tasks, tmp_path / "jobs")
    looked: list[None] = []
    later.refresh(lambda: looked.append(None))
    desk.until(lambda: bool(looked))
    assert later.last == file and [entry.name for entry in later.all] == ["höhle"]
    (tmp_path / "jobs" / "list.json").write_text("{", encoding="utf-8")
    assert "Could not read list.json" in Jobs(tasks, tmp_path / "jobs").notice


def test_a_copy_of_a_job_keeps_the_comments_in_it(desk: Desk, jobs: Jobs, file: Path) -> None:
    copied = BARE.replace("höhle", "höhle 2").replace("pictures of cats", (file.parent / "pictures of cats").as_posix())
    assert done(desk, jobs.duplicate, file).read_text(encoding="utf-8") == copied
    draft = done(desk, jobs.open, file)
    draft.set("recipe.rank", 9)
    desk.until(lambda: not draft.file.unsaved)
    file.unlink()  # the open job can be copied without it
    assert on_disk(done(desk, jobs.duplicate, file))["recipe"]["rank"] == 9


def test_a_runs_frozen_job_is_copied_without_its_fit(desk, jobs, file):
    run = file.parent / "runs" / "a"
    run.mkdir(parents=True)
    (run / "events.jsonl").touch()
    (run / "job.toml").write_text(BARE + "[fit]\nmicro_batch = 2\n[output]\nruns = '..'\n", encoding="utf-8")
    values = on_disk(done(desk, jobs.duplicate, run / "job.toml"))
    assert "fit" not in values and "output" not in values and values["recipe"]["rank"] == 8


def test_the_last_of_several_that_are_asked_for_is_opened_and_none_is_read_by_the_window(
    desk, tasks, tmp_path, file, monkeypatch
):
    jobs = Jobs(tasks, tmp_path / "jobs")
    other = tmp_path / "other" / "job.toml"
    other.parent.mkdir()
    other.write_text(BARE.replace("höhle", "other"), encoding="utf-8")
    readers: list[threading.Thread] = []
    read = job_file.read_job_text
    monkeypatch.setattr(
        job_file, "read_job_text", lambda *words: (readers.append(threading.current_thread()), read(*words))[1]
    )
    shown: list[Draft] = []
    jobs.open(file, shown.append, shown.append)  # type: ignore[arg-type]
    jobs.open(other, shown.append, shown.append)  # type: ignore[arg-type]
    desk.until(lambda: bool(shown) and len(readers) == 2)
    assert [draft.name for draft in shown] == ["other"] and jobs.last == other
    assert threading.current_thread() not in readers
    for _ in range(2):  # a second click before the first is answered
        jobs.open(file, shown.append, shown.append)  # type: ignore[arg-type]
    desk.until(lambda: len(shown) == 3)
    assert shown[1] is shown[2]
    jobs.close()


def test_what_is_told_of_a_broken_file_is_over_when_another_job_is_opened(desk, jobs, file):
    draft = done(desk, jobs.open, file)
    reported: list[JobError] = []
    resolved: list[JobError] = []
    draft.file.failed.connect(reported.append)
    jobs.resolved.connect(resolved.append)
    file.write_text("rank = = 3", encoding="utf-8")
    draft.check_file()
    desk.until(lambda: bool(reported))
    other = done(desk, jobs.create, "other", new)
    done(desk, jobs.open, other)
    assert resolved == reported
    assert file.read_text(encoding="utf-8") == "rank = = 3"


def test_a_job_that_is_let_go_is_written_and_one_that_comes_back_meanwhile_is_as_it_was(desk, jobs, file):
    other = done(desk, jobs.create, "other", new)
    draft = done(desk, jobs.open, file)
    draft.set("recipe.rank", 77)
    draft.set("recipe.rank", 78)  # waits for the first to be written
    jobs.close_job()
    assert jobs._closing
    again: list[Draft] = []
    jobs.open(file, again.append, again.append)  # type: ignore[arg-type]
    assert again == [draft]  # what it holds is newer than the disk
    done(desk, jobs.open, other)
    desk.until(lambda: not jobs._closing)
    assert on_disk(file)["recipe"]["rank"] == 78


def test_what_the_place_of_a_job_that_is_let_go_refuses_is_among_our_jobs(desk, jobs, file, monkeypatch):
    other = done(desk, jobs.create, "other", new)
    draft = done(desk, jobs.open, file)
    refuse_writing(file.parent, monkeypatch)
    reported: list[Path] = []
    jobs.rescued.connect(reported.append)
    errors: list[JobError] = []
    resolved: list[JobError] = []
    draft.file.failed.connect(errors.append)
    jobs.resolved.connect(resolved.append)
    draft.set("recipe.rank", 79)
    done(desk, jobs.open, other)
    desk.until(lambda: bool(reported))
    assert resolved == errors[-1:]  # it says that the changes are still in the form
    assert on_disk(reported[0])["recipe"]["rank"] == 79 and reported[0].parent.parent == jobs.folder
    assert not jobs._closing


def test_a_look_that_waited_for_its_turn_does_not_show_a_job_that_was_thrown_away_meanwhile(desk, jobs, tasks, file):
    free, looked, thrown = threading.Event(), list[bool](), list[Any]()
    done(desk, jobs.open, file)
    tasks.run(lambda: free.wait(120), lambda _: None, reraise)  # a slow disk
    jobs.trash(file, thrown.append, reraise)
    tasks.run(lambda: free.wait(120), lambda _: None, reraise)
    jobs.refresh(lambda: looked.append(True))
    desk.until(lambda: thrown)
    free.set()
    desk.until(lambda: looked)
    assert jobs.all == ()


def test_what_was_read_before_a_job_was_thrown_away_does_not_show_it_when_it_comes_later(desk, jobs, file, monkeypatch):
    read, goes_on, looked, real = threading.Event(), threading.Event(), list[bool](), jobs_module._entries

    def late(*where: Any) -> Any:
        entries = real(*where)
        read.set()
        assert goes_on.wait(120)
        return entries

    done(desk, jobs.open, file)
    jobs.refresh(lambda: looked.append(True))
    desk.until(lambda: looked)
    assert [entry.path for entry in jobs.all] == [file]
    monkeypatch.setattr(jobs_module, "_entries", late)
    jobs.refresh(lambda: looked.append(True))
    assert read.wait(120)
    done(desk, jobs.trash, file)
    goes_on.set()
    desk.until(lambda: len(looked) == 2)
    assert jobs.all == ()
