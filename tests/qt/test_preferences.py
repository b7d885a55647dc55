"""The preferences: what is clicked is in force, on disk, and there at the next start."""

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QKeySequence
from PySide6.QtWidgets import QCheckBox, QComboBox, QSpinBox

from app.core.settings.preferences import Preferences, Section
from app.core.settings.store import Settings
from app.qt.dialogs.preferences import PreferencesDialog


@pytest.fixture
def dialog(qtbot, window):
    dialog = PreferencesDialog(window.session.settings, window.commands, window)
    qtbot.addWidget(dialog)
    dialog.open()
    return dialog


def choose(editor, command):
    """Select a command's row."""
    found = editor.list.findItems(command, Qt.MatchFlag.MatchExactly, 0)
    editor.list.setCurrentItem(found[0])


def test_every_preference_of_the_schema_has_a_row_with_its_words(dialog):
    sections = [field.annotation for field in Preferences.model_fields.values()]
    fields = [field for section in sections if isinstance(section, type) and issubclass(section, Section)
              for field in section.model_fields.values()]  # fmt: skip
    editors = [editor for kind in (QComboBox, QSpinBox, QCheckBox) for editor in dialog.findChildren(kind)]
    assert {field.title for field in fields} <= {editor.accessibleName() for editor in editors}


def test_a_choice_counts_at_once_and_is_there_at_the_next_start(dialog, session, qtbot):
    box = next(box for box in dialog.findChildren(QComboBox) if box.accessibleName() == "Colours")
    assert [box.itemText(row) for row in range(box.count())] == ["As the system", "Light", "Dark", "High contrast"]
    for _ in range(2):
        qtbot.keyClick(box, Qt.Key.Key_Down)
    assert session.settings.preferences.appearance.look == "dark"
    session.settings.file.settle()
    assert Settings().preferences == session.settings.preferences


def test_a_number_keeps_to_its_bounds(dialog, session, qtbot):
    box = next(box for box in dialog.findChildren(QSpinBox) if box.accessibleName() == "Size of everything")
    assert (box.minimum(), box.maximum(), box.singleStep(), box.suffix()) == (100, 200, 5, " %")
    box.setValue(150)
    box.editingFinished.emit()
    assert session.settings.preferences.appearance.scaling == 150


def test_a_number_that_the_schema_refuses_is_told_and_not_kept(dialog, session):
    box = next(box for box in dialog.findChildren(QSpinBox) if box.accessibleName() == "Size of everything")
    box.setValue(151)  # no multiple of five
    box.editingFinished.emit()
    assert "multiple of 5" in dialog.fault.text()
    assert session.settings.preferences == Preferences()
    box.setValue(155)
    box.editingFinished.emit()
    assert dialog.fault.isHidden()


def test_a_disk_that_refuses_is_told_and_the_choice_holds(qtbot, dialog, window, session, per_user_folder):
    session.settings.file.path = per_user_folder / "file" / "preferences.toml"
    (per_user_folder / "file").write_text("no folder", encoding="utf-8")
    box = next(box for box in dialog.findChildren(QComboBox) if box.accessibleName() == "Colours")
    box.setCurrentIndex(2)
    assert session.settings.preferences.appearance.look == "dark"
    session.settings.judge(resolution=512)
    assert session.health.aim.resolution == 512
    qtbot.waitUntil(lambda: bool(window.notices.sentences()))
    session.settings.file.settle()
    qtbot.wait(0)
    (told,) = window.notices.sentences()  # once, from wherever it was chosen
    assert "preferences.toml" in told and dialog.fault.isHidden()


def test_new_keys_are_taken_from_the_command_that_had_them_after_saying_so(dialog, session, window, qtbot):
    editor = dialog.shortcuts
    dialog.tabs.setCurrentWidget(editor)
    choose(editor, "Quit")
    qtbot.keyClick(editor.keys, Qt.Key.Key_K, Qt.KeyboardModifier.ControlModifier)
    assert "Find a command" in editor.told.text()
    assert editor.told.isVisible()
    assert window.commands["window.palette"].keys() == ["Ctrl+K"]  # not before it is asked for
    editor._set.click()
    assert window.commands["window.quit"].keys() == ["Ctrl+K"]
    assert window.commands["window.palette"].keys() == []
    session.settings.file.settle()
    assert Settings().preferences.shortcuts == {"window.quit": ("Ctrl+K",), "window.palette": ()}


def test_keys_come_back_as_delivered(dialog, session, window):
    editor = dialog.shortcuts
    choose(editor, "Quit")
    editor._clear.click()
    assert window.commands["window.quit"].keys() == []
    editor._default.click()
    assert window.commands["window.quit"].shortcut() == QKeySequence("Ctrl+Q")
    session.settings.file.settle()
    assert Settings().preferences.shortcuts == {}


def test_commands_are_found_by_name_and_by_key(dialog):
    editor = dialog.shortcuts
    for typed in ("keyboard sh", "f1"):
        editor.search.setText(typed)
        found = [editor.list.topLevelItem(row).text(0) for row in range(editor.list.topLevelItemCount())]
        assert "Keyboard shortcuts" in found
        assert "Quit" not in found


def test_no_two_commands_are_delivered_with_the_same_keys(window):
    seen = {}
    for command in window.commands:
        for key in command.shortcuts():
            seen.setdefault(key.toString(), []).append(command.action.id)
    assert {key: ids for key, ids in seen.items() if len(ids) > 1} == {}
