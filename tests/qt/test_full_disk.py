"""A disk that is full while the window writes: it says so, keeps what was typed, and writes it when there is room."""

import pytest
from PySide6.QtCore import Qt

from app.core.jobs.job_file import read_values
from app.core.query.filtering import SavedFilter
from app.core.settings.preferences import Appearance, Preferences, Settings
from app.qt.train.page import TrainPage
from tests.support.full_disk import full_disk, needs_limits
from tests.support.jobs import photographs
from tests.support.train_page import on_disk, row_of, shown, type_into

pytestmark = needs_limits


@pytest.fixture
def page(window, session, qtbot, tmp_path) -> TrainPage:
    session.datasets.open(photographs(tmp_path / "katzen ü", 3))
    qtbot.waitUntil(lambda: len(session.library.images) == 3)
    page = shown(window, qtbot)
    page.sheet.essentials.base.chosen.emit("owner/name")
    qtbot.mouseClick(page.sheet.essentials.cards.cards[0], Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: not page.draft.file.unsaved)
    page._timer.stop()  # the test looks when it wants to
    return page


def test_a_job_is_told_to_be_unsaved_once_and_saved_by_itself_when_there_is_room(window, page, qtbot):
    failed = []
    page.failed.connect(failed.append)
    before = page.draft.path.read_bytes()
    with full_disk():
        type_into(qtbot, row_of(page, "recipe.rank").editor, "77")
        qtbot.waitUntil(lambda: bool(window.notices.sentences()))
        (sentence,) = window.notices.sentences()
        assert "the disk is full" in sentence and "saved as soon as possible" in sentence
        assert page.sheet.state.text() == "Not saved"
        told = len(failed)
        page._check_disk()
        qtbot.waitUntil(lambda: page.draft.file._writing is None)
        assert len(failed) == told  # a notice that was closed does not come again every two seconds
        window.show_images()
        window.show_train()
        assert page.sheet.state.text() == "Not saved"
    assert (page.draft.get("recipe.rank"), page.draft.path.read_bytes()) == (77, before)
    page._check_disk()
    qtbot.waitUntil(lambda: on_disk(page)["recipe"].get("rank") == 77)
    qtbot.waitUntil(lambda: window.notices.sentences() == [])
    assert page.sheet.state.text() == "All changes saved"
    assert not list(page.draft.path.parent.glob("*.tmp"))


def test_a_job_is_saved_by_itself_although_another_page_is_shown(window, page, qtbot):
    with full_disk():
        type_into(qtbot, row_of(page, "recipe.rank").editor, "77")
        qtbot.waitUntil(lambda: bool(window.notices.sentences()))
        page._timer.start(1)
        window.show_images()
    qtbot.waitUntil(lambda: on_disk(page)["recipe"].get("rank") == 77)
    qtbot.waitUntil(lambda: window.notices.sentences() == [])
    qtbot.waitUntil(lambda: not page._timer.isActive())  # then nobody looks at the disk for a page out of sight


def test_a_notice_goes_when_its_job_is_saved_while_another_is_shown(window, page, session, qtbot):
    first, copies = page.draft, []
    session.jobs.duplicate(first.path, copies.append, page.failed.emit)
    qtbot.waitUntil(lambda: bool(copies))
    with full_disk():
        type_into(qtbot, row_of(page, "recipe.rank").editor, "77")
        qtbot.waitUntil(lambda: bool(window.notices.sentences()))
    page.show_job(*copies)
    qtbot.waitUntil(lambda: page.draft is not first and not first.file.unsaved)
    assert read_values(first.path)["recipe"]["rank"] == 77
    assert window.notices.sentences() == []


def test_a_job_that_cannot_be_saved_or_queued_is_not_started_and_can_be_when_there_is_room(
    window, page, session, qtbot, monkeypatch
):
    launched = []
    monkeypatch.setattr(
        "app.core.runs.queue.launch", lambda *words: launched.append(words)
    )  # no training: the queue is real
    session.jobs.agree_to_cpu(page.draft.path)  # it would take days
    assert page.start_button.isEnabled()
    with full_disk():
        qtbot.mouseClick(page.start_button, Qt.MouseButton.LeftButton)
        qtbot.waitUntil(lambda: any("queue" in sentence for sentence in window.notices.sentences()))
        assert "the disk is full" in window.notices.sentences()[-1]
        assert page.start_button.isEnabled()
        page.draft.set("recipe.rank", 77)
        qtbot.mouseClick(page.start_button, Qt.MouseButton.LeftButton)
        qtbot.waitUntil(page.start_button.isEnabled)
        assert any("job.toml" in sentence for sentence in window.notices.sentences())
    assert session.queue.queue.read().entries == () and launched == []
    qtbot.mouseClick(page.start_button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: bool(launched))
    (entry,) = session.queue.queue.read().entries
    assert entry.job == page.draft.path
    assert on_disk(page)["recipe"]["rank"] == 77


def test_preferences_hold_and_are_kept_when_the_app_ends_with_room_again(qtbot, window, session):
    dark = Preferences(appearance=Appearance(look="dark"))
    with full_disk():
        session.settings.change(dark)
        qtbot.waitUntil(lambda: bool(window.notices.sentences()))
        assert "the disk is full" in window.notices.sentences()[-1]
        session.settings.file.settle()  # an end without room: nothing is kept, and nothing breaks
        assert Settings().preferences == Preferences()
    assert session.settings.preferences == dark
    session.close()
    assert Settings().preferences == dark


def test_what_cannot_be_kept_is_told_until_there_is_room_again(qtbot, window, session):
    with full_disk():
        session.settings.change(Preferences(appearance=Appearance(look="dark")))
        session.filters.save(SavedFilter("Dogs", "tag:dog"))
        qtbot.waitUntil(lambda: len(window.notices.sentences()) == 2)
        assert all("the disk is full" in sentence for sentence in window.notices.sentences())
    session.settings.set_checks(tokens=150)
    qtbot.waitUntil(lambda: ["saved filters" in sentence for sentence in window.notices.sentences()] == [True])
    session.filters.remember("tag:cat")
    qtbot.waitUntil(lambda: window.notices.sentences() == [])
