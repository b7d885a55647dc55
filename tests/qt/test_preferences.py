"""The preferences: what is clicked is in force, on disk, and there at the next start."""

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QKeySequence
from PySide6.QtWidgets import QCheckBox, QComboBox, QSpinBox, QWidget

from app.core.settings.preferences import PreferenceGroup, Preferences, Settings
from app.qt.actions.commands import Commands, effective_shortcuts
from app.qt.preferences import PreferencesDialog, ShortcutEditor, is_view_key
from app.qt.presets.page import PresetsPage
from app.qt.train.page import TrainPage
from tests.support.artist import shown_page


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
    sections = [field.annotation for field in Preferences.model_fields.values() if field.title]
    fields = [field for section in sections if isinstance(section, type) and issubclass(section, PreferenceGroup)
              for field in section.model_fields.values()]  # fmt: skip
    editors = [editor for kind in (QComboBox, QSpinBox, QCheckBox) for editor in dialog.findChildren(kind)]
    assert {field.title for field in fields} <= {editor.accessibleName() for editor in editors}


def test_a_choice_counts_at_once_and_is_there_at_the_next_start(dialog, session, qtbot):
    box = next(box for box in dialog.findChildren(QComboBox) if box.accessibleName() == "Theme")
    assert [box.itemText(row) for row in range(box.count())] == ["System", "Light", "Dark", "High contrast"]
    for _ in range(2):
        qtbot.keyClick(box, Qt.Key.Key_Down)
    assert session.settings.preferences.appearance.look == "dark"
    session.settings.file.settle()
    assert Settings().preferences == session.settings.preferences


def test_a_number_keeps_to_its_bounds(dialog, session, qtbot):
    box = next(box for box in dialog.findChildren(QSpinBox) if box.accessibleName() == "Interface scale")
    assert (box.minimum(), box.maximum(), box.singleStep(), box.suffix()) == (100, 200, 5, " %")
    box.setValue(150)
    box.editingFinished.emit()
    assert session.settings.preferences.appearance.scaling == 150


def test_a_number_that_the_schema_refuses_is_told_and_not_kept(dialog, session):
    box = next(box for box in dialog.findChildren(QSpinBox) if box.accessibleName() == "Interface scale")
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
    box = next(box for box in dialog.findChildren(QComboBox) if box.accessibleName() == "Theme")
    box.setCurrentIndex(2)
    assert session.settings.preferences.appearance.look == "dark"
    session.settings.set_checks(resolution=512)
    assert session.health.target.resolution == 512
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
    assert "Find a command" in editor.message.text()
    assert editor.message.isVisible()
    assert window.commands["window.palette"].keys() == ["Ctrl+K"]  # not before it is asked for
    editor._set.click()
    assert window.commands["window.quit"].keys() == ["Ctrl+K"]
    assert window.commands["window.palette"].keys() == []
    session.settings.file.settle()
    assert Settings().preferences.shortcuts == {"window.quit": ("Ctrl+K",), "window.palette": ()}


@pytest.mark.parametrize(
    ("keys", "warns"),
    [("Right", True), ("Shift+Down", True), ("Ctrl+Up", True), ("Return", True), ("Space", True), ("Tab", True),
     ("Esc", True), ("+", True), ("Alt+F7", False), ("Ctrl+Return", False), ("F7", False)],
)  # fmt: skip
def test_keys_that_pictures_and_lists_use_themselves_are_said(dialog, keys, warns):
    editor = dialog.shortcuts
    dialog.tabs.setCurrentWidget(editor)
    choose(editor, "Quit")
    assert not editor.message.isVisible()
    editor.keys.setKeySequence(QKeySequence(keys))
    assert editor.message.isVisible() == warns
    assert ("to move and select" in editor.message.text()) == warns


def test_no_delivered_key_is_one_that_pictures_and_lists_use_themselves(window):
    for command in window.commands:
        assert not any(map(is_view_key, command.shortcuts())), command.action.id


def test_keys_come_back_as_delivered(dialog, session, window):
    editor = dialog.shortcuts
    choose(editor, "Quit")
    editor._clear.click()
    assert window.commands["window.quit"].keys() == []
    editor._default.click()
    assert window.commands["window.quit"].shortcut() == QKeySequence("Ctrl+Q")
    session.settings.file.settle()
    assert Settings().preferences.shortcuts == {}


def test_what_getting_the_delivered_keys_back_takes_from_others_is_said(dialog, window):
    editor = dialog.shortcuts
    dialog.tabs.setCurrentWidget(editor)
    choose(editor, "Quit")
    editor.keys.setKeySequence(QKeySequence("Ctrl+K"))
    editor._set.click()
    choose(editor, "Find a command…")
    assert not editor.message.isVisible()
    editor._default.click()
    assert editor.message.text() == "“Quit” lost these keys." and editor.message.isVisible()
    assert [window.commands[name].keys() for name in ("window.quit", "window.palette")] == [[], ["Ctrl+K"]]


def test_who_gets_the_delivered_keys_back_shares_them_as_delivered(window, qtbot):
    for page, kind in (("window.train", TrainPage), ("window.presets", PresetsPage)):
        window.commands[page].trigger()
        shown_page(window, kind)  # which share a key
    editor = ShortcutEditor(window.commands, {})
    qtbot.addWidget(editor)
    choose(editor, "Rename job")
    editor.keys.setKeySequence(QKeySequence("F8"))
    editor._set.click()
    choose(editor, "Rename job")
    editor._default.click()
    assert editor.own == {} and editor.message.isHidden()
    assert [editor.keys_of(window.commands[name]) for name in ("train.rename", "presets.edit")] == [("F2",), ("F2",)]


def test_a_step_to_be_undone_does_not_rename_its_command_among_the_keys(dialog, window):
    window.commands["edit.undo"].setText("Undo Exclude 1 picture")
    editor = dialog.shortcuts
    editor.search.setText("undo")
    assert editor.list.topLevelItem(0).text(0) == "Undo"


def test_the_users_own_keys_go_before_those_delivered_to_others(window, session):
    """A later version may deliver keys that he has given away; Qt calls neither of two that have the same."""
    own = {"window.quit": ("Ctrl+k", "F8"), "window.open": ("F8",)}
    session.settings.change(session.settings.preferences.model_copy(update={"shortcuts": own}))
    names = ("window.palette", "window.quit", "window.open")
    had = [window.commands[name].keys() for name in names]
    assert had == [[], ["Ctrl+K"], ["F8"]]
    editor = ShortcutEditor(window.commands, own)
    assert [list(editor.keys_of(window.commands[name])) for name in names] == had
    assert [command.action.id for command in editor.owners(QKeySequence("Ctrl+K"))] == ["window.quit"]
    later = Commands(own=own)
    owner = QWidget()
    for name in ("window.open", "window.quit", "window.palette"):  # one room after the other
        later.add([replace(window.commands[name].action, run="show", enabled=None)], owner)
    assert [later[name].keys() for name in names] == had


def test_pages_share_their_keys_though_the_user_has_one_of_his_own(window):
    actions = [
        replace(window.commands["window.open"].action, id=name, keys=("F2",)) for name in ("train.a", "presets.a")
    ]
    own = {"window.quit": ("F8",)}
    assert effective_shortcuts([*actions, window.commands["window.quit"].action], own) == {
        "train.a": ("F2",),
        "presets.a": ("F2",),
        "window.quit": ("F8",),
    }


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
