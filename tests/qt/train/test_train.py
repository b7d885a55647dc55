"""The Train page in the real window: what is typed is judged, on disk within a second, and there at the next start."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QComboBox, QFileDialog, QLineEdit, QMessageBox
from pytestqt.qtbot import QtBot

from app.core.jobs import job_file
from app.core.session import Session
from app.qt.train.page import TrainPage
from app.qt.widgets import format_duration
from app.qt.window import Window
from tests.support.disk_watch import looks_at
from tests.support.train_page import on_disk, reaches_disk, row_of, shown, type_into
from trainer.config.load import load_job


def test_a_first_job_is_there_with_the_pictures_that_are_open(page: TrainPage, tmp_path: Path) -> None:
    values = on_disk(page)
    assert values["name"] == "katzen ü"
    assert [Path(each["path"]) for each in values["dataset"]["folders"]] == [tmp_path / "katzen ü"]
    (row,) = page.sheet.essentials.images.rows
    assert row.name.text() == "katzen ü" and row.count.text().startswith("3")
    assert not page.start_button.isEnabled()  # no base yet


def test_a_recipe_card_sets_the_recipe_and_what_differs_from_it_is_marked(page: TrainPage, qtbot: QtBot) -> None:
    assert page.draft is not None
    page.draft.set("base.family", "sdxl")
    cards = page.sheet.essentials.cards.cards
    assert [card.name for card in cards] == ["Character", "Concept", "Likeness", "Style"]
    qtbot.mouseClick(cards[0], Qt.MouseButton.LeftButton)
    reaches_disk(qtbot, page, lambda values: values["preset"] == "sdxl/character" and values["recipe"]["rank"] == 32)
    assert [card.isChecked() for card in cards] == [True, False, False, False]
    assert page.sheet.essentials.length.number.text() == "3000"
    row = row_of(page, "recipe.rank")
    assert not row.mark.isVisible()
    type_into(qtbot, row.editor, "8")
    assert row.mark.isVisible() and "32" in row.back.toolTip()
    assert "differ from “character”" in page.sheet.differences.text()
    row.back.click()
    assert page.draft.get("recipe.rank") == 32 and not row.mark.isVisible()


def test_ctrl_z_takes_back_what_was_done_to_the_job_wherever_the_cursor_is(
    page: TrainPage, window: Window, session: Session, qtbot: QtBot
) -> None:
    assert page.draft is not None
    type_into(qtbot, page.sheet.essentials.trigger, "ohwx")
    row = row_of(page, "recipe.rank")
    type_into(qtbot, row.editor, "24")
    qtbot.waitUntil(window.commands["edit.undo"].isEnabled)
    assert window.commands["edit.undo"].text() == "Undo Rank"
    qtbot.keyClick(row.editor, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert page.draft.get("recipe.rank") is None and row.editor.text() == ""  # type: ignore[union-attr]
    window.commands["edit.undo"].trigger()
    assert page.sheet.essentials.trigger.text() == ""
    assert [row.field.text() for row in page.sheet.essentials.prompts.rows] == [
        "a portrait of a woman",
        "a house by a lake",
    ]
    for _ in range(2):
        qtbot.waitUntil(window.commands["edit.redo"].isEnabled)
        window.commands["edit.redo"].trigger()
    assert page.draft.get("recipe.rank") == 24 and page.sheet.essentials.trigger.text() == "ohwx"
    window.commands["window.images"].trigger()
    assert window.commands["edit.undo"].text() == "Undo" and not window.can_undo()  # captions have nothing


def test_undo_names_a_change_as_the_page_does(page: TrainPage, window: Window, qtbot: QtBot) -> None:
    assert page.draft is not None
    named = {
        "base.model": ("owner/name", "Undo Base"),
        "output.runs": ("elsewhere", "Undo Output"),
        "report.previews.prompts.0.prompt": ("a cat", "Undo Prompt"),
        "recipe.optimizer.name": ("lion", "Undo Optimizer"),
        "dataset.folders": ([], "Undo Images"),
    }
    for key, (value, words) in named.items():
        page.draft.set(key, value)
        qtbot.waitUntil(lambda words=words: window.commands["edit.undo"].text() == words)


def test_a_job_is_deleted_and_brought_back_and_a_recipe_begins_a_new_one(
    page: TrainPage, window: Window, session: Session, qtbot: QtBot
) -> None:
    assert page.draft is not None
    type_into(qtbot, page.sheet.essentials.trigger, "ohwx")
    first = page.draft.path
    qtbot.waitUntil(page.commands["train.delete"].isEnabled)
    page.commands["train.delete"].trigger()
    qtbot.waitUntil(lambda: bool(window.notices.sentences()))
    assert not first.exists()
    assert window.notices.sentences() == ["Moved “katzen ü” to the trash."]
    act = window.notices._bars[0].findChildren(type(page.start_button))[0]
    act.click()
    qtbot.waitUntil(lambda: page.draft is not None and page.draft.path == first)
    assert page.sheet.essentials.trigger.text() == "ohwx"
    session.navigator.recipe.emit("sd15/style")
    qtbot.waitUntil(lambda: page.draft is not None and page.draft.get("preset") == "sd15/style")
    assert page.draft.path != first
    qtbot.waitUntil(lambda: page.jobs.list.count() == 2)


def test_a_job_that_is_opened_while_another_goes_into_the_trash_is_shown(
    page: TrainPage, session: Session, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    for name in ("wanted", "latest"):
        session.jobs.create(name, lambda free, _: {"name": free}, made.append, page.failed.emit)
        qtbot.waitUntil(lambda: bool(made) and made[-1].parent.name == name)  # noqa: B023 (within this turn)
    session.jobs.refresh()
    qtbot.waitUntil(lambda: len(session.jobs.all) == 3)
    thrown, read = threading.Event(), job_file.read_job_text
    page.notified.connect(lambda *_: thrown.set())
    monkeypatch.setattr(job_file, "read_job_text", lambda *words: (thrown.wait(60), read(*words))[1])
    page.delete()
    page.show_job(made[0])
    qtbot.waitUntil(lambda: page.draft is not None and page.draft.path == made[0])


def test_the_next_start_shows_the_same_form(
    page: TrainPage, window: Window, session: Session, qtbot: QtBot, tmp_path: Path, another_session: Session
) -> None:
    type_into(qtbot, page.sheet.name, "mein stil")
    type_into(qtbot, page.sheet.essentials.trigger, "ohwx")
    qtbot.mouseClick(page.sheet.essentials.cards.cards[-1], Qt.MouseButton.LeftButton)
    type_into(qtbot, row_of(page, "recipe.rank").editor, "a few")
    before = pictured(page)
    assert page.draft is not None
    assert before["recipe.rank"] == ("a few", 'Must be a whole number from 1 to 1024, not the text "a few".', True)
    page.session.jobs.close_job()
    page._show(None)
    window.close()

    window = Window(another_session)
    qtbot.addWidget(window)
    window.resize(1280, 900)
    another_session.datasets.open(tmp_path / "katzen ü")
    with qtbot.waitExposed(window):
        window.show()
    qtbot.waitUntil(lambda: len(another_session.library.images) == 3)
    later = shown(window, qtbot)
    qtbot.waitUntil(lambda: later.sheet.essentials.cards.cards[-1].isChecked())
    row_of(later, "recipe.rank")
    assert pictured(later) == before


def pictured(page: TrainPage) -> dict[str, Any]:
    """What the page shows of its job, widget by widget."""
    sheet, parts = page.sheet, page.sheet.essentials
    found: dict[str, Any] = {
        "name": sheet.name.text(),
        "trigger": parts.trigger.text(),
        "cards": [(card.name, card.isChecked()) for card in parts.cards.cards],
        "length": parts.length.number.text(),
        "prompts": [row.field.text() for row in parts.prompts.rows],
        "folders": [(row.name.text(), row.count.text(), row.repeats.value()) for row in parts.images.rows],
        "differences": sheet.differences.text(),
    }
    for (key, kind), row in sheet.form.rows.items():
        editor = row.editor
        value = (
            editor.text()
            if isinstance(editor, QLineEdit)
            else editor.currentText()
            if isinstance(editor, QComboBox)
            else editor.isChecked()
        )
        found[key + kind] = (value, row.hint.text(), row.mark.isVisibleTo(row))
    return found


def test_a_job_that_cannot_be_read_is_told_and_the_one_that_is_open_stays(
    page: TrainPage, window: Window, session: Session, qtbot: QtBot, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ", encoding="utf-8")
    open_now = page.draft
    session.navigator.job.emit(broken)
    qtbot.waitUntil(lambda: bool(window.notices.sentences()))
    assert page.draft is open_now
    assert "broken.toml is not valid TOML" in window.notices.sentences()[0]
    session.navigator.job.emit(tmp_path / "there is none.toml")
    qtbot.waitUntil(lambda: any("there is none" in told for told in window.notices.sentences()))
    assert len(window.notices.sentences()) == 1, "the one before is over"
    page.new()
    qtbot.waitUntil(lambda: page.draft is not open_now)
    assert window.notices.sentences() == []


def test_a_sound_job_can_be_started_and_the_trainer_reads_it(page: TrainPage, session: Session, qtbot: QtBot) -> None:
    assert page.draft is not None
    page.sheet.essentials.base.chosen.emit("owner/name")
    essentials = page.sheet.essentials
    qtbot.mouseClick(essentials.cards.cards[0], Qt.MouseButton.LeftButton)
    type_into(qtbot, essentials.trigger, "ohwx")
    assert page.start_button.isEnabled()
    reaches_disk(qtbot, page, lambda values: values["dataset"]["folders"][0].get("trigger") == "ohwx")
    job = load_job(page.draft.path)
    assert job == page.draft.job
    assert job.dataset.folders[0].trigger == "ohwx" and job.base.model == "owner/name"


def test_start_while_the_queue_is_held_says_so_and_offers_to_go_on(
    page: TrainPage, window: Window, session: Session, qtbot: QtBot, tmp_path: Path
) -> None:
    session.queue.queue.hold("cats: The base is gone.")
    qtbot.waitUntil(lambda: session.queue.look() or session.queue.now.reading.held)
    page.sheet.essentials.base.chosen.emit(str(tmp_path / "gone.safetensors"))
    page.start_button.click()
    qtbot.waitUntil(lambda: bool(window.notices.sentences()))
    assert (
        "the queue is on hold" in window.notices.sentences()[0] and "The base is gone." in window.notices.sentences()[0]
    )
    assert page.start_button.text() == "Start training" and page.start_button.isEnabled()
    (entry,) = session.queue.entries
    assert page.draft is not None and entry.text == page.draft.path.read_text(encoding="utf-8")
    assert entry.state == "waiting" and not session.queue.now.working
    session.queue.remove(entry.id)
    qtbot.waitUntil(lambda: window.notices.sentences() == [])  # it does not wait any more
    for name in ("second", "third"):
        page.draft.set("name", name)
        page.start_button.click()
        qtbot.waitUntil(lambda name=name: any(name in told for told in window.notices.sentences()))  # type: ignore[misc]
    for entry in session.queue.entries:
        session.queue.start_after(entry.id, time.time() + 86_400)
    window.notices._bars[0].findChildren(type(page.start_button))[0].click()
    qtbot.waitUntil(lambda: not session.queue.now.reading.held)
    assert window.notices.sentences() == [], "nor is the queue held"
    for entry in session.queue.entries:
        session.queue.remove(entry.id)
    qtbot.waitUntil(lambda: session.queue.look() or not session.queue.now.working)


def test_of_two_jobs_of_one_name_the_second_is_still_told_to_wait_when_the_first_begins(
    page: TrainPage, window: Window, session: Session, qtbot: QtBot, tmp_path: Path
) -> None:
    session.queue.queue.hold()
    page.sheet.essentials.base.chosen.emit(str(tmp_path / "gone.safetensors"))
    for number in (1, 2):
        page.start_button.click()
        qtbot.waitUntil(lambda number=number: len(session.queue.entries) == number and page.can_start())  # type: ignore[misc]
    (told,) = window.notices.sentences()
    for left in ([told], []):
        session.queue.remove(session.queue.entries[0].id)
        qtbot.waitUntil(lambda left=left: len(session.queue.entries) == len(left))  # type: ignore[misc]
        assert window.notices.sentences() == left


def test_a_job_whose_file_cannot_be_written_is_not_started(
    page: TrainPage, window: Window, session: Session, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(job_file, "_replace", refuse)
    page.sheet.essentials.base.chosen.emit("owner/name")
    page.start()
    qtbot.waitUntil(lambda: any("Could not save" in sentence for sentence in window.notices.sentences()))
    qtbot.waitUntil(page.can_start)
    assert session.queue.entries == () and session.queue.queue.read().entries == ()
    monkeypatch.undo()


def test_a_job_is_queued_though_the_app_ends_before_its_file_is_written(
    page: TrainPage, session: Session, tmp_path: Path
) -> None:
    session.queue.queue.hold()
    page.sheet.essentials.base.chosen.emit(str(tmp_path / "gone.safetensors"))
    page.start()
    assert page.draft is not None and page.draft.file.unsaved
    session.jobs.close()
    wait(session.queue._requested)
    assert [entry.job for entry in session.queue.queue.read().entries] == [page.draft.path]


def test_start_puts_the_job_into_the_queue_and_tells_what_became_of_it(
    page: TrainPage, window: Window, session: Session, qtbot: QtBot, tmp_path: Path
) -> None:
    assert page.draft is not None
    page.sheet.essentials.base.chosen.emit(str(tmp_path / "gone.safetensors"))
    page.start_button.click()
    assert page.start_button.text() == "Starting…" and not page.can_start()
    qtbot.waitUntil(lambda: bool(window.notices.sentences()))
    (told,) = window.notices.sentences()  # once, though whoever tells of runs that end has heard of it too
    assert told.startswith("“katzen ü” could not start. ") and "gone.safetensors" in told
    assert [entry.job for entry in session.queue.entries] == [page.draft.path]
    assert page.start_button.text() == "Start training" and page.start_button.isEnabled()
    qtbot.waitUntil(lambda: session.queue.look() or not session.queue.now.working)


def test_a_long_job_on_the_cpu_is_asked_about_once_before_it_starts(
    page: TrainPage, session: Session, qtbot: QtBot, tmp_path: Path
) -> None:
    """Also where Start is clicked before the forecast is there: it waits for that."""
    session.queue.queue.hold()
    assert page.draft is not None
    page.draft.set("fit.device", "cpu")
    page.draft.set("base.family", "sd15")
    page.sheet.essentials.base.chosen.emit(str(tmp_path / "gone.safetensors"))
    for choice in ("Do not start", "Train on the CPU"):
        page.start_button.click()
        assert page.start_button.text() == "Starting…" and session.queue.entries == ()
        qtbot.waitUntil(lambda: page.findChild(QMessageBox) is not None)
        box = page.findChild(QMessageBox)
        assert isinstance(box, QMessageBox)
        seconds = page.forecast.cpu_seconds(page.draft)
        assert seconds is not None and seconds > 600
        assert f"will take about {format_duration(seconds)} on this PC's CPU." in box.text()
        assert [button.text() for button in box.buttons()] == ["Train on the CPU", "Do not start"]
        assert session.queue.entries == ()
        next(button for button in box.buttons() if button.text() == choice).click()
        qtbot.waitUntil(lambda: page.findChild(QMessageBox) is None and page.can_start())
    (first,) = session.queue.queue.read().entries
    page.start_button.click()
    qtbot.waitUntil(lambda: len(session.queue.queue.read().entries) == 2 and page.can_start())
    assert first.job == page.draft.path and page.findChild(QMessageBox) is None, "it is asked once for a job"
    session.jobs.close()
    assert json.loads((session.jobs.folder / "list.json").read_text("utf-8"))["agreed_to_cpu"] == [str(first.job)]


def test_the_window_does_not_wait_for_a_disk(
    page: TrainPage, window: Window, session: Session, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = page.draft
    assert first is not None
    session.queue.queue.hold("held")  # on this thread, before anything is watched
    with looks_at(tmp_path, monkeypatch) as looks:
        window.open([tmp_path / "gone.toml"])
        qtbot.waitUntil(lambda: bool(window.notices.sentences()))  # there is no such preset
        page.new()
        qtbot.waitUntil(lambda: page.draft is not first)
        assert page.draft is not None
        page.sheet.essentials.base.chosen.emit("owner/name")
        type_into(qtbot, page.sheet.essentials.trigger, "ohwx")
        qtbot.waitUntil(page.can_start)
        page.start()
        qtbot.waitUntil(lambda: bool(session.queue.entries))
        qtbot.waitUntil(page.can_start)
        page.show_job(first.path)
        qtbot.waitUntil(lambda: page.draft is not None and page.draft.path == first.path)
    assert looks == []
    (entry,) = session.queue.entries
    assert entry.text is not None and 'trigger = "ohwx"' in entry.text
    assert session.jobs.last == first.path


def test_where_runs_go_is_typed_or_chosen_and_an_empty_field_is_the_folder_beside_the_job(
    page: TrainPage, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page.draft is not None and page.undoing is not None
    output = page.sheet.essentials.output
    beside = str(page.draft.path.parent / "runs")
    assert (output.field.text(), output.field.placeholderText()) == ("", beside)
    elsewhere = tmp_path / "läufe"
    asked: list[str] = []
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *words: asked.append(words[2]) or str(elsewhere))
    qtbot.mouseClick(output.button, Qt.MouseButton.LeftButton)
    reaches_disk(qtbot, page, lambda values: values.get("output") == {"runs": str(elsewhere)})
    assert (asked, output.field.text()) == ([beside], str(elsewhere))
    page.undoing.undo()
    assert output.field.text() == ""
    type_into(qtbot, output.field, "mine")
    reaches_disk(qtbot, page, lambda values: values.get("output") == {"runs": "mine"})
    type_into(qtbot, output.field, "")
    reaches_disk(qtbot, page, lambda values: "runs" not in values.get("output", {}))
    home = page.draft.path.parent
    monkeypatch.setattr(Path, "home", staticmethod(lambda: home))
    output.show_draft(page.draft)
    assert output.field.placeholderText() == str(Path("~") / "runs")


def test_a_base_that_lies_beside_the_job_is_told_from_one_of_the_hub(page: TrainPage, qtbot: QtBot) -> None:
    draft = page.draft
    assert draft is not None
    draft.set("base.model", "owner/name")
    assert draft.base == "owner/name" and draft.job is not None and draft.job.base.model == "owner/name"
    there = draft.path.parent / "models" / "mine"
    there.mkdir(parents=True)
    draft.set("base.model", "models/mine")
    qtbot.waitUntil(lambda: draft.base == str(there))
    assert draft.job is not None and draft.job.base.model == str(there)
    assert page.sheet.essentials.base.field.text() == str(there)
