"""The first five minutes of an artist, from the drop of a folder to the line that all is saved: one sitting."""

import random
import shutil

import pytest
from PIL import Image
from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent

from app.qt.images.captions.bulk_dialog import BulkDialog, RenameForm
from app.qt.window import Window
from tests.qt.images.captions.test_captions import english

__all__ = ["english"]

KEY = Qt.Key
CONTROL, NONE = Qt.KeyboardModifier.ControlModifier, Qt.KeyboardModifier.NoModifier
PICTURES, BARE, SMALL = 60, 14, 3
SAVED = "All changes saved; originals are backed up."


@pytest.fixture
def folder(tmp_path):
    """Real JPEGs, each of its own: 14 without caption, 3 too small, 2 near copies, 1 damaged."""
    folder = tmp_path / "猫 und Hüte"
    folder.mkdir()
    rng = random.Random(7)
    for number in range(PICTURES):
        file = folder / f"bild {number}.jpg"
        _picture(rng, 400 if number >= PICTURES - SMALL else 1024).save(file, quality=90)
        if number >= BARE:
            file.with_suffix(".txt").write_text(f"kat, hat {number % 5}", encoding="utf-8")
    with Image.open(folder / "bild 20.jpg") as first:
        first.save(folder / "bild 20 neu.jpg", quality=60)
    shutil.copy(folder / "bild 20.txt", folder / "bild 20 neu.txt")
    (folder / "kaputt.jpg").write_bytes((folder / "bild 30.jpg").read_bytes()[:3000])
    (folder / "kaputt.txt").write_text("kat", encoding="utf-8")
    return folder


def _picture(rng, side):
    """Blots of many colors, which no two share."""
    small = Image.frombytes("RGB", (6, 6), rng.randbytes(6 * 6 * 3))
    return small.resize((side, side), Image.Resampling.BICUBIC)


def drop(window, path):
    """What a file manager sends: the pointer comes in, then lets go."""
    mime = QMimeData()
    mime.setUrls([QUrl.fromLocalFile(str(path))])
    buttons = (Qt.MouseButton.LeftButton, NONE)
    window.dragEnterEvent(QDragEnterEvent(QPoint(600, 300), Qt.DropAction.CopyAction, mime, *buttons))
    window.dropEvent(QDropEvent(QPointF(600, 300), Qt.DropAction.CopyAction, mime, *buttons))


def texts(folder):
    return {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.txt")}


def come_back(window, qtbot):
    """What a window manager does when a dialog closes."""
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    window.commands.refresh_now()


def test_the_first_five_minutes(qtbot, session, folder, english):
    originals = texts(folder)
    window = Window(session)
    qtbot.addWidget(window)
    window.resize(1280, 800)
    with qtbot.waitExposed(window):
        window.show()
    come_back(window, qtbot)
    view, library = session.view, session.library.images
    page, editor = window.images, window.images.editor
    thumbnails = set()
    session.thumbnails.ready.connect(lambda thumbnail: thumbnails.add(thumbnail.image))

    # Drop a folder: thumbnails at once.
    drop(window, folder)
    qtbot.waitUntil(lambda: len(view.ids) == PICTURES + 2)
    qtbot.waitUntil(lambda: thumbnails >= set(view.ids[:6]))
    assert window.notices.sentences() == [], "something was asked or told that was not needed"

    # A list of problems beside them, each leading to the pictures.
    found = lambda: {one.code: len(one.ids) for one in session.health.current_findings}  # noqa: E731
    wanted = {"caption.missing": BARE, "image.small": SMALL, "duplicate.near": 2, "image.unusable": 1}
    wanted["bucket.lonely"] = SMALL  # too few of their shape to fill a batch
    qtbot.waitUntil(lambda: found() == wanted)
    problems = page.health_panel.list
    place = problems.findings.index_of("caption.missing")
    problems.scrollTo(place)
    qtbot.mouseClick(problems.viewport(), Qt.MouseButton.LeftButton, pos=problems.visualRect(place).center())
    assert len(view.ids) == BARE
    session.filtering.apply("")
    qtbot.mouseClick(page.health_panel.fix_button, Qt.MouseButton.LeftButton)  # "Write captions"
    assert len(view.ids) == BARE and view.current == view.ids[0] and editor.line.hasFocus()

    # Arrow keys, type a tag, Enter.
    page.views.grid.setFocus()
    first = view.current
    window.commands.refresh_now()
    qtbot.keyClick(page.views.grid, KEY.Key_Right)
    second = view.current
    assert second not in (None, first)
    qtbot.keyClick(page.views.grid, KEY.Key_Slash)
    assert editor.line.hasFocus()
    qtbot.keyClicks(editor.line, "kat")
    qtbot.keyClick(editor.line, KEY.Key_Return)
    qtbot.keyClick(editor.line, KEY.Key_Down, CONTROL)
    qtbot.keyClicks(editor.line, "hut")
    qtbot.keyClick(editor.line, KEY.Key_Return)
    assert editor.line.hasFocus()
    typed = {library[second].path.with_suffix(".txt").name: "kat", library[view.current].path.stem + ".txt": "hut"}
    assert [library[number].caption for number in (second, view.current)] == ["kat", "hut"]
    qtbot.waitUntil(lambda: texts(folder) == originals | typed)
    before = texts(folder)

    # Replace a tag across all pictures: a preview of every change first.
    session.filtering.apply("")
    assert len(view.ids) == PICTURES + 2
    view.select([], None)
    window.commands.refresh_now()
    qtbot.keyClick(window, KEY.Key_H, CONTROL)
    dialog = window.findChild(BulkDialog)
    dialog.operations.setCurrentRow(2)
    assert isinstance(dialog.form, RenameForm)
    qtbot.keyClicks(dialog.form.old, "kat")
    qtbot.keyClicks(dialog.form.new, "cat")
    many = sum("kat" in text for text in before.values())
    qtbot.waitUntil(lambda: dialog.count.text() == f"Changes {many} of {PICTURES + 2} captions")
    assert texts(folder) == before
    assert dialog.isVisible()
    qtbot.mouseClick(dialog.apply_button, Qt.MouseButton.LeftButton)
    after = {name: text.replace("kat", "cat") for name, text in before.items()}
    qtbot.waitUntil(lambda: texts(folder) == after)

    # One Ctrl+Z brings all back.
    come_back(window, qtbot)
    qtbot.keyClick(window, KEY.Key_Z, CONTROL)
    assert f"Rename kat to cat in {many} captions" in window.status.currentMessage()
    qtbot.waitUntil(lambda: texts(folder) == before)

    # The line that says so.
    qtbot.waitUntil(lambda: window.status.saving.text() == SAVED)
    kept = {version.file: version.data for version in session.backups.originals(str(folder))}
    assert all(kept[name].decode() == text for name, text in originals.items() if "kat" in text)
    assert window.notices.sentences() == []
