"""Changing many captions through the dialog, on the real window, over real files."""

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QAbstractItemModelTester
from PySide6.QtWidgets import QRadioButton

from app.core.library import Folder
from app.qt.images.captions.bulk_dialog import BulkDialog
from tests.qt.images.captions.test_captions import (
    CAPTIONS,
    CONTROL,
    KEY,
    captions,
    editor,
    english,
    folder,
    on_disk,
    select,
    window,
)

__all__ = ["editor", "english", "folder", "window"]

ROWS = {
    name: row
    for row, name in enumerate(
        ["add", "remove", "rename", "replace", "sort", "repeated", "underscores", "tidy"],
    )
}


@pytest.fixture
def dialog(window, qtbot):
    """Opened by its key."""
    window.commands.refresh_now()
    qtbot.keyClick(window, KEY.Key_H, CONTROL)
    dialog = window.findChild(BulkDialog)
    qtbot.waitUntil(dialog.isVisible)
    QAbstractItemModelTester(dialog.preview.list, QAbstractItemModelTester.FailureReportingMode.Fatal, dialog)
    return dialog


def come_back(window, qtbot):
    """What a window manager does when a dialog closes."""
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    window.commands.refresh_now()


def choose(dialog, name):
    dialog.operations.setCurrentRow(ROWS[name])
    return dialog.form


def wait_for(qtbot, dialog, words):
    qtbot.waitUntil(lambda: dialog.count.text() == words)


def test_a_tag_is_renamed_everywhere_after_a_preview_and_one_undo_brings_all_back(
    window, session, folder, dialog, qtbot
):
    form = choose(dialog, "rename")
    assert not dialog.apply_button.isEnabled()
    qtbot.keyClicks(form.old, "dog")
    qtbot.keyClicks(form.new, "wolf")
    wait_for(qtbot, dialog, "Changes 3 of 5 captions")
    assert [(change.before, change.after) for change in dialog.preview.list.changes] == [
        ("cat,  red hat,dog", "cat,  red hat,wolf"),
        ("dog, cat", "wolf, cat"),
        ("dog", "wolf"),
    ]
    assert captions(session) == CAPTIONS
    assert dialog.apply_button.text() == "Change 3 captions"
    qtbot.mouseClick(dialog.apply_button, Qt.MouseButton.LeftButton)
    assert captions(session)["a"] == "cat,  red hat,wolf"
    qtbot.waitUntil(lambda: on_disk(folder, "c") == "wolf")
    qtbot.waitUntil(lambda: window.status.saving.text() == "All changes saved; originals are backed up.")
    come_back(window, qtbot)
    qtbot.keyClick(window, KEY.Key_Z, CONTROL)
    assert captions(session) == CAPTIONS
    assert "Rename dog to wolf in 3 captions" in window.status.currentMessage()
    qtbot.waitUntil(lambda: [on_disk(folder, name) for name in "abc"] == [CAPTIONS[name] for name in "abc"])


def test_the_scope_is_shown_with_its_count_and_kept_to(window, session, qtbot):
    select(session, "a", "c")
    session.view.show(session.view.ids[:3])
    window.commands.refresh_now()
    qtbot.keyClick(window, KEY.Key_H, CONTROL)
    dialog = window.findChild(BulkDialog)
    texts = {scope: button.text() for scope, button in dialog.scopes.items()}
    assert texts == {"all": "all images (5)", "shown": "shown images (3)", "selected": "selected images (2)"}
    assert dialog.scope == "selected"
    qtbot.keyClicks(dialog.form.tags, "new")
    wait_for(qtbot, dialog, "Changes 2 of 2 captions")
    dialog.scopes["all"].click()
    wait_for(qtbot, dialog, "Changes 5 of 5 captions")
    dialog.scopes["shown"].click()
    wait_for(qtbot, dialog, "Changes 3 of 3 captions")
    qtbot.mouseClick(dialog.apply_button, Qt.MouseButton.LeftButton)
    assert captions(session)["d"] is None
    assert captions(session)["b"] == "dog, cat, new"


def test_without_a_selection_that_scope_is_off(dialog):
    assert not dialog.scopes["selected"].isEnabled()
    assert all(isinstance(button, QRadioButton) and button.text() for button in dialog.scopes.values())


def test_a_bad_pattern_shows_its_sentence_and_nothing_can_be_applied(dialog, session, qtbot):
    form = choose(dialog, "replace")
    form.pattern.click()
    qtbot.keyClicks(form.sought, "(cat")
    qtbot.waitUntil(dialog.fault.isVisible)
    assert "Could not read the pattern" in dialog.fault.text()
    assert not dialog.apply_button.isEnabled()
    qtbot.keyClicks(form.sought, ")")
    qtbot.keyClicks(form.replacement, r"big \1")
    wait_for(qtbot, dialog, "Changes 2 of 5 captions")
    assert not dialog.fault.isVisible()
    qtbot.mouseClick(dialog.apply_button, Qt.MouseButton.LeftButton)
    assert captions(session)["a"] == "big cat,  red hat,dog"


def test_what_is_no_longer_asked_for_is_never_shown_or_applied(dialog, qtbot):
    form = choose(dialog, "remove")
    qtbot.keyClicks(form.tags, "dog")
    wait_for(qtbot, dialog, "Changes 3 of 5 captions")
    assert dialog.apply_button.isEnabled()
    qtbot.keyClicks(form.tags, "x")
    assert not dialog.apply_button.isEnabled()
    wait_for(qtbot, dialog, "Changes 0 of 5 captions")
    assert not dialog.apply_button.isEnabled()


@pytest.mark.parametrize(
    ("name", "work", "after"),
    [
        ("add", lambda form: (form.tags.setText("x"), form.where.setCurrentIndex(1)), "x, cat,  red hat,dog"),
        (
            "add",
            lambda form: (form.tags.setText("x"), form.where.setCurrentIndex(2), form.place.setValue(3)),
            "cat,  red hat,x, dog",
        ),
        ("add", lambda form: form.tags.setText("x"), "cat,  red hat,dog, x"),
        ("remove", lambda form: form.tags.setText("red hat, dog"), "cat"),
        ("replace", lambda form: (form.sought.setText("CAT"), form.capitals.setChecked(False)), ",  red hat,dog"),
        ("sort", lambda form: form.keep.setValue(1), "cat,  dog,red hat"),
        ("sort", lambda form: form.order.setCurrentIndex(1), "dog,  cat,red hat"),
        ("underscores", lambda form: form.direction.setCurrentIndex(1), "cat,  red_hat,dog"),
        ("tidy", lambda form: None, "cat, red hat, dog"),
    ],
)
def test_each_form_makes_its_edit(dialog, session, qtbot, name, work, after):
    work(choose(dialog, name))
    qtbot.waitUntil(lambda: any(change.after == after for change in dialog.preview.list.changes))
    qtbot.mouseClick(dialog.apply_button, Qt.MouseButton.LeftButton)
    assert captions(session)["a"] == after
    session.history.undo()
    assert captions(session) == CAPTIONS


def test_all_of_it_by_keys(window, session, dialog, qtbot):
    dialog.activateWindow()
    qtbot.waitUntil(dialog.isActiveWindow)
    dialog.operations.setFocus()
    qtbot.keyClick(dialog.operations, KEY.Key_Down)
    qtbot.keyClick(dialog.operations, KEY.Key_Tab)
    assert dialog.form.tags.hasFocus()
    qtbot.keyClicks(dialog.form.tags, "red ha")
    assert dialog.form.tags.list.isVisible()
    qtbot.keyClick(dialog.form.tags, KEY.Key_Tab)
    assert dialog.form.tags.text() == "red hat"
    qtbot.keyClick(dialog.form.tags, KEY.Key_Backspace)
    qtbot.keyClicks(dialog.form.tags, "t")  # all of it is typed: nothing is left for Tab to complete
    assert dialog.form.tags.list.isVisible()
    qtbot.keyClick(dialog.form.tags, KEY.Key_Tab)
    assert not dialog.form.tags.hasFocus() and not dialog.form.tags.list.isVisible()
    dialog.form.tags.setFocus()
    wait_for(qtbot, dialog, "Changes 1 of 5 captions")
    qtbot.keyClick(dialog.form.tags, KEY.Key_Return)
    assert captions(session)["a"] == "cat,  dog"


def test_a_hundred_thousand_captions_are_previewed_without_a_stall(window, session, dialog, qtbot, tmp_path):
    dialog.reject()
    here = Folder(tmp_path / "many", tmp_path / "many")
    session.library.add((here, f"{n}.png", {"caption": f"cat, dog {n % 7}, tall tree"}) for n in range(100_000))
    many = BulkDialog(session, "caption", window)
    qtbot.addWidget(many)
    many.open()
    many.scopes["all"].click()
    form = choose(many, "replace")
    qtbot.keyClicks(form.sought, "dog ")
    form.replacement.setText("wolf ")
    qtbot.waitUntil(lambda: many.count.text() == "Changes 100000 of 100005 captions")
    assert many.preview.list.rowCount() == 100_000
    many.preview.scrollToBottom()
    many.grab()
    many.reject()
