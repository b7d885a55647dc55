"""What an artist does on the images page is what the first epoch of a job for that folder deals."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image
from PySide6.QtCore import QPointF, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QDialogButtonBox, QPushButton
from pytestqt.qtbot import QtBot

from app.core.edits.masks import mask_path
from app.core.session import Session
from app.qt.images.dialogs import FolderDialog
from app.qt.images.finding.filter_box import FilterBox
from app.qt.images.health.cropper import Cropper
from app.qt.images.health.mask_painter import MaskPainter
from app.qt.train.page import TrainPage
from app.qt.window import Window
from tests.support.artist import shown_page
from trainer.config.job import Job
from trainer.config.load import load_job
from trainer.dataset.dataset import read_dataset
from trainer.dataset.sampling import EpochBatches, Sample
from trainer.dataset.sidecar import read_sidecar
from trainer.protocol.queue import Entry

LEFT, KEY = Qt.MouseButton.LeftButton, Qt.Key
NAMES = "abc"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "Bilder für 猫"
    root.mkdir()
    for place, name in enumerate(NAMES):
        Image.linear_gradient("L").rotate(40 * place).resize((400, 320)).convert("RGB").save(root / f"{name}.png")
        (root / f"{name}.txt").write_text(f"cat {name}", encoding="utf-8")
    return root


@pytest.fixture
def opened(window: Window, session: Session, folder: Path, qtbot: QtBot) -> Window:
    window.resize(1280, 900)
    window.activateWindow()
    window.open([folder])
    pictures = session.library.images
    qtbot.waitUntil(lambda: len(session.view.ids) == 3 and all(one.width and one.caption for one in pictures.values()))
    qtbot.waitUntil(lambda: session.health.judge is not None)
    return window


def select(session: Session, *names: str) -> None:
    ids = [one.id for one in session.library.images.values() if one.path.stem in names]
    session.view.select(ids, ids[0])


def saved(session: Session, qtbot: QtBot) -> None:
    session.saver.hurry()
    qtbot.waitUntil(lambda: not any(session.saver.unsaved(one) for one in session.library.images.values()))


def new_job(window: Window, qtbot: QtBot) -> TrainPage:
    """Create a job as the window does when the artist goes to the Train page."""
    window.commands["window.train"].trigger()
    page = shown_page(window, TrainPage)
    qtbot.waitUntil(lambda: page.draft is not None)
    return page


def job_of(page: TrainPage, qtbot: QtBot) -> Job:
    """Return the job as its file has it; only a base is missing, which no test here needs."""
    draft = page.draft
    assert draft is not None
    qtbot.waitUntil(lambda: not draft.file.unsaved)
    return load_job(draft.path, ["base.model=owner/base", "dataset.validation_share=0"])


def first_epoch(job: Job) -> dict[str, list[Sample]]:
    """Return the samples of the first epoch by the stems of their images."""
    recipe = job.recipe.replaced(resolution=job.recipe.resolution or 256)
    pictures = read_dataset(job.dataset, recipe).images
    dealt: dict[str, list[Sample]] = {}
    for batch in EpochBatches(pictures, recipe, 0):
        for sample in batch:
            dealt.setdefault(sample.image.path.stem, []).append(sample)
    return dealt


def trained(window: Window, qtbot: QtBot) -> dict[str, list[Sample]]:
    return first_epoch(job_of(new_job(window, qtbot), qtbot))


def dialog_of(window: Window, kind: type, qtbot: QtBot) -> object:
    qtbot.waitUntil(lambda: any(one.isVisible() for one in window.findChildren(kind)))
    return next(one for one in window.findChildren(kind) if one.isVisible())


def test_a_mask(opened: Window, session: Session, folder: Path, qtbot: QtBot) -> None:
    select(session, "a")
    opened.commands["health.mask"].trigger()
    painter = dialog_of(opened, MaskPainter, qtbot)
    assert isinstance(painter, MaskPainter)
    qtbot.waitUntil(lambda: painter.canvas.painting is not None and painter.canvas.whole is not None)
    qtbot.keyClick(painter, KEY.Key_E)
    start, end = (painter.canvas.at(QPointF(*spot)).toPoint() for spot in ((100, 100), (200, 100)))
    qtbot.mousePress(painter.canvas, LEFT, pos=start)
    qtbot.mouseMove(painter.canvas, end)
    qtbot.mouseRelease(painter.canvas, LEFT, pos=end)
    qtbot.mouseClick(painter.done_button, LEFT)
    mask = mask_path(folder / "a.png")
    qtbot.waitUntil(mask.exists)
    dealt = trained(opened, qtbot)
    (sample,) = dealt["a"]
    assert (sample.image.mask, sample.image.mask_path) == ("file", mask)
    assert sample.image.mask_id == hashlib.sha256(mask.read_bytes()).hexdigest()
    assert dealt["b"][0].image.mask == "none"


def test_a_crop(opened: Window, session: Session, qtbot: QtBot) -> None:
    select(session, "a")
    opened.commands["health.crop"].trigger()
    cropper = dialog_of(opened, Cropper, qtbot)
    assert isinstance(cropper, Cropper)
    qtbot.waitUntil(lambda: cropper.canvas.whole is not None)
    cropper.canvas.setFocus()
    for _ in range(4):
        qtbot.keyClick(cropper.canvas, KEY.Key_Minus)
    cropper.accept()
    picture = session.library.images[session.view.current or 0]
    assert picture.crop is not None
    saved(session, qtbot)
    (sample,) = trained(opened, qtbot)["a"]
    assert sample.image.crop == picture.crop
    left, top, width, height = sample.window
    assert left >= int(picture.crop[0] * 400) and top >= int(picture.crop[1] * 320)
    assert (width, height) < (400, 320)


def test_an_exclusion(opened: Window, session: Session, qtbot: QtBot) -> None:
    select(session, "b")
    opened.commands["images.reject"].trigger()
    saved(session, qtbot)
    assert sorted(trained(opened, qtbot)) == ["a", "c"]


def test_an_edit_made_just_before_start_is_on_disk_when_the_job_is_queued(
    opened: Window, session: Session, folder: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[bool] = []
    put = session.queue.queue.put

    def watched(entry: Entry) -> None:
        queued.append(read_sidecar(folder).of("b.png").excluded)
        put(entry)

    monkeypatch.setattr(session.queue.queue, "put", watched)
    session.queue.queue.hold()  # no engine starts: only the order of writing matters here
    page = new_job(opened, qtbot)
    assert page.draft is not None
    page.draft.set("base.model", "owner/base")
    opened.commands["window.images"].trigger()
    qtbot.waitUntil(opened.images.isVisible)
    select(session, "b")
    opened.commands["images.reject"].trigger()
    page.start()
    qtbot.waitUntil(lambda: bool(queued))
    assert queued == [True]


def type_filter(window: Window, session: Session, qtbot: QtBot) -> None:
    """Show only the first image."""
    field = window.findChild(FilterBox).field  # type: ignore[union-attr]
    field.setFocus()
    QTest.keyClicks(field, "name:a.png")
    qtbot.keyClick(field, KEY.Key_Return)
    qtbot.waitUntil(lambda: len(session.view.ids) == 1)


def test_training_only_what_is_shown(opened: Window, session: Session, qtbot: QtBot) -> None:
    type_filter(opened, session, qtbot)
    opened.commands["images.only_shown"].trigger()
    saved(session, qtbot)
    assert sorted(trained(opened, qtbot)) == ["a"]


@pytest.mark.parametrize("shown_only", [False, True])
def test_a_filter_alone_leaves_out_nothing_and_the_new_job_asks(
    shown_only: bool, opened: Window, session: Session, qtbot: QtBot
) -> None:
    type_filter(opened, session, qtbot)
    page = new_job(opened, qtbot)
    qtbot.waitUntil(lambda: bool(opened.notices.sentences()))
    assert opened.notices.sentences() == ["The filter hides 2 image(s), which training will use anyway."]
    if shown_only:
        qtbot.mouseClick(opened.notices.findChild(QPushButton), LEFT)
        saved(session, qtbot)
    assert sorted(first_epoch(job_of(page, qtbot))) == (["a"] if shown_only else ["a", "b", "c"])


def change_folder(window: Window, qtbot: QtBot, change: Callable[[FolderDialog], None]) -> None:
    window.commands["images.folder"].trigger()
    dialog = dialog_of(window, FolderDialog, qtbot)
    assert isinstance(dialog, FolderDialog)
    change(dialog)
    buttons = dialog.findChild(QDialogButtonBox)
    assert isinstance(buttons, QDialogButtonBox)
    qtbot.mouseClick(buttons.button(QDialogButtonBox.StandardButton.Ok), LEFT)


def marks_saved(session: Session, folder: Path, qtbot: QtBot) -> None:
    session.saver.hurry()
    qtbot.waitUntil((folder / "impasto.jsonl").exists)


def test_repeats_and_trigger_of_a_folder(opened: Window, session: Session, folder: Path, qtbot: QtBot) -> None:
    def change(dialog: FolderDialog) -> None:
        dialog.repeats.setValue(3)
        dialog.trigger.setFocus()
        QTest.keyClicks(dialog.trigger, "zwx")

    select(session, "a")
    change_folder(opened, qtbot, change)
    marks_saved(session, folder, qtbot)
    dealt = trained(opened, qtbot)
    assert {stem: [one.caption for one in samples] for stem, samples in dealt.items()} == {
        name: [f"zwx, cat {name}"] * 3 for name in NAMES
    }


def test_the_kind_of_a_folder(opened: Window, session: Session, folder: Path, tmp_path: Path, qtbot: QtBot) -> None:
    others = tmp_path / "others"
    others.mkdir()
    Image.radial_gradient("L").convert("RGB").save(others / "z.png")
    opened.open([others])
    qtbot.waitUntil(lambda: len(session.library.images) == 4)
    select(session, "z")
    change_folder(opened, qtbot, lambda dialog: dialog.regularization.click())
    marks_saved(session, others, qtbot)
    dealt = trained(opened, qtbot)
    assert {sample.image.kind for sample in dealt["z"]} == {"regularization"}
    assert len(dealt["z"]) == 3  # as often as all others together


def test_each_line_a_caption(opened: Window, session: Session, folder: Path, qtbot: QtBot) -> None:
    select(session, "a")
    editor = opened.images.editor
    editor.text.setFocus()
    qtbot.keyClick(editor.text, KEY.Key_End, Qt.KeyboardModifier.ControlModifier)
    qtbot.keyClick(editor.text, KEY.Key_Return)
    QTest.keyClicks(editor.text, "tom")
    qtbot.waitUntil(editor.variants.isVisible)
    editor.variants.click()
    assert session.target.target.lines == "variants"
    saved(session, qtbot)
    (sample,) = trained(opened, qtbot)["a"]
    assert sample.image.captions == ("cat a", "tom")
    assert sample.caption in ("cat a", "tom")


def test_the_token_limit(opened: Window, session: Session, qtbot: QtBot) -> None:
    select(session, "a")
    editor = opened.images.editor
    qtbot.keyClick(editor.limit, KEY.Key_Down)
    assert job_of(new_job(opened, qtbot), qtbot).recipe.token_chunks == 150


def choose_resolution(window: Window, side: int) -> None:
    menu = window.images.health_panel.resolution.menu()
    next(act for act in menu.actions() if str(side) in act.text()).trigger()


def test_the_resolution(opened: Window, session: Session, qtbot: QtBot) -> None:
    choose_resolution(opened, 512)
    job = job_of(new_job(opened, qtbot), qtbot)
    assert job.recipe.resolution == 512
    assert {sample.image.bucket for (sample,) in first_epoch(job).values()} == {(448, 384)}


def shown_on_the_page(window: Window) -> Sequence[object]:
    panel, editor = window.images.health_panel, window.images.editor
    return panel.resolution.text(), editor.limit.currentText()


def test_the_page_shows_and_changes_what_the_job_of_the_folder_says(
    opened: Window, session: Session, qtbot: QtBot
) -> None:
    select(session, "a")
    page = new_job(opened, qtbot)
    draft = page.draft
    assert draft is not None
    qtbot.waitUntil(lambda: session.target.job == "Bilder für 猫")
    draft.set("base.family", "sd15")
    assert shown_on_the_page(opened) == ("Training at 512 px", "75")
    draft.set("recipe.resolution", 768)
    draft.set("recipe.token_chunks", 225)
    assert shown_on_the_page(opened) == ("Training at 768 px", "225")
    assert "Bilder für 猫" in opened.images.health_panel.resolution.toolTip()
    choose_resolution(opened, 1024)
    assert draft.get("recipe.resolution") == 1024
    page.new()  # another one for the same images starts with what the page shows
    qtbot.waitUntil(lambda: page.draft is not draft)
    assert page.draft is not None and page.draft.get("recipe.resolution") == 1024
    assert page.draft.get("recipe.token_chunks") == 225


def test_a_job_of_other_folders_has_no_say(opened: Window, session: Session, tmp_path: Path, qtbot: QtBot) -> None:
    page = new_job(opened, qtbot)
    assert page.draft is not None
    page.draft.set("dataset.folders.0.path", str(tmp_path / "elsewhere"))
    page.draft.set("recipe.resolution", 768)
    qtbot.waitUntil(lambda: session.target.job == "")
    assert shown_on_the_page(opened)[0] == "Training at 1024 px"


def test_a_recipe_leaves_what_was_chosen_for_the_images(opened: Window, session: Session, qtbot: QtBot) -> None:
    choose_resolution(opened, 768)
    page = new_job(opened, qtbot)
    assert page.draft is not None
    page.draft.set("base.family", "sdxl")
    qtbot.waitUntil(lambda: bool(page.sheet.essentials.cards.cards))
    qtbot.mouseClick(page.sheet.essentials.cards.cards[0], LEFT)
    assert page.draft.get("preset") == "sdxl/character"
    assert page.draft.get("recipe.resolution") == 768
