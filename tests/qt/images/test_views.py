"""Grid, loupe, comparison and culling through clicks and keys, on real files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt, QUrl
from PySide6.QtGui import (
    QAccessible,
    QAccessibleAnnouncementEvent,
    QAccessibleEvent,
    QDragEnterEvent,
    QDropEvent,
    QGuiApplication,
    QImage,
)
from PySide6.QtWidgets import QApplication, QListWidget, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from app.core.disk.thumbnails import Thumbnail
from app.core.edits.bulk import rate
from app.core.edits.history import Edit
from app.core.library import ValueChange
from app.core.session import Session
from app.qt.images.dialogs import FolderDialog
from app.qt.images.views import DiskPoller, ImageViews
from app.qt.tiles import scaled
from tests.support.grid import COUNT, center, click, current, forty_pictures, named, settle, shown_views
from trainer.dataset.sidecar import read_sidecar

CTRL, SHIFT = Qt.KeyboardModifier.ControlModifier, Qt.KeyboardModifier.ShiftModifier


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return forty_pictures(tmp_path / "mes chats 🐈")


@pytest.fixture
def views(qtbot: QtBot, session: Session, folder: Path) -> Iterator[ImageViews]:
    with shown_views(qtbot, session, folder) as views:
        yield views


def chosen(session: Session) -> list[str]:
    pictures = session.library.images
    return sorted((pictures[number].name for number in session.view.selected), key=lambda name: int(name[1:-4]))


def press(
    qtbot: QtBot, views: ImageViews, key: Qt.Key, keys: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier
) -> None:
    qtbot.keyClick(views.stack.currentWidget(), key, keys)


def test_clicks_with_ctrl_and_shift_select_and_a_filter_keeps_the_selection(
    qtbot: QtBot, views: ImageViews, session: Session
) -> None:
    click(qtbot, views, 2)
    click(qtbot, views, 5, SHIFT)
    click(qtbot, views, 3, CTRL)
    assert chosen(session) == ["p2.png", "p4.png", "p5.png"] and current(session) == "p3.png"
    session.view.show([one.id for one in session.library.images.values() if one.name != "p4.png"])
    assert chosen(session) == ["p2.png", "p4.png", "p5.png"]
    assert [session.library.images[number].name for number in session.view.scope()] == ["p2.png", "p5.png"]
    click(qtbot, views, 0)
    assert chosen(session) == ["p0.png"]


def test_arrow_keys_walk_the_grid(qtbot: QtBot, views: ImageViews, session: Session) -> None:
    columns = views.grid.layout_now.columns
    press(qtbot, views, Qt.Key.Key_Home)
    press(qtbot, views, Qt.Key.Key_Right)
    press(qtbot, views, Qt.Key.Key_Down)
    assert current(session) == f"p{columns + 1}.png" and chosen(session) == [current(session)]
    press(qtbot, views, Qt.Key.Key_Up)
    press(qtbot, views, Qt.Key.Key_Up)
    assert current(session) == "p1.png"
    press(qtbot, views, Qt.Key.Key_Right, SHIFT)
    press(qtbot, views, Qt.Key.Key_Right, SHIFT)
    press(qtbot, views, Qt.Key.Key_Left, SHIFT)
    assert chosen(session) == ["p1.png", "p2.png"]
    press(qtbot, views, Qt.Key.Key_End)
    assert current(session) == f"p{COUNT - 1}.png"
    assert views.grid.visible.stop == COUNT
    press(qtbot, views, Qt.Key.Key_Down)
    press(qtbot, views, Qt.Key.Key_Home, CTRL)
    assert current(session) == "p0.png" and chosen(session) == [f"p{COUNT - 1}.png"]
    press(qtbot, views, Qt.Key.Key_Space)
    assert chosen(session) == ["p0.png", f"p{COUNT - 1}.png"]


def test_a_band_selects_what_it_touches(qtbot: QtBot, views: ImageViews, session: Session) -> None:
    viewport, gap = views.grid.viewport(), views.grid.layout_now.gap
    start = views.grid.rectangle(0).topLeft() - QPoint(gap // 2, gap // 2)
    end = views.grid.rectangle(views.grid.layout_now.columns + 1).center()
    qtbot.mousePress(viewport, Qt.MouseButton.LeftButton, pos=start)
    qtbot.mouseMove(viewport, (start + end) / 2)
    qtbot.mouseMove(viewport, end)
    qtbot.mouseRelease(viewport, Qt.MouseButton.LeftButton, pos=end)
    columns = views.grid.layout_now.columns
    assert chosen(session) == ["p0.png", "p1.png", f"p{columns}.png", f"p{columns + 1}.png"]


def test_thumbnails_are_painted_and_excluded_pictures_dimmed(qtbot: QtBot, views: ImageViews, session: Session) -> None:
    def color(index: int) -> tuple[int, int, int]:
        image = views.grid.viewport().grab().toImage()
        red, green, blue, _ = image.pixelColor(center(views, index) - QPoint(0, 10)).getRgb()
        return red, green, blue

    qtbot.waitUntil(lambda: all(abs(a - b) < 12 for a, b in zip(color(3), (18, 90, 237), strict=True)))
    click(qtbot, views, 3)
    views.reject()
    assert named(session, "p3.png").excluded
    click(qtbot, views, 8)
    assert color(3)[0] > 120  # mostly the white ground behind it


@pytest.mark.parametrize(
    ("size", "side", "ratio", "shown"),
    [((128, 64), 156, 1.0, (128, 64)), ((128, 64), 312, 2.0, (128, 64)), ((512, 256), 312, 2.0, (156, 78))],
    ids=["small", "small on a fine screen", "large on a fine screen"],
)
def test_a_picture_is_as_large_beside_the_words_on_every_screen(
    qapp: QApplication, size: tuple[int, int], side: int, ratio: float, shown: tuple[int, int]
) -> None:
    width, height = size
    pixmap = scaled(Thumbnail(1, 512, width, height, bytes(3 * width * height)), side, ratio)
    assert pixmap.deviceIndependentSize().toTuple() == shown


def test_culling_is_an_edit_that_reaches_the_notes_and_is_undone(
    qtbot: QtBot, views: ImageViews, session: Session
) -> None:
    click(qtbot, views, 1)
    click(qtbot, views, 3, SHIFT)
    views.rate_4()
    views.reject()
    folder = named(session, "p1.png").folder.path
    session.saver.flush()
    assert [read_sidecar(folder).of(f"p{n}.png").rating for n in range(5)] == [None, 4, 4, 4, None]
    assert read_sidecar(folder).of("p2.png").excluded and session.history.undo_name == "Exclude 3 images"
    session.history.undo()
    session.history.undo()
    session.saver.flush()
    assert not read_sidecar(folder).of("p2.png").excluded and read_sidecar(folder).of("p2.png").rating is None


def test_no_key_reaches_a_picture_that_a_filter_hides(qtbot: QtBot, views: ImageViews, session: Session) -> None:
    click(qtbot, views, 1)
    hidden = named(session, chosen(session)[0])
    session.view.show([number for number in session.view.ids if number != hidden.id])
    for act in (views.rate_4, views.reject, views.delete):
        act()
    assert (hidden.rating, hidden.excluded, hidden.path.exists()) == (None, False, True)
    assert session.history.undo_name is None
    assert not views.has_targets()
    views.show_loupe()
    assert session.view.current == session.view.ids[0]


def test_training_only_what_is_shown_is_one_edit(qtbot: QtBot, views: ImageViews, session: Session) -> None:
    kept = [one.id for one in session.library.images.values()][:7]
    session.view.show(kept)
    assert views.has_hidden()
    views.train_only_shown()
    assert sum(not one.excluded for one in session.library.images.values()) == 7
    assert session.history.undo_name == f"Train only on the images shown: exclude {COUNT - 7} images"
    session.history.undo()
    assert not any(one.excluded for one in session.library.images.values())


def test_the_loupe_shows_all_pixels_and_steps_and_zooms(qtbot: QtBot, views: ImageViews, session: Session) -> None:
    click(qtbot, views, 4)
    press(qtbot, views, Qt.Key.Key_Return)
    area = views.loupe.area
    assert views.in_loupe() and views.loupe.hasFocus()
    qtbot.waitUntil(lambda: area.whole is not None)
    assert area.whole and (area.whole.image.width(), area.whole.image.height()) == (304, 200)
    press(qtbot, views, Qt.Key.Key_Right)
    assert current(session) == "p5.png" and "p5.png" in views.loupe.facts.text()
    qtbot.waitUntil(lambda: area.whole is not None and area.whole.image.width() == 305)
    views.rate_2()
    assert named(session, "p5.png").rating == 2 and named(session, "p4.png").rating is None
    press(qtbot, views, Qt.Key.Key_Plus)
    assert area.scale == pytest.approx(1.25)
    views.toggle_full_size()
    assert area.scale == 1.0
    area.zoom_by(6.0, QPointF(100, 100))
    before = area.zoom.middle
    press(qtbot, views, Qt.Key.Key_Right)
    assert area.zoom.middle.x() > before.x() and current(session) == "p5.png"
    press(qtbot, views, Qt.Key.Key_Escape)
    assert views.in_grid() and views.grid.hasFocus()


def test_zooming_keeps_what_is_under_the_pointer_there(qtbot: QtBot, views: ImageViews) -> None:
    click(qtbot, views, 4)
    views.show_loupe()
    area, spot = views.loupe.area, QPointF(400, 300)
    qtbot.waitUntil(lambda: area.whole is not None)
    area.zoom.set(6.0)
    under = area._fraction(spot)
    area.zoom_by(1.25, spot)
    after = area._fraction(spot)
    assert (after.x(), after.y()) == pytest.approx((under.x(), under.y()), abs=1e-6)


def test_comparison_moves_all_together_and_works_on_the_ringed_one(
    qtbot: QtBot, views: ImageViews, session: Session
) -> None:
    click(qtbot, views, 0)
    click(qtbot, views, 2, SHIFT)
    views.show_compare()
    assert views.in_compare() and len(views.compare.ids) == 3
    areas = views.compare.areas
    qtbot.waitUntil(lambda: all(area.whole for area in areas[:3]))
    areas[1].zoom_by(3.0)
    assert areas[0].scale == areas[2].scale == areas[1].scale
    assert [area.isVisible() for area in areas] == [True, True, True, False]
    qtbot.mouseClick(areas[1], Qt.MouseButton.LeftButton)
    assert current(session) == "p1.png" and [area.marked for area in areas[:3]] == [False, True, False]
    views.reject()
    assert [named(session, f"p{n}.png").excluded for n in range(3)] == [False, True, False]
    press(qtbot, views, Qt.Key.Key_Right)
    assert current(session) == "p2.png"


def test_dropped_and_pasted_pictures_are_copied_in_without_overwriting(
    qtbot: QtBot, views: ImageViews, session: Session, tmp_path: Path, folder: Path
) -> None:
    away = tmp_path / "away"
    away.mkdir()
    Image.new("RGB", (50, 50), "white").save(away / "p1.png")
    (away / "p1.txt").write_text("dropped", encoding="utf-8")
    (away / "words.doc").write_text("no picture", encoding="utf-8")
    before = (folder / "p1.png").read_bytes()
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in sorted(away.iterdir())])
    said: list[str] = []
    views.message_shown.connect(said.append)
    views._arriving.import_data(data)
    qtbot.waitUntil(lambda: len(session.view.ids) == COUNT + 1)
    qtbot.waitUntil(lambda: named(session, "p1-2.png").caption == "dropped")
    assert (folder / "p1.png").read_bytes() == before and said == [
        "Copied 1 image(s) into mes chats 🐈. Skipped 2 file(s)."
    ]
    image = QImage(20, 10, QImage.Format.Format_RGB32)
    image.fill(Qt.GlobalColor.red)
    QGuiApplication.clipboard().setImage(image)
    views.paste()
    qtbot.waitUntil(lambda: len(session.view.ids) == COUNT + 2)
    assert QImage(str(folder / "pasted.png")).size() == image.size()


def test_the_current_picture_is_told_to_screen_readers(qtbot: QtBot, views: ImageViews) -> None:
    click(qtbot, views, 4)
    assert views.grid.accessibleDescription() == "p4.png, no caption, 5 of 40"
    assert views.grid.accessibleName() and views.slider.accessibleName()


def test_ctrl_wheel_and_slider_size_thumbnails(qtbot: QtBot, views: ImageViews) -> None:
    views.slider.setValue(240)
    assert views.grid.side == 240
    views.larger()
    assert views.slider.value() == 264
    QApplication.processEvents()


def test_culling_keys_work_where_the_pictures_have_the_keyboard(
    qtbot: QtBot, views: ImageViews, session: Session, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    window, elsewhere = QWidget(), QListWidget()
    qtbot.addWidget(window)
    column = QVBoxLayout(window)
    column.addWidget(elsewhere)
    column.addWidget(views)
    with qtbot.waitActive(window):
        window.show()
        window.activateWindow()
    click(qtbot, views, 2)
    views._commands.refresh_now()
    elsewhere.setFocus()
    for key in (Qt.Key.Key_Delete, Qt.Key.Key_X, Qt.Key.Key_5):
        qtbot.keyClick(elsewhere, key)
    assert (folder / "p2.png").exists() and not named(session, "p2.png").excluded
    views.grid.setFocus()
    qtbot.keyClick(views.grid, Qt.Key.Key_X)
    qtbot.keyClick(views.grid, Qt.Key.Key_5)
    assert named(session, "p2.png").excluded and named(session, "p2.png").rating == 5
    qtbot.keyClick(views.grid, Qt.Key.Key_Delete)
    settle(qtbot, session)
    assert not (folder / "p2.png").exists()
    qtbot.keyClick(views.grid, Qt.Key.Key_E)
    assert views.in_loupe()
    views.setParent(None)  # its own fixture closes it


def test_what_holds_for_a_folder_is_asked_saved_and_undone(
    qtbot: QtBot, views: ImageViews, session: Session, folder: Path
) -> None:
    click(qtbot, views, 2)
    views.mark_folder()
    (dialog,) = views.findChildren(FolderDialog)
    dialog.repeats.setValue(3)
    qtbot.mouseClick(
        dialog.regularization, Qt.MouseButton.LeftButton, pos=QPoint(8, dialog.regularization.height() // 2)
    )
    qtbot.keyClicks(dialog.trigger, "zwx")
    qtbot.keyClick(dialog, Qt.Key.Key_Return)
    session.saver.flush()
    notes = read_sidecar(folder).folder
    assert (notes.repeats, notes.regularization, notes.trigger) == (3, True, "zwx")
    session.history.undo()
    session.saver.flush()
    assert (read_sidecar(folder).folder.repeats, session.library.images[session.view.ids[0]].folder.repeats) == (
        None,
        None,
    )


def test_closing_a_dataset_leaves_its_files(qtbot: QtBot, views: ImageViews, session: Session, folder: Path) -> None:
    files = sorted(path.name for path in folder.iterdir())
    views.close_dataset()
    qtbot.waitUntil(lambda: session.view.ids == [])
    assert not session.library.images and not views.has_dataset()
    assert sorted(path.name for path in folder.iterdir()) == files
    views.grid.grab()


def test_files_dragged_from_elsewhere_are_taken(
    qtbot: QtBot, views: ImageViews, session: Session, tmp_path: Path
) -> None:
    other = tmp_path / "dogs"
    other.mkdir()
    Image.new("RGB", (64, 64)).save(other / "dog.png")
    data = QMimeData()
    (tmp_path / "invoice.pdf").write_bytes(b"%PDF")
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in (other, tmp_path / "invoice.pdf")])
    said: list[str] = []
    views.message_shown.connect(said.append)
    place, action = QPoint(50, 50), Qt.DropAction.CopyAction
    buttons, keys = Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    entering = QDragEnterEvent(place, action, data, buttons, keys)
    QApplication.sendEvent(views, entering)
    assert entering.isAccepted()
    QApplication.sendEvent(views, QDropEvent(QPointF(place), action, data, buttons, keys))
    qtbot.waitUntil(lambda: len(session.view.ids) == COUNT + 1)
    assert session.datasets.folders[-1] == other
    assert any("invoice.pdf" in sentence for sentence in said)  # of no use, and said beside


def test_other_programs_are_followed_while_the_clock_runs(
    qtbot: QtBot, views: ImageViews, session: Session, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = DiskPoller(session, views.grid.in_sight, views)
    clock.setInterval(20)
    clock.start()
    (folder / "p1.txt").write_text("written elsewhere", encoding="utf-8")
    Image.new("RGB", (64, 64)).save(folder / "p100.png")
    qtbot.waitUntil(lambda: len(session.view.ids) == COUNT + 1)
    qtbot.waitUntil(lambda: named(session, "p1.png").caption == "written elsewhere")
    clock.stop()
    looked: list[None] = []
    monkeypatch.setattr(session.thumbnails, "look", lambda: looked.append(None))
    clock.timeout.emit()
    assert looked, "thumbnails go on beside threads that are stuck"


def test_the_tip_of_a_damaged_picture_says_why(qtbot: QtBot, views: ImageViews, session: Session, folder: Path) -> None:
    whole = (folder / "p1.png").read_bytes()
    (folder / "p1.png").write_bytes(whole[: len(whole) // 2])
    session.datasets.refresh(whole=True)
    number = named(session, "p1.png").id
    qtbot.waitUntil(lambda: "damaged" in views.grid._tip(number))
    qtbot.waitUntil(lambda: views.grid._tip(number).startswith("mes chats 🐈/p1.png\n301 × 200\n"))


def test_what_keys_do_to_the_current_picture_is_spoken_while_the_grid_has_the_keyboard(
    qtbot: QtBot, session: Session, views: ImageViews, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken: list[str] = []

    def hear(event: QAccessibleEvent) -> None:
        if isinstance(event, QAccessibleAnnouncementEvent):
            spoken.append(event.message())

    monkeypatch.setattr(QAccessible, "updateAccessibility", hear)
    qtbot.waitUntil(views.grid.hasFocus)
    qtbot.keyClick(views.grid, Qt.Key.Key_Home)
    qtbot.keyClick(views.grid, Qt.Key.Key_Right)
    assert spoken == ["p0.png, no caption, 1 of 40", "p1.png, cat, number 1, 2 of 40"]
    one = named(session, "p1.png")
    session.history.do(rate([one], 3))
    assert spoken[2:] == ["p1.png, cat, number 1, 3 star(s), 2 of 40"]
    session.history.do(Edit("Write", (ValueChange(one.id, "caption", one.caption, "dog"),)))
    session.history.do(rate([named(session, "p2.png")], 3))
    assert len(spoken) == 3
    assert views.grid.accessibleDescription() == "p1.png, dog, 3 star(s), 2 of 40"
    views.grid.clearFocus()
    views.grid.step(1)
    assert len(spoken) == 3
    assert views.grid.accessibleDescription().startswith("p2.png")


def test_the_loupe_asks_no_disk_that_is_lost_and_shows_the_picture_when_it_is_back(
    qtbot: QtBot, views: ImageViews, session: Session, folder: Path
) -> None:
    def looked(lost: bool) -> bool:
        session.datasets.refresh(whole=True)
        return bool(session.datasets.lost) == lost

    click(qtbot, views, 4)
    views.show_loupe()
    area = views.loupe.area
    qtbot.waitUntil(lambda: area.whole is not None)
    away = folder.rename(folder.with_name("away"))
    qtbot.waitUntil(lambda: looked(lost=True))
    press(qtbot, views, Qt.Key.Key_Right)
    assert area.problem == session.datasets.lost[folder].sentence  # at once
    assert not any(map(session.thumbnails.reachable, session.library.images.values()))
    away.rename(folder)
    qtbot.waitUntil(lambda: looked(lost=False))
    qtbot.waitUntil(lambda: area.whole is not None)
    assert area.problem is None
    assert all(map(session.thumbnails.reachable, session.library.images.values()))
