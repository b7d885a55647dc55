"""What keeps changes from being saved is told, and what can be done about it works: real files, a real journal."""

import errno
import shutil
import threading
from collections.abc import Sequence

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLabel, QMessageBox, QPushButton

from app.core.edits.backups import BackupVersion, Written
from app.core.edits.history import Edit
from app.core.edits.journal import Journal
from app.core.edits.save_state import Key, SaveRequest
from app.core.library import ValueChange
from app.qt.images.captions.recovery_dialogs import ConflictsDialog, RecoveredDialog, RestoreDialog
from app.qt.window import Window
from tests.qt.images.captions.test_captions import (
    CAPTIONS,
    captions,
    editor,
    english,
    folder,
    on_disk,
    select,
    window,
)
from tests.support.app_world import DISK_FULL, FAULTS, READ_ONLY
from tests.support.screens import nameless

__all__ = ["editor", "english", "folder", "window"]

SAVED = "All changes saved; originals are backed up."


def button(widget, text):
    return next(found for found in widget.findChildren(QPushButton) if found.text() == text and found.isVisible())


def click(qtbot, found):
    qtbot.mouseClick(found, Qt.MouseButton.LeftButton)


def write(session, stem, text):
    """An edit of the user's."""
    picture = next(picture for picture in session.library.images.values() if picture.path.stem == stem)
    session.history.do(Edit(f"Write {stem}", (ValueChange(picture.id, "caption", picture.caption, text),)))


def clash(session, folder, *stems):
    """Another program writes files that the library has not looked at again, then the user writes them too."""
    for stem in stems:
        (folder / f"{stem}.txt").write_text(f"theirs, {stem}", encoding="utf-8")
    for stem in stems:
        write(session, stem, f"mine, {stem}")


@pytest.fixture
def faults(folder, per_user_folder):
    """Lets the disk of the dataset refuse; as it was afterwards."""
    FAULTS.inside, FAULTS.home = str(folder), str(per_user_folder)
    yield FAULTS
    FAULTS.clear()
    FAULTS.inside = ""


@pytest.mark.parametrize(("fault", "words"), [(DISK_FULL, "is full"), (READ_ONLY, "Make it writable")])
def test_a_disk_that_refuses_is_told_and_tried_again(window, editor, session, folder, faults, fault, words, qtbot):
    faults.fault = fault
    write(session, "a", "kept")
    qtbot.waitUntil(editor.save_status.isVisible)
    assert words in editor.save_status._shown[0].words
    assert str(folder) in editor.save_status._shown[0].words
    assert not any(str(folder) in label.text() for label in editor.save_status.findChildren(QLabel))  # its name will do
    assert any(folder.name in label.text() for label in editor.save_status.findChildren(QLabel))
    assert on_disk(folder, "a") == CAPTIONS["a"]
    click(qtbot, button(editor.save_status, "Try again"))
    session.saver.flush()
    assert captions(session)["a"] == "kept"
    assert editor.save_status.isVisible()
    faults.fault = None
    click(qtbot, button(editor.save_status, "Try again"))
    qtbot.waitUntil(lambda: not editor.save_status.isVisible())
    assert on_disk(folder, "a") == "kept"


def test_a_folder_that_is_gone_is_told_and_what_was_changed_is_saved_when_it_is_back(
    window, editor, session, folder, qtbot
):
    away = folder.with_name("away")
    folder.rename(away)
    write(session, "a", "kept")
    qtbot.waitUntil(editor.save_status.isVisible)
    assert "no longer exists" in editor.save_status._shown[0].words
    assert "1 change" in window.status.saving.text()
    window.commands.refresh_now()
    assert window.commands["captions.retry"].isEnabled()
    away.rename(folder)
    click(qtbot, button(editor.save_status, "Try again"))
    qtbot.waitUntil(lambda: not editor.save_status.isVisible())
    assert on_disk(folder, "a") == "kept"
    assert window.status.saving.text() == SAVED


@pytest.mark.parametrize(
    ("name", "disk", "library"),
    [
        ("Keep mine", "mine, a", "mine, a"),
        ("Keep theirs", "theirs, a", "theirs, a"),
        ("Keep both", "theirs, a, mine", "theirs, a, mine"),
    ],
)
def test_of_two_versions_the_user_chooses(window, editor, session, folder, qtbot, name, disk, library):
    clash(session, folder, "a")
    qtbot.waitUntil(editor.save_status.isVisible)
    assert "Another program changed 1 value that you changed too." in editor.save_status._shown[0].words
    assert on_disk(folder, "a") == "theirs, a"
    click(qtbot, button(editor.save_status, "Choose…"))
    dialog = window.findChild(ConflictsDialog)
    assert (dialog.mine.toPlainText(), dialog.theirs.toPlainText()) == ("mine, a", "theirs, a")
    assert nameless(dialog) == []
    marked = dialog.mine.extraSelections()
    assert [selection.cursor.selectedText() for selection in marked] == ["mine"]
    with qtbot.waitSignal(dialog.finished):
        click(qtbot, getattr(dialog, name.lower().replace(" ", "_")))
    session.saver.flush()
    assert on_disk(folder, "a") == disk
    qtbot.waitUntil(lambda: captions(session)["a"] == library)
    qtbot.waitUntil(lambda: not editor.save_status.isVisible())
    qtbot.waitUntil(lambda: window.status.saving.text() == SAVED)


def test_one_choice_for_all(window, editor, session, folder, qtbot):
    clash(session, folder, "a", "b", "c")
    qtbot.waitUntil(lambda: len(session.saver.now.conflicts) == 3)
    editor.choose()
    dialog = window.findChild(ConflictsDialog)
    dialog.list.setCurrentRow(1)
    click(qtbot, dialog.keep_theirs)
    qtbot.waitUntil(lambda: dialog.list.count() == 2)
    dialog.all.click()
    with qtbot.waitSignal(dialog.finished):
        click(qtbot, dialog.keep_both)
    both = {"a": "theirs, a, mine", "b": "theirs, b", "c": "theirs, c, mine"}
    qtbot.waitUntil(lambda: captions(session) == CAPTIONS | both)
    assert session.history.undo_name == "Keep both versions of 2 captions"
    session.saver.flush()
    assert on_disk(folder, "b") == "theirs, b"
    assert on_disk(folder, "c") == "theirs, c, mine"


def test_deciding_later_leaves_everything_as_it_is(window, editor, session, folder, qtbot):
    clash(session, folder, "a")
    qtbot.waitUntil(editor.save_status.isVisible)
    editor.choose()
    dialog = window.findChild(ConflictsDialog)
    click(qtbot, dialog.close_button)
    assert on_disk(folder, "a") == "theirs, a"
    assert captions(session)["a"] == "mine, a"
    assert len(session.saver.now.conflicts) == 1


def test_quitting_asks_about_conflicts_and_closes_when_all_are_decided(window, editor, session, folder, qtbot):
    clash(session, folder, "a")  # not known as a conflict before it is written
    window.close()
    box = window.findChild(QMessageBox)
    assert window.isVisible() and "changed 1 value" in box.text()
    click(qtbot, box.button(QMessageBox.StandardButton.Cancel))
    qtbot.waitUntil(lambda: window.findChild(QMessageBox) is None)
    assert window.isVisible()
    window.close()
    click(qtbot, button(window.findChild(QMessageBox), "Choose…"))
    dialog = window.findChild(ConflictsDialog)
    click(qtbot, dialog.keep_mine)
    qtbot.waitUntil(lambda: not window.isVisible())
    session.saver.flush()
    assert on_disk(folder, "a") == "mine, a"


@pytest.mark.parametrize("asked_by", ["banner", "editor"])
def test_a_conflict_left_open_when_quitting_is_shown_as_what_it_is(
    window, editor, session, folder, qtbot, qapp, asked_by
):
    """It was shown as "No caption file yet", below words of a crash that had not been."""
    from app.core.session import Session
    from app.qt.main_thread import MainThreadQueue

    clash(session, folder, "a")
    qtbot.waitUntil(editor.save_status.isVisible)
    window.close()
    click(qtbot, button(window.findChild(QMessageBox), "Quit and choose later"))
    qtbot.waitUntil(lambda: not window.isVisible())
    session.close()
    again = Session(MainThreadQueue(qapp).post)
    second = Window(again)
    qtbot.addWidget(second)
    second.show()
    try:
        second.open([folder])
        qtbot.waitUntil(lambda: len(again.view.ids) == len(CAPTIONS))
        words = "Not saved when you closed Impasto: 1 change in Bilder für 猫. "
        words += "Also changed by another program and waiting for your choice: 1."
        qtbot.waitUntil(lambda: words in second.notices.sentences())
        select(again, "a")
        assert second.images.editor.text.text == "mine, a"
        qtbot.waitUntil(lambda: all(dataset.known for dataset in again.datasets._open.values()))
        assert (captions(again)["a"], on_disk(folder, "a")) == ("mine, a", "theirs, a")
        click(qtbot, button(second.notices if asked_by == "banner" else second.images.editor.save_status, "Choose…"))
        dialog = second.findChild(ConflictsDialog)
        with qtbot.waitSignal(dialog.finished):
            click(qtbot, dialog.keep_mine)
        again.saver.flush()
        assert on_disk(folder, "a") == "mine, a"
        qtbot.waitUntil(lambda: second.notices.sentences() == [])  # it spoke of a choice that has been made
        second.undo()
        again.saver.flush()
        assert (on_disk(folder, "a"), captions(again)["a"]) == ("theirs, a", "theirs, a")
    finally:
        again.close()


def test_the_dialog_for_conflicts_closes_by_itself_when_there_are_none(window, editor, qtbot):
    """It stood there empty, with three buttons that did nothing."""
    editor.choose()
    qtbot.waitUntil(lambda: window.findChild(ConflictsDialog) is None)


def test_what_a_crash_left_is_saved_at_the_next_start_and_shown(qtbot, qapp, folder, per_user_folder, english):
    from app.core.session import Session
    from app.qt.main_thread import MainThreadQueue

    journal = Journal(per_user_folder / "captions" / "journal")
    key = Key(str(folder), "a.png", "caption")
    journal.append("Typed", [SaveRequest(key, (CAPTIONS["a"],), "typed before the crash")])
    journal.end()
    journal._close_file()  # as the system does when a process is gone
    journal._lock.close()
    session = Session(MainThreadQueue(qapp).post)
    window = Window(session)
    qtbot.addWidget(window)
    window.show()
    try:
        qtbot.waitUntil(lambda: bool(window.notices.sentences()))
        words = "Impasto stopped before it could save 1 change in Bilder für 猫. All of them are saved now."
        assert window.notices.sentences() == [words]
        qtbot.waitUntil(lambda: on_disk(folder, "a") == "typed before the crash")
        click(qtbot, button(window.notices, "Show…"))
        dialog = window.findChild(RecoveredDialog)
        row = dialog.preview.list.row(dialog.preview.list.index(0))
        assert row == ("a.png", CAPTIONS["a"], "typed before the crash")
        dialog.reject()
    finally:
        session.close()


def restoring(stems, window, editor, session, qtbot):
    """Open the dialog once these captions are other than their originals, and all of them are compared."""
    for stem in stems:
        write(session, stem, f"new {stem}")
    session.saver.flush()
    editor.restore()
    dialog = window.findChild(RestoreDialog)
    qtbot.waitUntil(lambda: len(dialog.preview.list.changes) == len(stems))
    return dialog


def test_restoring_is_asked_once_and_is_a_step_although_the_dialog_is_closed_meanwhile(
    window, editor, session, folder, qtbot, monkeypatch
):
    dialog = restoring("ab", window, editor, session, qtbot)
    goes_on, restore = threading.Event(), session.backups.restore

    def waits(root: str, files: Sequence[str]) -> list[Written]:
        assert goes_on.wait(120.0)
        return restore(root, files)

    monkeypatch.setattr(session.backups, "restore", waits)
    click(qtbot, dialog.all)
    assert not (dialog.all.isEnabled() or dialog.chosen.isEnabled() or dialog.preview.list.changes)
    assert not dialog.datasets.isEnabled()
    dialog.reject()
    with qtbot.waitSignal(dialog.destroyed):
        dialog.deleteLater()
    goes_on.set()
    qtbot.waitUntil(lambda: session.history.undo_name == "Restore 2 original captions")
    assert [on_disk(folder, stem) for stem in "ab"] == [CAPTIONS["a"], CAPTIONS["b"]]
    window.undo()
    qtbot.waitUntil(lambda: captions(session)["b"] == "new b")


def test_what_hinders_restoring_is_said_and_what_is_left_is_listed(window, editor, session, qtbot, monkeypatch):
    dialog = restoring("ab", window, editor, session, qtbot)

    def full(root: str, files: Sequence[str]) -> list[Written]:
        raise OSError(errno.ENOSPC, "No space left on device", root)

    with monkeypatch.context() as patch:
        patch.setattr(session.backups, "restore", full)
        click(qtbot, dialog.all)
        qtbot.waitUntil(lambda: len(dialog.preview.list.changes) == 2)
    assert dialog.fault.isVisible() and "is full" in dialog.fault.text()
    assert "changes are kept" not in dialog.fault.text() and dialog.datasets.isEnabled()
    assert session.history.undo_name != "Restore 2 original captions"
    click(qtbot, dialog.all)
    qtbot.waitUntil(lambda: "the same as before" in dialog.intro.text())
    assert not dialog.fault.isVisible()
    dialog.reject()


def test_what_hinders_restoring_one_dataset_is_said_of_no_other(
    window, editor, session, folder, tmp_path, qtbot, monkeypatch
):
    other = tmp_path / "another"
    other.mkdir()
    shutil.copy(folder / "a.png", other / "z.png")
    session.datasets.open(other)
    qtbot.waitUntil(lambda: "z" in captions(session))
    write(session, "z", "new z")
    session.saver.flush()
    goes_on, originals = threading.Event(), session.backups.originals

    def refuse(root: str) -> Sequence[BackupVersion]:
        if root == str(folder):
            assert goes_on.wait(120.0)
            raise PermissionError(errno.EACCES, "Permission denied", root)
        return originals(root)

    monkeypatch.setattr(session.backups, "originals", refuse)
    editor.restore()
    dialog = window.findChild(RestoreDialog)
    dialog.datasets.setCurrentIndex(1)
    qtbot.waitUntil(lambda: len(dialog.preview.list.changes) == 1)
    told, both, over = dialog.intro.text(), threading.Barrier(2), []
    goes_on.set()
    for _ in range(2):  # each worker has done all before
        session.tasks.run(lambda: both.wait(120.0), over.append, over.append)
    qtbot.waitUntil(lambda: len(over) == 2)
    assert dialog.intro.text() == told and not dialog.fault.isVisible()
    dialog.datasets.setCurrentIndex(0)
    qtbot.waitUntil(dialog.fault.isVisible)
    assert str(folder) in dialog.fault.text() and not dialog.intro.text()
    dialog.datasets.setCurrentIndex(1)
    assert not dialog.fault.isVisible()
    qtbot.waitUntil(lambda: len(dialog.preview.list.changes) == 1)
    dialog.reject()


def test_originals_are_restored_by_picture_and_all(window, editor, session, folder, qtbot):
    dialog = restoring("abcd", window, editor, session, qtbot)
    assert [row for _, row in dialog.preview.list.changes][:2] == [
        ("a.txt", "new a", CAPTIONS["a"]),
        ("b.txt", "new b", CAPTIONS["b"]),
    ]
    assert not dialog.chosen.isEnabled()
    dialog.preview.setCurrentIndex(dialog.preview.list.index(1))
    assert dialog.chosen.text() == "Restore 1 selected"
    click(qtbot, dialog.chosen)
    qtbot.waitUntil(lambda: len(dialog.preview.list.changes) == 3)
    assert on_disk(folder, "b") == CAPTIONS["b"]
    assert on_disk(folder, "a") == "new a"
    click(qtbot, dialog.all)
    qtbot.waitUntil(lambda: "the same as before" in dialog.intro.text())
    assert not (folder / "d.txt").exists()
    qtbot.waitUntil(lambda: captions(session) == CAPTIONS)
    select(session, "a")
    qtbot.waitUntil(lambda: editor.text.text == CAPTIONS["a"])
    dialog.reject()
    assert session.history.undo_name == "Restore 3 original captions"
    (folder / "d.txt").write_text("another program's", encoding="utf-8")
    window.undo()
    qtbot.waitUntil(lambda: bool(window.notices.sentences()))
    assert "another program has changed d.txt" in window.notices.sentences()[-1]
    assert session.history.undo_name == "Restore 1 original caption"
    window.undo()
    qtbot.waitUntil(lambda: captions(session)["b"] == "new b")
    assert on_disk(folder, "b") == "new b" and session.history.undo_name == "Write d"
    assert [captions(session)[stem] for stem in "acd"] == ["new a", "new c", "another program's"]
    window.redo()
    qtbot.waitUntil(lambda: captions(session)["b"] == CAPTIONS["b"])
    window.undo()
    qtbot.waitUntil(lambda: captions(session)["b"] == "new b")
    window.undo()  # not of d, which another program wrote
    assert captions(session)["c"] == CAPTIONS["c"]
