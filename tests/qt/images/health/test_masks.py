"""The mask painter through mouse, pen and keys, on real files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PySide6.QtCore import QEvent, QPoint, QPointF, Qt
from PySide6.QtGui import QPointingDevice, QTabletEvent
from PySide6.QtWidgets import QApplication, QPushButton

from app.core.edits.masks import mask_path
from app.qt.images.health.mask_painter import MaskPainter
from tests.support.images import photograph

LEFT, SHIFT, KEY = Qt.MouseButton.LeftButton, Qt.KeyboardModifier.ShiftModifier, Qt.Key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "masken ü"
    root.mkdir()
    for name, photo in zip("ab", ["astronaut.png", "coffee.png"], strict=True):
        photograph(photo).resize((400, 300)).save(root / f"{name}.png")
    return root


@pytest.fixture
def painter(qtbot, session, folder):
    session.datasets.open(folder)
    pictures = session.library.images
    qtbot.waitUntil(lambda: len(pictures) == 2 and all(one.width for one in pictures.values()))
    painter = MaskPainter(session, list(pictures))
    qtbot.addWidget(painter)
    painter.resize(900, 700)
    with qtbot.waitExposed(painter):
        painter.show()
    ready(qtbot, painter)
    painter.canvas.hardness, painter.canvas.radius = 1.0, 10
    return painter


def ready(qtbot, painter):
    qtbot.waitUntil(lambda: painter.canvas.painting is not None and painter.canvas.whole is not None)


def pixels(painter):
    return painter.canvas.painting.pixels


def on_disk(folder, name):
    with Image.open(mask_path(folder / f"{name}.png")) as image:
        assert image.mode == "L"
        return np.array(image)


def drag(qtbot, painter, start, end):
    """Draw with the left button between two pixels of the picture."""
    first, last = (painter.canvas.at(QPointF(*spot)).toPoint() for spot in (start, end))
    qtbot.mousePress(painter.canvas, LEFT, pos=first)
    qtbot.mouseMove(painter.canvas, last)
    qtbot.mouseRelease(painter.canvas, LEFT, pos=last)


def use(painter, name):
    painter.actions_by_name[name].trigger()


def test_what_the_eraser_draws_is_left_out_and_done_saves_it(qtbot, painter, folder):
    qtbot.keyClick(painter, KEY.Key_E)
    drag(qtbot, painter, (100, 100), (200, 100))
    assert (pixels(painter)[100, 100:200] == 0).all()
    assert pixels(painter)[130, 150] == 255
    drawn = pixels(painter).copy()
    qtbot.mouseClick(painter.done_button, LEFT)
    qtbot.waitUntil(lambda: not painter.isVisible())
    assert np.array_equal(on_disk(folder, "a"), drawn)
    assert not mask_path(folder / "b.png").exists()


def test_the_brush_trains_again_and_a_stroke_is_one_step_back(qtbot, painter):
    use(painter, "none")
    assert not pixels(painter).any()
    use(painter, "brush")
    drag(qtbot, painter, (50, 50), (90, 60))
    painted = pixels(painter).copy()
    assert painted[50, 50] == 255
    qtbot.keyClick(painter, KEY.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert not pixels(painter).any()
    qtbot.keyClick(painter, KEY.Key_Z, Qt.KeyboardModifier.ControlModifier | SHIFT)
    assert np.array_equal(pixels(painter), painted)
    use(painter, "undo")
    use(painter, "undo")
    assert (pixels(painter) == 255).all()
    assert not painter.actions_by_name["undo"].isEnabled()


def test_fill_takes_the_area_that_a_line_encloses(qtbot, painter):
    use(painter, "eraser")
    for start, end in (
        ((100, 50), (100, 250)),
        ((100, 250), (300, 250)),
        ((300, 250), (300, 50)),
        ((300, 50), (100, 50)),
    ):
        drag(qtbot, painter, start, end)
    use(painter, "fill")
    qtbot.mouseClick(painter.canvas, LEFT, pos=painter.canvas.at(QPointF(200, 150)).toPoint())
    assert not pixels(painter)[60:240, 110:290].any()
    assert pixels(painter)[10, 10] == 255
    use(painter, "invert")
    assert pixels(painter)[150, 200] == 255
    assert pixels(painter)[10, 10] == 0


def test_all_by_keys(qtbot, painter):
    painter.canvas.setFocus()
    qtbot.keyClick(painter.canvas, KEY.Key_E)
    qtbot.keyClick(painter.canvas, KEY.Key_Space)
    middle = pixels(painter)[150, 200]
    assert middle == 0
    before = np.count_nonzero(pixels(painter) == 0)
    qtbot.keyClick(painter.canvas, KEY.Key_Right)
    assert np.count_nonzero(pixels(painter) == 0) == before
    qtbot.keyClick(painter.canvas, KEY.Key_Right, SHIFT)
    assert np.count_nonzero(pixels(painter) == 0) > before
    radius = painter.canvas.radius
    qtbot.keyClick(painter.canvas, KEY.Key_BracketRight)
    assert painter.canvas.radius > radius
    assert painter.sliders["size"].value() == painter.canvas.radius
    qtbot.keyClick(painter.canvas, KEY.Key_Plus)
    assert painter.canvas.zoom.scale
    qtbot.keyClick(painter.canvas, KEY.Key_0)
    assert painter.canvas.zoom.scale is None


def test_its_keys_stay_its_own_whatever_command_of_the_window_has_them(qtbot, window, session, folder):
    own = {"images.rate_3": ("[",), "images.rate_4": ("]",), "images.rate_5": ("0", "+")}
    session.settings.change(session.settings.preferences.model_copy(update={"shortcuts": own}))
    window.open([folder])
    view, pictures = session.view, session.library.images
    qtbot.waitUntil(lambda: len(view.ids) == 2 and all(one.width for one in pictures.values()))
    view.select(view.ids[:1], view.ids[0])
    grid = window.images.views.grid
    grid.setFocus()
    qtbot.keyClick(grid, KEY.Key_BracketLeft)
    assert pictures[view.ids[0]].rating == 3
    qtbot.keyClick(grid, KEY.Key_M)
    (painter,) = window.findChildren(MaskPainter)
    qtbot.waitUntil(painter.isActiveWindow)
    ready(qtbot, painter)
    radius = painter.canvas.radius
    qtbot.keyClick(painter.canvas, KEY.Key_BracketRight)
    assert painter.canvas.radius > radius
    qtbot.keyClick(painter.canvas, KEY.Key_BracketLeft)
    assert painter.canvas.radius == radius
    qtbot.keyClick(painter.canvas, KEY.Key_Plus)
    assert painter.canvas.zoom.scale
    qtbot.keyClick(painter.canvas, KEY.Key_0)
    assert painter.canvas.zoom.scale is None
    assert pictures[view.ids[0]].rating == 3


def test_the_pressure_of_a_pen_is_the_size_of_the_brush(qtbot, painter):
    use(painter, "eraser")
    painter.canvas.radius = 40
    widths = []
    for pressure, x in ((0.25, 80), (1.0, 300)):
        spot = painter.canvas.at(QPointF(x, 150))
        for kind, force in ((QEvent.Type.TabletPress, pressure), (QEvent.Type.TabletRelease, 0.0)):
            QApplication.sendEvent(painter.canvas, pen(kind, spot, force))
        widths.append(np.count_nonzero(pixels(painter)[150, max(x - 60, 0) : x + 60] == 0))
    assert abs(widths[0] - 20) <= 3
    assert abs(widths[1] - 80) <= 3


def pen(kind, spot, pressure):
    button = LEFT if kind != QEvent.Type.TabletMove else Qt.MouseButton.NoButton
    device = QPointingDevice.primaryPointingDevice()
    return QTabletEvent(
        kind, device, spot, spot, pressure, 0.0, 0.0, 0.0, 0.0, 0.0, Qt.KeyboardModifier.NoModifier, button, LEFT
    )


def test_the_tint_is_seen_where_it_is_left_out(qtbot, painter):
    before = painter.canvas.grab().toImage()
    use(painter, "eraser")
    drag(qtbot, painter, (100, 100), (101, 100))
    painter.canvas._brush = None
    after = painter.canvas.grab().toImage()
    inside, outside = (painter.canvas.at(QPointF(*spot)).toPoint() for spot in ((100, 100), (300, 250)))
    assert after.pixelColor(inside) != before.pixelColor(inside)
    assert after.pixelColor(outside) == before.pixelColor(outside)
    painter.sliders["opacity"].setValue(100)
    assert painter.canvas.grab().toImage().pixelColor(inside) != after.pixelColor(inside)


def test_going_on_saves_and_coming_back_shows_it(qtbot, painter, session, folder):
    use(painter, "none")
    qtbot.keyClick(painter, KEY.Key_PageDown)
    qtbot.waitUntil(lambda: painter.name.text().startswith("b.png"))
    ready(qtbot, painter)
    assert not on_disk(folder, "a").any()
    assert (pixels(painter) == 255).all()
    assert session.library.images[painter._ids[0]].mask
    qtbot.keyClick(painter, KEY.Key_PageUp)
    qtbot.waitUntil(lambda: painter.name.text().startswith("a.png") and painter.canvas.painting is not None)
    assert not pixels(painter).any()


def test_a_mask_that_another_program_wrote_is_a_conflict(qtbot, painter, session, folder):
    use(painter, "none")
    Image.new("L", (400, 300), 128).save(mask_path(folder / "a.png"))
    theirs = mask_path(folder / "a.png").read_bytes()
    qtbot.keyClick(painter, KEY.Key_Escape)
    qtbot.waitUntil(painter.over_button.isVisible)
    assert painter.isVisible()
    assert "another program" in painter.message.text()
    assert mask_path(folder / "a.png").read_bytes() == theirs
    qtbot.mouseClick(painter.over_button, LEFT)
    qtbot.waitUntil(lambda: not painter.busy and not painter.message.isVisible())
    assert not on_disk(folder, "a").any()
    assert session.backups.versions(str(folder), "a-masklabel.png")[0].data == theirs


def test_removing_takes_the_file_away_and_keeps_it(qtbot, painter, session, folder):
    use(painter, "none")
    painter._save(painter._update_state)
    qtbot.waitUntil(lambda: not painter.busy and painter.state is not None)
    data = mask_path(folder / "a.png").read_bytes()
    qtbot.mouseClick(painter.remove_button, LEFT)
    qtbot.waitUntil(lambda: not painter.busy and painter.state is None and painter.canvas.painting is not None)
    assert not mask_path(folder / "a.png").exists()
    assert (pixels(painter) == 255).all()
    assert data in [version.data for version in session.backups.versions(str(folder), "a-masklabel.png")]
    painter.discard()
    path, number = mask_path(folder / "a.png"), painter._ids[0]
    for step, wanted in (("undo", data), ("undo", None), ("redo", data), ("redo", None)):
        assert getattr(session.history, step)().name.endswith("the mask of a.png")
        qtbot.waitUntil(lambda wanted=wanted: session.library.images[number].mask is (wanted is not None))
        assert (path.read_bytes() if path.exists() else None) == wanted
    path.write_bytes(b"another program's")
    failed = []
    session.history.failed.connect(failed.append)
    session.history.undo()
    qtbot.waitUntil(lambda: bool(failed))
    assert path.read_bytes() == b"another program's" and failed[0].code == "undo.changed"


def test_one_mask_file_is_read_or_written_at_a_time(qtbot, painter, session, folder, monkeypatch):
    use(painter, "none")
    painter._save(painter._update_state)
    qtbot.waitUntil(lambda: not painter.busy and painter.state is not None)
    started, run = [], session.tasks.run
    monkeypatch.setattr(session.tasks, "run", lambda work, *rest: (started.append(work), run(work, *rest)))
    painter.remove()
    painter.remove()
    assert len(started) == 1
    qtbot.waitUntil(lambda: not painter.busy and painter.state is None and painter.canvas.painting is not None)
    assert not painter.message.isVisible() and not mask_path(folder / "a.png").exists()


def test_strokes_painted_while_a_mask_is_saved_are_saved_too(qtbot, painter, folder):
    use(painter, "none")
    qtbot.mouseClick(painter.done_button, LEFT)
    assert painter.busy
    painter.fill(255)
    qtbot.waitUntil(lambda: not painter.isVisible())
    assert (on_disk(folder, "a") == 255).all()


def test_a_wheel_turns_to_what_is_under_the_pointer_and_the_middle_button_moves(qtbot, painter):
    canvas = painter.canvas
    canvas.zoom.set(4.0)
    place = canvas.place().topLeft()
    qtbot.mousePress(canvas, Qt.MouseButton.MiddleButton, pos=QPoint(300, 300))
    qtbot.mouseMove(canvas, QPoint(360, 330))
    qtbot.mouseRelease(canvas, Qt.MouseButton.MiddleButton, pos=QPoint(360, 330))
    moved = canvas.place().topLeft() - place
    assert (round(moved.x()), round(moved.y())) == (60, 30)
    assert (pixels(painter) == 255).all()


def test_every_control_has_a_name(painter):
    for button in painter.findChildren(QPushButton):
        assert button.text()
    assert all(slider.accessibleName() for slider in painter.sliders.values())
    assert painter.canvas.accessibleName()
