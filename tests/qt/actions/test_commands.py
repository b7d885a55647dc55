"""The table of actions, and what is made of it."""

import pytest
import shiboken6
from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QKeySequence
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel, QLineEdit, QMainWindow, QVBoxLayout, QWidget

from app.qt.actions.commands import Action, Commands
from app.qt.actions.palette import CommandPalette, ShortcutList


class Owner(QWidget):
    """Does what the actions below name, and keeps count."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[object] = []
        self.ready = True
        self.on = False

    def reject(self) -> None:
        self.done.append("reject")

    def set_on(self, on: bool) -> None:
        self.on = on
        self.done.append(on)


ACTIONS = (
    Action("test.reject", "Reject", "images", "reject", keys=("X",), enabled="ready"),
    Action("test.on", "Large", "view", "set_on", keys=("Ctrl+L",), checked="on"),
)


@pytest.fixture
def window(qtbot):
    window = QMainWindow()
    qtbot.addWidget(window)
    window.owner = Owner()
    window.text = QLineEdit()
    middle = QWidget()
    column = QVBoxLayout(middle)
    column.addWidget(window.owner)
    column.addWidget(window.text)
    window.setCentralWidget(middle)
    window.commands = Commands(window)
    window.commands.add(ACTIONS, window.owner)
    window.commands.fill(window.menuBar())
    with qtbot.waitExposed(window):
        window.show()
    window.activateWindow()
    window.owner.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
    window.owner.setFocus()
    window.commands.refresh_now()
    return window


def test_a_key_does_what_the_table_says(window, qtbot):
    qtbot.keyClick(window.owner, Qt.Key.Key_X)
    assert window.owner.done == ["reject"]


def test_a_letter_goes_to_the_text_field_that_has_the_focus(window, qtbot):
    window.text.setFocus()
    qtbot.keyClick(window.text, Qt.Key.Key_X)
    assert window.owner.done == []
    assert window.text.text() == "x"


def test_what_cannot_be_done_now_is_not_done(window, qtbot):
    window.owner.ready = False
    window.commands.refresh_now()
    qtbot.keyClick(window.owner, Qt.Key.Key_X)
    assert window.owner.done == []
    assert not window.commands["test.reject"].isEnabled()


def test_actions_of_a_hidden_page_are_off_even_in_the_menu(window):
    window.owner.hide()
    window.commands.refresh_now()
    assert not window.commands["test.reject"].isEnabled()


def test_a_switch_shows_what_its_owner_says(window, qtbot):
    command = window.commands["test.on"]
    assert not command.isChecked()
    qtbot.keyClick(window.owner, Qt.Key.Key_L, Qt.KeyboardModifier.ControlModifier)
    assert window.owner.done == [True]
    window.owner.on = False
    window.commands.refresh_now()
    assert not command.isChecked()


def test_every_command_stands_in_its_menu_with_its_key(window):
    menus = {action.text(): action.menu().actions() for action in window.menuBar().actions()}
    assert [command.text() for command in menus["I&mages"]] == ["Reject"]
    assert menus["I&mages"][0].shortcut() == QKeySequence("X")


def test_an_icon_is_drawn_when_the_menu_opens_or_somebody_takes_the_command(window):
    extra = (
        Action("test.a", "A", "edit", "reject", icon="undo"),
        Action("test.b", "B", "edit", "reject", icon="redo"),
        Action("test.c", "C", "view", "reject", icon="close"),
    )
    window.commands.add(extra, window.owner)
    of = {
        command.objectName(): command for command in window.owner.actions() if command.objectName().startswith("test.")
    }
    window.commands.refresh_now()
    assert all(of[name].icon().isNull() for name in ("test.a", "test.b", "test.c"))
    assert not window.commands.button("test.a").icon().isNull()
    assert of["test.b"].icon().isNull()
    window.commands.menu("edit").aboutToShow.emit()
    assert not of["test.b"].icon().isNull()
    assert of["test.c"].icon().isNull()
    assert all(not command.icon().isNull() for command in window.commands if command.action.icon)  # as the palette does


def test_two_actions_of_one_name_are_a_mistake(window):
    with pytest.raises(AssertionError, match=r"test\.reject"):
        window.commands.add(ACTIONS[:1], window.owner)
    assert window.commands["test.reject"].isEnabled()  # the first of them stays


def test_commands_go_with_the_widget_that_does_them(qapp):
    commands, owner = Commands(), Owner()
    commands.add(ACTIONS, owner)
    shiboken6.delete(owner)
    assert list(commands) == []
    commands.refresh_now()


def test_a_key_of_a_command_does_nothing_before_its_owner_was_asked(window):
    hidden = Owner()
    hidden.setParent(window)
    window.commands.add([Action("test.hidden", "Hidden", "view", "reject", keys=("F9",))], hidden)
    QTest.keyClick(window.owner, Qt.Key.Key_F9)  # at once: the test's own keys wait until it was asked
    assert hidden.done == []


def test_what_can_be_done_is_asked_though_every_turn_of_the_loop_asks_again(window, qtbot):
    """So do rooms that are made in the background, one a turn: a key that is pressed meanwhile would do nothing."""
    turns = QTimer(window)
    turns.setInterval(0)
    found = []

    def turn():
        found.append(window.commands["test.reject"].isEnabled())
        window.owner.ready = len(found) < 5
        window.commands.refresh()

    turns.timeout.connect(turn)
    turns.start()
    qtbot.waitUntil(lambda: len(found) >= 20)
    turns.stop()
    assert found[0]
    assert not any(found[6:])


def test_own_keys_replace_those_of_the_table_at_once_and_at_the_start(window, qtbot):
    window.commands.rebind({"test.reject": ("Ctrl+J",)})
    qtbot.keyClick(window.owner, Qt.Key.Key_X)
    assert window.owner.done == []
    qtbot.keyClick(window.owner, Qt.Key.Key_J, Qt.KeyboardModifier.ControlModifier)
    assert window.owner.done == ["reject"]
    assert "(Ctrl+J)" in window.commands["test.reject"].toolTip()
    later = Commands(window, {"test.late": ("F9",)})
    later.add([Action("test.late", "Late", "view", "reject", keys=("F8",))], window.owner)
    assert later["test.late"].keys() == ["F9"]


def test_an_action_that_comes_late_joins_its_menu(window):
    window.commands.add([Action("test.late", "Late", "find", "reject")], window.owner)
    menus = {action.text(): action for action in window.menuBar().actions() if action.isVisible()}
    assert [command.text() for command in menus["F&ind"].menu().actions()] == ["Late"]
    assert "&Captions" not in menus


def test_the_palette_finds_by_some_letters_and_does_it(window, qtbot):
    palette = CommandPalette(window.commands, window)
    palette.open()
    qtbot.keyClicks(palette.field, "rjt")
    assert [palette.list.topLevelItem(row).text(0) for row in range(palette.list.topLevelItemCount())] == ["Reject"]
    qtbot.keyClick(palette.field, Qt.Key.Key_Return)
    assert window.owner.done == ["reject"]
    assert not palette.isVisible()


def test_arrow_keys_choose_in_the_palette(window, qtbot):
    palette = CommandPalette(window.commands, window)
    palette.open()
    qtbot.keyClick(palette.field, Qt.Key.Key_Down)
    qtbot.keyClick(palette.field, Qt.Key.Key_Return)
    assert window.owner.done == [True]  # the second of the table


def test_what_cannot_be_done_comes_last_in_the_palette_and_stays_undone(window, qtbot):
    window.owner.ready = False
    palette = CommandPalette(window.commands, window)
    palette.open()
    assert palette.list.topLevelItem(1).text(0) == "Reject"
    qtbot.keyClicks(palette.field, "reject")
    qtbot.keyClick(palette.field, Qt.Key.Key_Return)
    assert window.owner.done == []
    assert palette.isVisible()
    palette.reject()


def test_the_sheet_shows_every_key_that_is_in_force(window, qtbot):
    window.commands.rebind({"test.on": ()})
    window.commands["test.reject"].setText("Reject 7 pictures")  # what it would do just now, as undo says it
    sheet = ShortcutList(window.commands, window)
    qtbot.addWidget(sheet)
    texts = [label.text() for label in sheet.findChildren(QLabel)]
    assert texts == ["Images", "X", "Reject"]


def test_each_key_of_a_command_has_a_cap_of_its_own(window, qtbot):
    window.commands.rebind({"test.on": ("F7", "F8")})
    sheet = ShortcutList(window.commands, window)
    qtbot.addWidget(sheet)
    caps = [label.text() for label in sheet.findChildren(QLabel) if label.property("role") == "keys"]
    assert sorted(caps) == ["F7", "F8", "X"]


def test_titles_in_the_palette_begin_at_one_place(window, qtbot):
    palette = CommandPalette(window.commands, window)
    qtbot.addWidget(palette)
    items = [palette.list.topLevelItem(row) for row in range(palette.list.topLevelItemCount())]
    assert {item.icon(0).actualSize(QSize(16, 16)).width() for item in items} == {16}
