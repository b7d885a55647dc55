"""The window, its pages, its line of status, and what it remembers."""

import sys

import pytest
from PIL import Image
from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt, QTimer, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import QApplication, QFileDialog, QPushButton, QWidget

from app.core.crashes import CrashLog
from app.core.edits.history import Edit
from app.core.library import ValueChange
from app.core.session import Session
from app.core.settings import recent
from app.core.settings.preferences import Settings
from app.core.tags.completion import lists_folder
from app.qt.images.finding.filter_box import SaveDialog
from app.qt.main_thread import MainThreadQueue
from app.qt.window import Window


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "Bilder für 猫"
    folder.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (64, 48), "red").save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("red", encoding="utf-8")
    return folder


def drop(window, *paths):
    """What a file manager sends: the pointer comes in, then lets go."""
    mime = QMimeData()
    mime.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    buttons = (Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier)
    enter = QDragEnterEvent(QPoint(300, 300), Qt.DropAction.CopyAction, mime, *buttons)
    window.dragEnterEvent(enter)
    window.dropEvent(QDropEvent(QPointF(300, 300), Qt.DropAction.CopyAction, mime, *buttons))
    return enter.isAccepted()


def test_it_opens_on_the_pictures_page_with_a_place_for_every_room(window):
    assert window.pages.currentWidget() is window.images
    for name in ("tags", "filter", "captions", "health"):
        assert window.images.findChild(QWidget, name) is not None


def test_pages_are_reached_by_buttons_and_keys(window, qtbot):
    window._sidebar.buttons.button(2).click()
    assert window.pages.currentIndex() == 2
    qtbot.keyClick(window, Qt.Key.Key_4, Qt.KeyboardModifier.ControlModifier)
    assert window.pages.currentIndex() == 3
    assert window._sidebar.buttons.checkedId() == 3


def test_a_notice_of_a_folder_that_is_gone_goes_when_it_is_back_or_closed(window, session, pictures, qtbot):
    def told(count):
        session.datasets.refresh(whole=True)
        lost = [error.sentence for error in session.datasets.lost.values()]
        said = window.notices.sentences()
        return len(lost) == len(said) == count and all(map(str.__contains__, said, lost))

    session.datasets.open(pictures)
    qtbot.waitUntil(lambda: len(session.library.images) == 2)
    away = pictures.rename(pictures.with_name("away"))
    qtbot.waitUntil(lambda: told(1))
    away.rename(pictures)
    qtbot.waitUntil(lambda: told(0))
    pictures.rename(away)
    qtbot.waitUntil(lambda: told(1))
    session.datasets.close(pictures)
    assert window.notices.sentences() == []


def test_datasets_of_one_name_are_told_apart(window, session, tmp_path, qtbot):
    for place in ("one", "two"):
        (tmp_path / place / "cats").mkdir(parents=True)
        Image.new("RGB", (64, 48), "red").save(tmp_path / place / "cats" / "a.png")
        session.datasets.open(tmp_path / place / "cats")
    qtbot.waitUntil(lambda: len(session.view.ids) == 2)
    grid = window.images.views.grid
    assert [grid._tip(number).splitlines()[0] for number in session.view.ids] == ["one/cats/a.png", "two/cats/a.png"]
    dialog = SaveDialog("tag:cat", list(session.datasets.folders), window)
    assert [dialog._scope.itemText(row) for row in (1, 2)] == ["Only one/cats", "Only two/cats"]
    session.view.select(session.view.ids[1:], session.view.ids[1])
    window.images.views.close_dataset()
    assert "two/cats" in window.status.currentMessage()
    assert grid._tip(session.view.ids[0]).splitlines()[0] == "cats/a.png"


def test_a_folder_dropped_again_is_said_to_be_open(window, session, pictures, qtbot):
    session.datasets.open(pictures)
    drop(window, pictures)
    qtbot.waitUntil(lambda: window.status.currentMessage() == f"{pictures.name} is already open.")
    assert session.datasets.folders == (pictures,)


def test_a_file_of_no_use_is_told_and_does_not_open_the_folder_that_it_lies_in(window, session, pictures, qtbot):
    (pictures / "model.zip").write_bytes(b"PK")
    drop(window, pictures / "model.zip")
    qtbot.waitUntil(lambda: any("model.zip" in told for told in window.notices.sentences()))
    assert session.datasets.folders == ()
    drop(window, pictures / "model.zip", pictures / "a.txt")
    qtbot.waitUntil(lambda: session.datasets.folders == (pictures,))


def test_an_empty_folder_beside_others_is_said_to_be_empty(window, session, pictures, tmp_path, qtbot):
    (tmp_path / "bare").mkdir()
    drop(window, pictures)
    qtbot.waitUntil(lambda: len(session.library.images) == 2)
    drop(window, tmp_path / "bare")
    qtbot.waitUntil(lambda: window.status.currentMessage() == "No images in bare")


def test_a_folder_dropped_anywhere_is_opened_as_a_dataset(window, session, pictures, qtbot):
    window.show_runs()
    assert drop(window, pictures)
    qtbot.waitUntil(lambda: len(session.library.images) == 2)
    assert window.pages.currentWidget() is window.images


def test_images_that_come_late_leave_the_page_that_the_user_went_to(window, session, pictures, qtbot):
    drop(window, pictures)
    window.show_runs()
    qtbot.waitUntil(lambda: len(session.library.images) == 2)
    assert window.pages.currentWidget() is not window.images


def test_files_of_no_use_beside_a_folder_are_named(window, session, pictures, tmp_path, qtbot):
    (tmp_path / "invoice.pdf").write_bytes(b"%PDF")
    drop(window, pictures, tmp_path / "invoice.pdf")
    qtbot.waitUntil(lambda: len(session.library.images) == 2)
    assert any("invoice.pdf" in sentence for sentence in window.notices.sentences())


def test_of_a_file_its_folder_is_opened(window, session, pictures, qtbot):
    drop(window, pictures / "b.png")
    qtbot.waitUntil(lambda: {picture.name for picture in session.library.images.values()} == {"a.png", "b.png"})


def test_what_is_no_file_of_this_computer_is_not_taken(window, session):
    mime = QMimeData()
    mime.setUrls([QUrl("https://example.org/a.png")])
    event = QDragEnterEvent(
        QPoint(9, 9), Qt.DropAction.CopyAction, mime, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    )
    event.ignore()
    window.dragEnterEvent(event)
    assert not event.isAccepted()


def test_a_folder_that_is_not_there_is_told_above_the_page(window, tmp_path, qtbot):
    window.open([tmp_path / "gone"])
    qtbot.waitUntil(lambda: any("gone" in sentence for sentence in window.notices.sentences()))
    assert window.notices.isVisible()


def test_an_empty_window_invites_a_folder(window, session, pictures, qtbot, monkeypatch):
    invitation = window.empty_state
    assert invitation.isVisible()
    assert invitation.title.text() == "Drop a folder of images here"
    assert invitation.size() == window.images.views.size()
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(pictures))
    invitation.button.click()
    qtbot.waitUntil(lambda: len(session.view.ids) == 2)
    assert not invitation.isVisible()
    session.datasets.close(pictures)
    assert invitation.isVisible()


def test_the_keyboard_begins_with_the_invitation_and_goes_on_with_the_pictures(window, session, pictures, qtbot):
    assert window.focusWidget() is window.empty_state.button
    window.open([pictures])
    qtbot.waitUntil(lambda: not window.empty_state.isVisible())
    assert window.focusWidget() is window.images.views.grid


def test_an_empty_folder_is_said_to_be_empty(window, session, tmp_path, qtbot):
    (tmp_path / "leer").mkdir()
    assert drop(window, tmp_path / "leer")
    qtbot.waitUntil(lambda: window.empty_state.title.text() == "No images in leer")
    Image.new("RGB", (64, 48)).save(tmp_path / "leer" / "a.png")
    session.datasets.refresh()
    qtbot.waitUntil(lambda: not window.empty_state.isVisible())


def test_a_folder_by_a_way_round_is_the_folder_itself(window, session, pictures, qtbot):
    (pictures / "in").mkdir()
    window.open([pictures, pictures / "in" / ".."])
    qtbot.waitUntil(lambda: len(session.view.ids) == 2)
    assert session.datasets.folders == (pictures,)
    assert window.notices.sentences() == []


def test_whether_all_is_saved_is_seen_while_something_is_said(window, session, pictures, qtbot):
    window.open([pictures])
    qtbot.waitUntil(lambda: len(session.view.ids) == 2)
    number = session.view.ids[0]
    qtbot.waitUntil(lambda: session.library.images[number].caption == "red")  # read after the names
    session.history.do(Edit("Rename red to blue", (ValueChange(number, "caption", "red", "blue"),)))
    qtbot.waitUntil(lambda: window.status.saving.text() == "All changes saved; originals are backed up.")
    window.status.say("Something else")
    assert window.status.currentMessage() == "Something else"
    assert window.status.saving.isVisible()


def test_hidden_pictures_that_are_selected_are_counted_in_a_sentence(window, session, pictures, qtbot):
    window.open([pictures])
    qtbot.waitUntil(lambda: len(session.view.ids) == 2)
    session.view.select(session.view.ids, session.view.ids[0])
    assert window.status.counts.text() == "2 image(s), 2 selected"
    session.filtering.apply("tag:green")
    assert window.status.counts.text() == "0 image(s), 2 selected"


def test_filters_and_tag_lists_that_cannot_be_read_are_told(qtbot, per_user_folder):
    (per_user_folder / "filters.json").write_text("[broken", encoding="utf-8")
    lists_folder().mkdir(parents=True)
    (lists_folder() / "bad.csv").write_bytes(b"\x00\xff\x00")
    poster = MainThreadQueue()
    session = Session(poster.post, Settings())
    window = Window(session)
    qtbot.addWidget(window)
    assert "filters.damaged.json" in window.notices.sentences()[0]
    session.completer.complete("cat")
    qtbot.waitUntil(lambda: len(window.notices.sentences()) == 2)
    assert "bad.csv" in window.notices.sentences()[1]
    session.close()
    poster.close()


def test_an_edit_is_undone_by_name_and_saving_is_told(window, session, pictures, qtbot):
    window.open([pictures])
    qtbot.waitUntil(lambda: any(picture.caption == "red" for picture in session.library.images.values()))
    number = next(number for number, picture in session.library.images.items() if picture.caption == "red")
    name = session.library.images[number].name
    session.history.do(Edit("Rename red to blue", (ValueChange(number, "caption", "red", "blue"),)))
    qtbot.waitUntil(lambda: window.status.saving.text() == "All changes saved; originals are backed up.")
    file = (pictures / name).with_suffix(".txt")
    assert file.read_text(encoding="utf-8") == "blue"
    window.commands.refresh_now()
    assert "Rename red to blue" in window.commands["edit.undo"].text()
    qtbot.keyClick(window, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert session.library.images[number].caption == "red"
    assert "Rename red to blue" in window.status.currentMessage()
    qtbot.waitUntil(lambda: file.read_text(encoding="utf-8") == "red")


def test_it_stands_as_it_stood(window, qtbot, session):
    window.resize(760, 620)  # the screen of tests has 800
    window.images.columns.setSizes([150, 500, 250])
    sizes = window.images.columns.sizes()
    window.close()
    assert "geometry" in recent.read_window_state()[0]
    again = Window(session)
    qtbot.addWidget(again)
    with qtbot.waitExposed(again):
        again.show()
    assert (again.width(), again.height()) == (760, 620)
    assert again.images.columns.sizes() == sizes


@pytest.mark.parametrize("again", [False, True])
def test_it_closes_when_pictures_are_in_the_trash_or_at_once_where_it_is_closed_again(
    window, session, pictures, qtbot, tmp_path, monkeypatch, again
):
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))  # where Linux has its trash
    window.open([pictures])
    qtbot.waitUntil(lambda: len(session.view.ids) == 2)
    session.view.select(session.view.ids[:1], session.view.ids[0])
    window.images.views.delete()
    session.history.undo()  # waits for the files that are on their way to the trash
    window.close()
    assert window.isVisible()
    assert "closes when this is done: Move 1 image to the trash." in window.notices.sentences()[-1]
    if again:
        window.close()
        assert not window.isVisible()
        return
    qtbot.waitUntil(lambda: not window.isVisible())
    assert session.history.writing is None
    assert not window._closing, "shown again by another start, it would close by itself after the next edit"
    assert sorted(file.name for file in pictures.iterdir()) == ["a.png", "a.txt", "b.png", "b.txt"]
    assert "geometry" in recent.read_window_state()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the place of the trash cannot be chosen")
def test_it_stays_open_where_the_trash_refuses_what_it_waits_for(
    window, session, pictures, qtbot, tmp_path, monkeypatch
):
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "no folder"))
    window.open([pictures])
    qtbot.waitUntil(lambda: len(session.view.ids) == 2)
    session.view.select(session.view.ids[:1], session.view.ids[0])
    window.images.views.delete()
    window.close()
    qtbot.waitUntil(lambda: "1 image(s) to the trash: a.png" in " ".join(window.notices.sentences()[-1:]))
    qtbot.waitUntil(lambda: len(session.view.ids) == 2)  # the view follows a moment later
    QApplication.processEvents()
    assert window.isVisible()
    window.close()
    assert not window.isVisible()


def test_nonsense_in_the_windows_file_does_not_keep_it_closed(qtbot, session, per_user_folder):
    recent.write_window_state({"geometry": "not base64 at all", "images.columns": "AAAA"})
    window = Window(session)
    qtbot.addWidget(window)
    with qtbot.waitExposed(window):
        window.show()
    assert window.width() > 400


def test_a_damaged_file_of_the_window_is_named(qtbot, session):
    recent.window_state_file().write_text("[" * 1000, encoding="utf-8")
    window = Window(session)
    qtbot.addWidget(window)
    assert "window.damaged.json" in window.notices.sentences()[0]


def test_preferences_that_could_not_be_read_are_told(qtbot, per_user_folder):
    (per_user_folder / "preferences.toml").write_text("[broken", encoding="utf-8")
    poster = MainThreadQueue()
    session = Session(poster.post, Settings())
    window = Window(session)
    qtbot.addWidget(window)
    assert "preferences.damaged.toml" in window.notices.sentences()[0]
    session.close()
    poster.close()


def test_a_notice_is_told_once_and_goes_when_it_is_acted_on_or_closed(window, qtbot):
    done = []
    for _ in range(2):
        window.notices.show_notice("Look here", "warning", ("Look", lambda: done.append(1)))
    assert window.notices.sentences() == ["Look here"]
    bar = window.notices._bars[0]
    next(button for button in bar.findChildren(QWidget) if getattr(button, "text", str)() == "Look").click()
    assert done == [1] and window.notices.sentences() == []
    window.notices.show_notice("Look here again")
    window.notices._bars[0].closing.click()
    assert window.notices.sentences() == []
    assert not window.notices.isVisible()


def test_what_a_second_start_was_given_is_opened_in_front(window, session, pictures, qtbot):
    window.showMinimized()
    window.come_forward([str(pictures)])
    assert not window.isMinimized()
    qtbot.waitUntil(lambda: len(session.library.images) == 2)


def test_what_is_known_of_a_crash_is_offered_and_can_be_copied(window, qtbot):
    window.report_crash("Fatal Python error: Aborted")
    seen = []

    def look():
        dialog = QApplication.activeModalWidget()
        dialog.copy.click()
        seen.append((dialog.text.toPlainText(), QApplication.clipboard().text()))
        dialog.reject()

    QTimer.singleShot(0, look)
    next(button for button in window.notices.findChildren(QPushButton) if button.text() == "Show details").click()
    assert seen == [("Fatal Python error: Aborted", "Fatal Python error: Aborted")]


def test_an_exception_in_the_middle_of_the_work_is_told_and_kept(window, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda *fault: None)  # pytest-qt's would fail the test, as it should
    net = CrashLog()
    net.notified = window.report_error
    net.install()
    sys.excepthook(RuntimeError, RuntimeError("a fault of ours"), None)
    net.uninstall()
    assert window.notices.sentences() == ["Something went wrong. Your captions are safe."]
    assert "a fault of ours" in CrashLog().last()
