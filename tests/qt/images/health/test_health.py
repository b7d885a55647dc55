"""Problems and charts through clicks and keys, over real files and a real session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QAbstractItemModelTester

from app.qt.actions.commands import Commands
from app.qt.images.health.cropper import Cropper
from app.qt.images.health.mask_painter import MaskPainter
from app.qt.images.health.panel import HealthPanel
from tests.support.images import photograph
from tests.support.processes import no_process_starts

KEY = Qt.Key
CAPTIONS = {"a": "cat, x", "b": "cat, dog", "c": None, "d": "word " * 90, "e": "cat"}
PHOTOS = ["astronaut.png", "coffee.png", "chelsea.png", "camera.png", "moon.png"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "bilder ä"
    root.mkdir()
    for (name, caption), photo in zip(CAPTIONS.items(), PHOTOS, strict=True):
        photograph(photo).resize((512, 512)).save(root / f"{name}.png")
        if caption:
            (root / f"{name}.txt").write_text(caption, encoding="utf-8")
    for suffix in (".png", ".txt"):
        shutil.copy(root / f"e{suffix}", root / f"e copy{suffix}")
    Image.new("RGB", (1536, 128), "teal").save(root / "wide.png")
    (root / "wide.txt").write_bytes("café".encode("cp1252"))
    return root


@pytest.fixture
def panel(qtbot, session, folder):
    preferences = session.settings.preferences
    judging = preferences.judging.model_copy(update={"resolution": 512})
    session.settings.change(preferences.model_copy(update={"judging": judging}))
    panel = HealthPanel(session, Commands())
    panel.resize(340, 500)
    qtbot.addWidget(panel)
    QAbstractItemModelTester(panel.list.findings, QAbstractItemModelTester.FailureReportingMode.Fatal)
    with qtbot.waitExposed(panel):
        panel.show()
    session.datasets.open(folder)
    qtbot.waitUntil(lambda: settled(session, 7))
    return panel


def settled(session, pictures):
    state, health = session.health.current_progress(), session.health
    idle = not state.judging and not state.inspecting and not health._report_scheduled
    return state.total == pictures and health.judge and idle and "duplicate.exact" in codes(health)


def codes(health):
    return {one.code for one in health.current_findings}


def choose(qtbot, panel, code):
    place = panel.list.findings.index_of(code)
    assert place.isValid()
    panel.list.scrollTo(place)
    spot = panel.list.visualRect(place).center()
    qtbot.mouseClick(panel.list.viewport(), Qt.MouseButton.LeftButton, pos=spot)


def shown(session):
    return sorted(session.library.images[number].name for number in session.view.ids)


def test_where_pictures_could_not_be_looked_at_a_click_tries_again(qtbot, session, panel, folder):
    with no_process_starts():
        photograph("rocket.jpg").resize((512, 512)).save(folder / "new.png")
        session.datasets.refresh(whole=True)
        qtbot.waitUntil(lambda: "image.no_process" in codes(session.health))
    choose(qtbot, panel, "image.no_process")
    assert panel.fix_button.text() == "Try again" and panel.fix_button.isVisible()
    qtbot.mouseClick(panel.fix_button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: settled(session, 8) and "image.no_process" not in codes(session.health))
    assert all(picture.content for picture in session.library.images.values())


def test_a_click_on_a_problem_shows_its_pictures(qtbot, session, panel):
    findings = session.health.current_findings
    assert panel.problems.text() == f"Problems ({sum(one.severity != 'info' for one in findings)})"
    choose(qtbot, panel, "caption.missing")
    assert shown(session) == ["c.png"]
    assert session.filtering.text == "problem:caption.missing"
    assert panel.remedy.text()


def test_enter_shows_the_pictures_of_the_row_that_keys_reached(qtbot, session, panel):
    panel.list.setFocus()
    qtbot.keyClick(panel.list, KEY.Key_Home)
    while panel.list.finding.code != "duplicate.exact":
        qtbot.keyClick(panel.list, KEY.Key_Down)
    assert len(session.view.ids) == 7
    qtbot.keyClick(panel.list, KEY.Key_Return)
    assert shown(session) == ["e copy.png", "e.png"]


def test_the_button_mends_and_undo_brings_it_back(qtbot, session, panel):
    choose(qtbot, panel, "duplicate.exact")
    assert panel.fix_button.text() == "Keep the best image of each group"
    with qtbot.waitSignal(panel.message_shown) as said:
        qtbot.mouseClick(panel.fix_button, Qt.MouseButton.LeftButton)
    assert said.args == ["Exclude 1 image"]
    qtbot.waitUntil(lambda: "duplicate.exact" not in codes(session.health))
    session.history.undo()
    qtbot.waitUntil(lambda: "duplicate.exact" in codes(session.health))


def test_a_single_letter_is_removed_from_the_file(qtbot, session, panel, folder):
    choose(qtbot, panel, "tag.one_letter")
    qtbot.mouseClick(panel.fix_button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: "tag.one_letter" not in codes(session.health))
    session.saver.flush()
    assert (folder / "a.txt").read_text(encoding="utf-8") == "cat"


def test_a_caption_is_written_as_utf_8_and_kept_as_it_was(qtbot, session, panel, folder):
    choose(qtbot, panel, "caption.cp1252")
    assert panel.fix_button.text() == "Convert to UTF-8"
    qtbot.mouseClick(panel.fix_button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: "caption.cp1252" not in codes(session.health))
    assert (folder / "wide.txt").read_bytes() == "café".encode()
    (kept,) = session.backups.versions(str(folder), "wide.txt")
    assert kept.data == "café".encode("cp1252")


def test_what_is_mended_by_hand_leads_there(qtbot, session, panel):
    choose(qtbot, panel, "image.cropped")
    qtbot.mouseClick(panel.fix_button, Qt.MouseButton.LeftButton)
    (cropper,) = panel.findChildren(Cropper)
    assert cropper.isVisible()
    assert [session.library.images[number].name for number in cropper._ids] == ["wide.png"]
    cropper.accept()


def test_keys_open_crops_and_masks_of_what_is_selected(qtbot, session, panel):
    ids = sorted(session.library.images)[1:3]
    session.view.select(ids, ids[1])
    for key, kind in ((KEY.Key_K, Cropper), (KEY.Key_M, MaskPainter)):
        panel.activateWindow()
        qtbot.waitUntil(panel.isActiveWindow)
        for command in panel.actions():
            command.refresh()  # the window does so when another picture is selected
        qtbot.keyClick(panel, key)
        (place,) = panel.findChildren(kind)
        assert place._ids == ids
        assert place.image.id == ids[1]
        qtbot.waitUntil(lambda: not getattr(place, "busy", False))  # noqa: B023 (asked at once)
        place.accept()
        qtbot.waitUntil(lambda: not panel.findChildren(kind))  # noqa: B023


def test_another_resolution_is_judged_at_once_and_remembered(qtbot, session, panel):
    assert "image.small" not in codes(session.health) or len(of(session, "image.small")) < 6
    panel.set_resolution(1024)
    qtbot.waitUntil(lambda: len(of(session, "image.small")) >= 6)
    assert panel.resolution.text() == "Training at 1024 px"
    assert session.settings.preferences.judging.resolution == 1024


def of(session, code):
    return next((one.ids for one in session.health.current_findings if one.code == code), ())


def test_bars_select_their_pictures_by_mouse_and_keys(qtbot, session, panel):
    qtbot.mouseClick(panel.figures, Qt.MouseButton.LeftButton)
    rows = panel.charts.buckets
    qtbot.waitUntil(lambda: len(rows.bars) == 2)
    assert [bar.label for bar in rows.bars] == ["1024 × 128", "512 × 512"]
    assert [bar.images for bar in rows.bars] == [1, 6]
    middle = rows.parts()[0][0].center().toPoint()
    qtbot.mouseClick(rows, Qt.MouseButton.LeftButton, pos=middle)
    assert [session.library.images[number].name for number in session.view.selected] == ["wide.png"]
    rows.setFocus()
    qtbot.keyClick(rows, KEY.Key_Down)
    assert rows.accessibleDescription().startswith("512 × 512: 6")
    qtbot.keyClick(rows, KEY.Key_Return)
    assert len(session.view.selected) == 6


def test_the_other_charts_show_all_pictures(qtbot, session, panel):
    panel.figures.click()
    charts = panel.charts
    charts.choice.setCurrentIndex(1)
    assert sum(len(cell.ids) for cell in charts.sizes.cells) == 7
    charts.choice.setCurrentIndex(2)
    assert sum(bar.images for bar in charts.lengths.bars) == 7
    (long,) = [bar for bar in charts.lengths.bars if bar.value >= 75 and bar.images]
    assert {session.library.images[number].name for number in long.ids} == {"d.png"}
    charts.choice.setCurrentIndex(3)
    session.health.refresh()
    qtbot.waitUntil(lambda: bool(charts.tags.bars) and charts.tags.bars[0].label == "cat")
    assert charts.tags.bars[0].images == 4
    charts.tags.choose(0)
    assert len(session.view.selected) == 4
    assert charts.sizes.part_at(QPoint(-5, -5)) == -1


def test_bars_select_what_a_filter_hides_too(qtbot, session, panel):
    session.filtering.apply("tag:dog")
    panel.select(frozenset(session.library.images))
    assert len(session.view.ids) == 7
    assert len(session.view.selected) == 7


def test_without_pictures_it_says_what_to_do(qtbot, session):
    panel = HealthPanel(session, Commands())
    qtbot.addWidget(panel)
    panel.show()
    assert panel.empty_label.isVisible()
    assert "Open a folder" in panel.empty_label.text()


def test_all_is_well(qtbot, session, tmp_path):
    for name, photo in zip("ab", PHOTOS, strict=False):
        photograph(photo).resize((1024, 1024)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("cat", encoding="utf-8")
    panel = HealthPanel(session, Commands())
    qtbot.addWidget(panel)
    panel.show()
    session.datasets.open(tmp_path)
    qtbot.waitUntil(lambda: panel.empty_label.isVisible() and "No problems found. " in panel.empty_label.text())
    assert not panel.bar.isVisible()


def test_a_damaged_picture_is_named_shortly_and_its_tip_says_where_it_lies(qtbot, session, panel, folder):
    (folder / "10_cat").mkdir()
    broken = folder / "10_cat" / "broken.png"
    broken.write_bytes(b"no picture")
    session.datasets.refresh(whole=True)
    qtbot.waitUntil(lambda: "image.unusable" in codes(session.health))
    place = panel.list.findings.index_of("image.unusable")
    assert place.data().startswith(f"{Path('10_cat', 'broken.png')} is not an image")
    assert place.data(Qt.ItemDataRole.ToolTipRole).startswith(f"{broken}\n")


def test_a_caption_without_a_picture_is_named_and_a_click_filters_nothing(qtbot, session, panel, folder):
    (folder / "lost.txt").write_text("a cat", encoding="utf-8")
    session.datasets.refresh(whole=True)
    qtbot.waitUntil(lambda: "caption.orphan" in codes(session.health))
    choose(qtbot, panel, "caption.orphan")
    assert panel.list.finding.sentence.endswith("but match no image's name: lost.txt.")
    assert panel.list.currentIndex().data(Qt.ItemDataRole.ToolTipRole).startswith(str(folder / "lost.txt"))
    assert panel.remedy.text().startswith("Rename them if they belong") and panel.remedy.isVisible()
    assert len(session.view.ids) == 7
    session.datasets.close(folder)
    qtbot.waitUntil(lambda: "caption.orphan" not in codes(session.health))
