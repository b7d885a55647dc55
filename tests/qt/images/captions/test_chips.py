"""Tags as chips: removed, written anew, put in order and gone through by keys and mouse."""

from PySide6.QtCore import QEvent, QPoint, QPointF, Qt
from PySide6.QtGui import QMouseEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from app.qt.images.captions.chips import ChipEdit
from tests.qt.images.captions.test_captions import (
    CONTROL,
    KEY,
    captions,
    editor,
    english,
    folder,
    select,
    tags,
    window,
)

__all__ = ["editor", "english", "folder", "window"]


def drag(chip, board, place):
    """Press on a chip, move to a place of the board, let go; events as a mouse sends them."""
    start = QPoint(20, chip.height() // 2)
    end = chip.mapFromParent(place)
    QTest.mousePress(chip, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier, start)
    for spot in (start + QPoint(4, 12), end):
        whole = chip.mapToGlobal(spot)
        held = Qt.MouseButton.LeftButton
        move = QMouseEvent(
            QEvent.Type.MouseMove, QPointF(spot), QPointF(whole), held, held, Qt.KeyboardModifier.NoModifier
        )
        QApplication.sendEvent(chip, move)
    QTest.mouseRelease(chip, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier, end)


def test_chips_are_removed_by_key_and_cross_and_nothing_else_changes(editor, session, qtbot):
    select(session, "a")
    editor.chips.choose(0)
    qtbot.keyClick(editor.chips.chips[0], KEY.Key_Delete)
    assert captions(session)["a"] == "red hat,dog"
    chip = editor.chips.chips[1]
    qtbot.mouseClick(chip, Qt.MouseButton.LeftButton, pos=chip.cross.center())
    assert captions(session)["a"] == "red hat"


def test_a_chip_is_written_anew_in_its_place(editor, session, qtbot):
    select(session, "a")
    editor.chips.choose(1)
    qtbot.keyClick(editor.chips.chips[1], KEY.Key_Return)
    field = QApplication.focusWidget()
    field.selectAll()
    qtbot.keyClicks(field, "green hat")
    qtbot.keyClick(field, KEY.Key_Return)
    assert captions(session)["a"] == "cat,  green hat,dog"
    assert editor.chips.chips[1].hasFocus()
    qtbot.mouseDClick(editor.chips.chips[1], Qt.MouseButton.LeftButton, pos=QPoint(15, 10))
    field = QApplication.focusWidget()
    qtbot.keyClicks(field, "never")
    qtbot.keyClick(field, KEY.Key_Escape)
    assert captions(session)["a"] == "cat,  green hat,dog"


def write_second_tag(editor, session, qtbot, text):
    select(session, "a")
    qtbot.mouseDClick(editor.chips.chips[1], Qt.MouseButton.LeftButton, pos=QPoint(15, 10))
    field = QApplication.focusWidget()
    qtbot.keyClicks(field, text)
    return field


def written(editor):
    return [field for field in editor.chips.findChildren(ChipEdit) if field.isVisible()]


def change_on_disk(session, folder, qtbot, text):
    (folder / "a.txt").write_text(text, encoding="utf-8", newline="")
    qtbot.waitUntil(lambda: captions(session)["a"] == text)


def test_a_tag_that_is_being_written_goes_with_its_chip_when_the_caption_changes(editor, session, folder, qtbot):
    field = write_second_tag(editor, session, qtbot, "green hat")
    change_on_disk(session, folder, qtbot, "sun, cat, red hat")
    assert field.hasFocus()
    assert field.geometry().topLeft() == editor.chips.chips[2].geometry().topLeft()
    qtbot.keyClick(field, KEY.Key_Return)
    assert captions(session)["a"] == "sun, cat, green hat"


def test_a_tag_that_is_being_written_stays_while_something_else_is_learnt(editor, session, qtbot):
    field = write_second_tag(editor, session, qtbot, "green hat")
    session.settings.set_checks(tokens=150)
    assert field.hasFocus()
    qtbot.keyClick(field, KEY.Key_Return)
    assert captions(session)["a"] == "cat,  green hat,dog"


def test_a_tag_that_is_gone_and_another_picture_end_the_writing(editor, session, folder, qtbot):
    write_second_tag(editor, session, qtbot, "green hat")
    change_on_disk(session, folder, qtbot, "sun, cat")
    assert not written(editor)
    assert tags(editor) == ["sun", "cat"]
    write_second_tag(editor, session, qtbot, "never")
    select(session, "b")  # has a tag "cat" in that place, too
    assert not written(editor)
    assert captions(session)["b"] == "dog, cat"


def test_tags_are_put_in_order_by_keys_and_by_dragging(editor, session, qtbot):
    select(session, "a")
    editor.chips.choose(2)
    qtbot.keyClick(editor.chips.chips[2], KEY.Key_Left, CONTROL)
    assert captions(session)["a"] == "cat,  dog,red hat"
    assert editor.chips.chips[1].hasFocus()
    drag(editor.chips.chips[0], editor.chips, editor.chips.chips[-1].geometry().center() + QPoint(30, 0))
    assert captions(session)["a"] == "dog,  red hat,cat"
    drag(editor.chips.chips[2], editor.chips, QPoint(6, 12))
    assert captions(session)["a"] == "cat,  dog,red hat"
    drag(editor.chips.chips[0], editor.chips, editor.chips.chips[1].geometry().center() + QPoint(12, 0))
    assert captions(session)["a"] == "dog,  cat,red hat"


def test_arrows_go_from_chip_to_chip_and_on_to_the_text(editor, session, qtbot):
    select(session, "a")
    editor.line.setFocus()
    qtbot.keyClick(editor.line, KEY.Key_Backspace)
    assert editor.chips.chips[2].hasFocus()
    qtbot.keyClick(editor.chips.chips[2], KEY.Key_Home)
    assert editor.chips.chips[0].hasFocus()
    qtbot.keyClick(editor.chips.chips[0], KEY.Key_Right)
    assert editor.chips.chips[1].hasFocus()
    qtbot.keyClick(editor.chips.chips[1], KEY.Key_End)
    qtbot.keyClick(editor.chips.chips[2], KEY.Key_Right)
    assert editor.text.hasFocus()
