"""The table of actions, and what is made of it."""

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QKeySequence
from PySide6.QtWidgets import QLineEdit, QMainWindow, QVBoxLayout, QWidget

from app.qt.actions.commands import Commands
from app.qt.actions.table import Action


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
    Action("test.reject", "Reject", "pictures", "reject", keys=("X",), enabled="ready"),
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
    assert [command.text() for command in menus["&Pictures"]] == ["Reject"]
    assert menus["&Pictures"][0].shortcut() == QKeySequence("X")


def test_two_actions_of_one_name_are_a_mistake(window):
    with pytest.raises(AssertionError, match=r"test\.reject"):
        window.commands.add(ACTIONS[:1], window.owner)
