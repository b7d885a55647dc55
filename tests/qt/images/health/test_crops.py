"""Choosing crops by mouse and keys: kept in impasto.jsonl as edits, the pictures untouched."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from PySide6.QtCore import QPointF, Qt
from PySide6.QtWidgets import QApplication

from app.core.edits.bulk import rate
from app.core.health.groups import JudgingTarget
from app.qt.images.health.cropper import Cropper
from tests.support.images import photograph
from trainer.dataset.sidecar import read_sidecar

LEFT, KEY = Qt.MouseButton.LeftButton, Qt.Key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "zuschnitt ß"
    root.mkdir()
    photograph("rocket.jpg").resize((1600, 600)).save(root / "wide.png")
    photograph("coffee.png").resize((600, 600)).save(root / "square.png")
    return root


@pytest.fixture
def cropper(qtbot, session, folder):
    session.health.target = JudgingTarget(resolution=512)
    session.datasets.open(folder)
    pictures = session.library.images
    qtbot.waitUntil(lambda: len(pictures) == 2 and all(one.width for one in pictures.values()))
    qtbot.waitUntil(lambda: len(session.health.image_index.all("bucket")) == 2)
    wide = next(one for one in pictures.values() if one.name == "wide.png")
    cropper = Cropper(session, sorted(pictures, key=lambda number: number != wide.id))
    qtbot.addWidget(cropper)
    cropper.resize(900, 700)
    with qtbot.waitExposed(cropper):
        cropper.show()
    qtbot.waitUntil(lambda: cropper.canvas.whole is not None)
    cropper.canvas.setFocus()
    return cropper


def crop(cropper):
    return cropper.image.crop


def shape(cropper):
    frame = cropper.canvas.rectangle()
    return frame.width() / frame.height()


def drag(qtbot, cropper, start, end):
    qtbot.mousePress(cropper.canvas, LEFT, pos=start.toPoint())
    qtbot.mouseMove(cropper.canvas, end.toPoint())
    qtbot.mouseRelease(cropper.canvas, LEFT, pos=end.toPoint())


def test_a_frame_on_the_pictures_edges_can_be_grabbed(cropper):
    canvas = cropper.canvas
    free = canvas.margin - 0.5  # what rounding may take
    assert free > 10 and canvas.place().width() == pytest.approx(canvas.width() - 2 * canvas.margin, abs=1)
    assert canvas.rectangle().height() == pytest.approx(canvas.place().height(), abs=1)
    assert canvas.rect().toRectF().adjusted(free, free, -free, -free).contains(canvas.rectangle())


def test_the_part_that_is_lost_is_dimmed(qtbot, cropper):
    frame = cropper.canvas.rectangle()
    whole = cropper.canvas.place()
    assert frame.width() < whole.width() - 4
    bare = cropper.canvas.whole.small
    shot = cropper.canvas.grab().toImage()
    for x, dimmed in ((whole.left() + 3, True), (frame.center().x(), False)):
        y = whole.center().y() + 7
        shade = shot.pixelColor(int(x), int(y)).lightnessF()
        across, down = (x - whole.left()) / whole.width(), (y - whole.top()) / whole.height()
        light = bare.pixelColor(int(across * bare.width()), int(down * bare.height())).lightnessF()
        assert (shade < 0.6 * light + 0.01) == dimmed


def test_keys_move_the_frame_and_the_picture_stays_as_it_is(qtbot, session, cropper, folder):
    digest = hashlib.sha256((folder / "wide.png").read_bytes()).hexdigest()
    before = cropper.canvas.frame
    qtbot.keyClick(cropper.canvas, KEY.Key_Left)
    assert crop(cropper)[0] == pytest.approx(max(before[0] - 0.02, 0), abs=2e-3)
    session.saver.flush()
    assert read_sidecar(folder).of("wide.png").crop == crop(cropper)
    assert hashlib.sha256((folder / "wide.png").read_bytes()).hexdigest() == digest
    session.history.undo()
    assert crop(cropper) is None
    assert cropper.canvas.frame == before
    session.saver.flush()
    assert read_sidecar(folder).of("wide.png").crop is None


def test_a_drag_moves_the_frame_as_one_edit_within_the_picture(qtbot, session, cropper):
    frame, before = cropper.canvas.rectangle(), shape(cropper)
    drag(qtbot, cropper, frame.center() + QPointF(20, 9), frame.center() + QPointF(2000, 9))
    assert crop(cropper)[2] == pytest.approx(1.0, abs=1e-3)
    assert shape(cropper) == pytest.approx(before, rel=0.01)
    session.history.undo()
    assert crop(cropper) is None


def test_a_corner_sizes_the_frame_and_the_opposite_one_stays(qtbot, cropper):
    frame, before = cropper.canvas.rectangle(), shape(cropper)
    drag(qtbot, cropper, frame.bottomRight(), frame.bottomRight() - QPointF(frame.width() / 5, frame.height() / 5))
    after = cropper.canvas.rectangle()
    assert after.width() == pytest.approx(frame.width() * 0.8, rel=0.03)
    assert (after.left(), after.top()) == pytest.approx((frame.left(), frame.top()), abs=2)
    assert shape(cropper) == pytest.approx(before, rel=0.02)


def test_plus_and_minus_size_it_and_reset_goes_back(qtbot, cropper):
    wide = cropper.canvas.rectangle().width()
    for _ in range(3):
        qtbot.keyClick(cropper.canvas, KEY.Key_Minus)
    assert cropper.canvas.rectangle().width() < wide * 0.93
    qtbot.keyClick(cropper.canvas, KEY.Key_Plus)
    qtbot.mouseClick(cropper.reset_button, LEFT)
    assert crop(cropper) is None
    assert cropper.canvas.rectangle().width() == pytest.approx(wide)
    assert not cropper.reset_button.isEnabled()


def test_what_lies_outside_is_said_while_a_corner_is_pulled(qtbot, cropper):
    def share():
        return int(re.search(r"(\d+)% cropped off", cropper.facts.text())[1])

    before, frame = share(), cropper.canvas.rectangle()
    qtbot.mousePress(cropper.canvas, LEFT, pos=frame.topLeft().toPoint())
    qtbot.mouseMove(cropper.canvas, frame.center().toPoint())
    held = share()
    assert held > before + 20 and crop(cropper) is None
    qtbot.mouseRelease(cropper.canvas, LEFT, pos=frame.center().toPoint())
    assert crop(cropper) is not None and share() == held


def test_another_shape_of_the_dataset_can_be_chosen(qtbot, cropper):
    assert cropper.shape.count() == 2
    row = cropper.shape.findText("512 × 512")
    cropper.shape.setCurrentIndex(row)
    cropper.shape.activated.emit(row)
    assert shape(cropper) == pytest.approx(1.0, abs=0.01)
    assert cropper.facts.text().startswith("512 × 512")


def test_going_from_picture_to_picture(qtbot, cropper):
    qtbot.keyClick(cropper, KEY.Key_PageDown)
    assert cropper.name.text().startswith("square.png")
    assert "0% cropped off" in cropper.facts.text()
    assert not cropper.actions_by_name["next"].isEnabled()
    qtbot.keyClick(cropper, KEY.Key_PageUp)
    assert cropper.name.text().startswith("wide.png")


def test_only_crops_are_undone_and_redone_in_here(qtbot, session, cropper):
    """A deletion or whatever else was done before is not reached, nor what was undone before."""
    number = cropper.image.id
    for rating in (2, 3):
        session.history.do(rate([cropper.image], rating))
    session.history.undo()
    cropper.reject()
    other = Cropper(session, [number])
    qtbot.addWidget(other)
    with qtbot.waitActive(other):
        other.show()
    undo, redo = (other.actions_by_name[name] for name in ("undo", "redo"))
    assert not undo.isEnabled() and not redo.isEnabled()
    for step in (other.undo, other.redo):
        step()
        assert session.library.images[number].rating == 2
    qtbot.keyClick(other.canvas, KEY.Key_Left)
    made = crop(other)
    assert made and undo.isEnabled()
    for _ in range(2):
        qtbot.keyClick(other, KEY.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert crop(other) is None and session.library.images[number].rating == 2
    assert not undo.isEnabled() and redo.isEnabled()
    other.redo()
    assert crop(other) == made and not redo.isEnabled()


def test_thirds_can_be_hidden(qtbot, cropper):
    with_lines = cropper.canvas.grab().toImage()
    qtbot.keyClick(cropper, KEY.Key_T)
    QApplication.processEvents()
    assert not cropper.canvas.thirds
    assert cropper.canvas.grab().toImage() != with_lines
