"""Saved values change a job file in place: comments and layout stay, and a backup is made only if something is lost."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from app.core.jobs.draft import Draft
from app.core.jobs.job_file import read_values, to_toml
from tests.support.desk import Desk
from tests.support.drafts import BARE, opened, write_bare
from trainer.config import edit
from trainer.config.job import SCHEMA
from trainer.config.load import load_job, read_job_text

COMMENTED = (
    BARE.replace("rank = 8", "# small is enough\nrank = 0x8 # bytes?")
    .replace("[recipe]", "\n# what to learn\n[recipe]")
    .replace("steps = 100", "steps  =  1_00")
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = write_bare(tmp_path)
    path.write_text(COMMENTED, encoding="utf-8", newline="\n")
    return path


@pytest.fixture
def draft(file: Path, desk: Desk) -> Draft:
    return opened(file, desk.tasks)


def text_of(draft: Draft, desk: Desk) -> str:
    """Return the text of the file once all changes are saved."""
    desk.until(lambda: not draft.file.unsaved)
    return draft.path.read_bytes().decode()


def backups(draft: Draft) -> list[str]:
    return [path.read_bytes().decode() for path in sorted(draft.path.parent.glob("*.before*"))]


@pytest.mark.parametrize("change", [lambda text: text, lambda text: "\ufeff" + text.replace("\n", "\r\n")])
def test_only_the_changed_line_changes_and_undo_restores_every_byte(
    file: Path, desk: Desk, change: Callable[[str], str]
) -> None:
    before = change(COMMENTED)
    file.write_bytes(before.encode())
    draft = opened(file, desk.tasks)
    draft.set("recipe.rank", 9)
    assert text_of(draft, desk) == before.replace("rank = 0x8", "rank = 9")
    assert draft.file.is_own(read_job_text(file))
    draft.set("dataset.folders.0", None)
    draft.set("recipe.seed", 5)
    changed = text_of(draft, desk)
    assert "trigger" not in changed and "steps  =  1_00" in changed and changed.count("#") == before.count("#")
    while draft.undo():
        pass
    assert text_of(draft, desk) == before
    draft.redo()
    draft.close()  # writes on this thread
    assert text_of(draft, desk) == before.replace("rank = 0x8", "rank = 9")
    assert backups(draft) == []
    assert load_job(file).recipe.rank == 9


def test_every_save_of_a_session_starts_from_the_text_that_was_opened(draft: Draft, desk: Desk) -> None:
    """Repeated saves do not change the layout, and a removed comment returns with its key."""
    for value in (9, None, 10, None, 11):
        draft.set("recipe.rank", value)
        text_of(draft, desk)
    assert text_of(draft, desk) == COMMENTED.replace("0x8", "11")


def test_values_of_another_program_are_backed_up_and_its_comments_stay(draft: Draft, desk: Desk) -> None:
    draft.set("recipe.rank", 9)
    text_of(draft, desk)
    other = COMMENTED.replace("0x8", "99").replace("# small is enough", "# large is better")
    draft.path.write_text(other, encoding="utf-8", newline="\n")
    draft.set("recipe.rank", 10)
    assert text_of(draft, desk) == other.replace("99", "10")
    assert backups(draft) == [other]
    draft.set("recipe.rank", 11)
    assert text_of(draft, desk) == other.replace("99", "11")
    assert backups(draft) == [other]


def test_a_comment_of_another_program_needs_no_backup_because_it_stays(draft: Draft, desk: Desk) -> None:
    draft.set("recipe.rank", 9)
    other = text_of(draft, desk).replace("# bytes?", "# no, the rank")
    draft.path.write_text(other, encoding="utf-8", newline="\n")
    draft.set("recipe.rank", 10)
    assert text_of(draft, desk) == other.replace("rank = 9", "rank = 10")
    assert backups(draft) == []


def test_a_change_that_was_taken_over_is_the_text_to_edit(draft: Draft, desk: Desk) -> None:
    draft.set("recipe.rank", 9)
    ours = text_of(draft, desk)
    theirs = COMMENTED.replace("0x8", "99").replace("# small is enough", "# large is better")
    for text, rank in ((theirs, 99), (ours, 9), (theirs, 99)):
        draft.path.write_text(text, encoding="utf-8", newline="\n")
        draft.check_file()
        desk.until(lambda rank=rank: draft.get("recipe.rank") == rank)
    draft.set("recipe.seed", 3)
    assert "# large is better" in text_of(draft, desk)
    assert backups(draft) == []


def test_a_deleted_file_is_written_again_with_its_comments(draft: Draft, desk: Desk) -> None:
    draft.set("recipe.rank", 9)
    text_of(draft, desk)
    draft.path.unlink()
    draft.set("recipe.rank", 10)
    assert text_of(draft, desk) == COMMENTED.replace("0x8", "10")


def test_comments_that_cannot_stay_are_backed_up(file: Path, desk: Desk) -> None:
    """A text that is too long to edit is replaced by one without comments."""
    before = COMMENTED + "# " + "x" * edit.LONGEST + "\n"
    file.write_text(before, encoding="utf-8", newline="\n")
    draft = opened(file, desk.tasks)
    draft.set("recipe.rank", 9)
    assert text_of(draft, desk) == to_toml(draft.values)
    draft.set("recipe.rank", 10)
    assert text_of(draft, desk) == to_toml(draft.values)
    assert backups(draft) == [before]


def test_a_job_of_an_earlier_version_gets_todays_keys_in_place(file: Path, desk: Desk) -> None:
    before = COMMENTED.replace(f"schema = {SCHEMA}", "schema = 2 # old").replace(
        "steps  =  1_00", "pictures_seen = 4_000 # an evening"
    )
    file.write_text(before + "\n[[ladder]] # then\ncheckpointing = 'full'\n", encoding="utf-8", newline="\n")
    draft = opened(file, desk.tasks)
    draft.set("recipe.rank", 9)
    expected = before.replace("schema = 2", f"schema = {SCHEMA}").replace("pictures_seen", "images_seen")
    assert text_of(draft, desk) == expected.replace("0x8", "9") + (
        "\n[[fallbacks]] # then\ngradient_checkpointing = 'full'\n"
    )
    assert backups(draft) == []
    assert read_values(file) == draft.values


def test_a_token_that_another_program_wrote_does_not_stay_in_a_comment(draft: Draft, desk: Desk) -> None:
    link = "https://civitai.com/api/download/models/1?token=sEcReT-12345"
    draft.path.write_text(COMMENTED.replace('"owner/name"', f'"{link}" # {link}'), encoding="utf-8", newline="\n")
    draft.set("recipe.rank", 9)
    written = text_of(draft, desk)
    assert "sEcReT" not in written
    assert tomllib.loads(written) == draft.values
