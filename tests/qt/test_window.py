"""The window and its pages."""

import pytest
from PySide6.QtWidgets import QWidget

from app.qt.window import Window


@pytest.fixture
def window(qtbot, session):
    window = Window(session)
    qtbot.addWidget(window)
    window.show()
    return window


def test_it_opens_on_the_pictures_page_with_a_place_for_every_room(window):
    assert window.pages.currentWidget() is window.pictures
    for name in ("tags", "filter", "captions", "health"):
        assert window.pictures.findChild(QWidget, name).isVisible()


def test_pages_are_reached_by_their_buttons(window, qtbot):
    window._rail.buttons.button(2).click()
    assert window.pages.currentIndex() == 2
    window._rail.buttons.button(0).click()
    assert window.pages.currentWidget() is window.pictures
