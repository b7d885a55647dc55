"""What comes after a run, in the window: candidates, a picture by the real engine, a grid, an export."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from PySide6.QtCore import QLocale, Qt
from PySide6.QtWidgets import QInputDialog, QScrollArea
from shiboken6 import delete

from app.core.models.verdict import Destination
from app.core.runs.queue import QueueState
from app.qt.actions.commands import Commands
from app.qt.runs.after.export import ExportDialog, ModelCardDialog
from app.qt.runs.after.grid_dialog import GridDialog
from app.qt.runs.after.panel import AfterPanel
from app.qt.runs.after.strip import ImageView
from tests.support.drafts import opened
from tests.support.finished import DEMO, PROMPTS, write_finished_run
from trainer.files.header import read_header
from trainer.protocol.queue import Entry, QueueSnapshot


@pytest.fixture
def run(session, tmp_path):
    shutil.copytree(DEMO / "pictures", tmp_path / "pictures")
    return session.runs.open(write_finished_run(tmp_path / "runs", tmp_path / "pictures").path)


@pytest.fixture
def panel(session, run, qtbot):
    panel = AfterPanel(session, Commands())
    qtbot.addWidget(panel)
    panel.resize(1000, 760)
    with qtbot.waitExposed(panel):
        panel.show()
    panel.show_run(run)
    run.read()
    qtbot.waitUntil(lambda: len(panel.strip.candidates.all) == 3 and panel.has_job())
    return panel


def test_a_picture_that_comes_when_its_place_is_gone_is_let_go(session, qtbot):
    gone, there = ImageView(session, "nothing"), ImageView(session, "nothing")
    qtbot.addWidget(there)
    for place in (gone, there):
        place.show_file(next((DEMO / "pictures").glob("*.png")))
    delete(gone)
    qtbot.waitUntil(lambda: there.shows)  # read last


def pixels(file):
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))


def test_a_moving_average_is_called_so_where_it_is_chosen_and_tried(panel):
    strip = panel.strip
    *others, last = strip.candidates.all
    strip.show_candidates([*others, replace(last, ema=True)], 0)
    assert [strip.candidates.title(one) for one in strip.candidates.all] == ["Step 100", "Step 200", "Step 300 (EMA)"]
    assert panel.trying.lora.text() == "Step 200"
    strip.choose(2)
    assert panel.trying.lora.text() == "Step 300 (EMA)"


def test_candidates_stand_side_by_side_with_the_best_marked_and_chosen(panel, qtbot):
    found = panel.strip.candidates
    assert [found.title(one) for one in found.all] == ["Step 100", "Step 200", "Step 300"]
    assert [found.mark(one) for one in found.all] == ["", "Best", "Last"]
    assert panel.strip.current().step == 200
    words = found.data(found.index(1), Qt.ItemDataRole.AccessibleTextRole)
    assert words == "Step 200, val. loss 0.0832, Best, neon-step000200.safetensors"
    qtbot.waitUntil(lambda: all(found.image(one) is not None for one in found.all))
    first = found.image(found.all[0]).copy()
    panel.prompt_box.setCurrentIndex(1)
    qtbot.waitUntil(lambda: found.image(found.all[0]) is not None)
    assert found.image(found.all[0]) != first and panel.strip.current().step == 200
    panel.choose(300)
    assert panel.strip.current().file.name == "neon.safetensors"
    panel.strip.setMaximumWidth(200)
    place = panel.strip.candidates.index(2)
    qtbot.waitUntil(lambda: panel.strip.viewport().rect().intersected(panel.strip.visualRect(place)).width() > 140)


def test_while_nobody_chose_the_best_is_chosen_also_when_it_becomes_another(panel):
    strip = panel.strip
    first, second, last = strip.candidates.all
    other = [replace(first, best=True), replace(second, best=False), last]
    strip.show_candidates(other, 0)
    assert strip.current().step == 100
    for choose in (
        lambda: panel.choose(100),
        lambda: strip.clicked.emit(strip.candidates.index(0)),
    ):
        strip.show_candidates([], 0)
        strip.show_candidates(other, 0)
        choose()
        strip.show_candidates([first, second, last], 0)
        assert strip.current().step == 100, "it was chosen"
    strip.show_candidates([second, last], 0)
    assert strip.current().step == 200, "what was chosen is gone"


def test_in_a_narrow_window_nothing_is_out_of_sight_to_the_right(panel, qtbot):
    panel.resize(590, 500)  # what the page leaves of 960 pixels
    area = panel.findChild(QScrollArea)
    qtbot.waitUntil(lambda: area.viewport().width() < 600)
    assert area.widget().minimumSizeHint().width() <= area.viewport().width()


def test_what_lies_in_a_folder_that_is_gone_is_not_said_to_be_nothing(panel, run, qtbot):
    away = run.directory.path.with_name("away")
    run.directory.path.rename(away)
    run.read()
    qtbot.waitUntil(lambda: not panel.strip.candidates.all)
    assert panel.empty.text() == "The files that this run saved cannot be read now."
    away.rename(run.directory.path)
    run.read()
    qtbot.waitUntil(lambda: len(panel.strip.candidates.all) == 3)


def test_a_prompt_is_tried_out_and_a_grid_is_drawn_and_taken_from(panel, run, session, qtbot):
    box = panel.trying
    assert box.prompt.toPlainText() == PROMPTS[0] and box.width_box.value() == 128
    box.prompt.setPlainText("a green tree")
    qtbot.mouseClick(box.render_button, Qt.MouseButton.LeftButton)
    assert box.is_drawing() and box.cancel_button.isVisible()
    qtbot.waitUntil(lambda: box.image.shows)
    qtbot.waitUntil(lambda: box.drawing.stage == "done")
    assert not box.progress.isVisible()
    with Image.open(box.image.file) as picture:
        drawn = json.loads(picture.text["impasto"])
    assert drawn["prompt"] == "a green tree" and drawn["loras"] == ["neon-step000200.safetensors:1"]
    assert box.image.file.parent == run.directory.path / "tries"

    panel.show_grid()
    dialog = panel.dialog
    assert isinstance(dialog, GridDialog) and [one.step for one in dialog.chosen()] == [200, 300]
    assert dialog.steps.currentRow() == 1
    dialog.strengths.setText("1, x")
    assert not dialog.render_button.isEnabled() and "numbers" in dialog.count.text()
    dialog.strengths.setText("0,8, 1")
    assert dialog.chosen_strengths() == [0, 8, 1]
    language = QLocale()
    QLocale.setDefault(QLocale("de"))
    german = dialog.chosen_strengths()
    QLocale.setDefault(language)
    assert german == [0.8, 1]
    dialog.strengths.setText("0, 1")
    dialog.prompts.setPlainText("a green tree\na red star")
    assert dialog.count.text() == "8 images, all with seed 1."
    qtbot.mouseClick(dialog.render_button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: dialog.drawing.is_over)
    assert dialog.drawing.stage == "done"
    qtbot.waitUntil(lambda: all(dialog.table.item(row, column) for row in range(2) for column in range(4)))
    cells = {number: pixels(file) for number, file in dialog.drawing.files.items()}
    at = {(column, row): cells[2 * column + row] for column in range(4) for row in range(2)}
    assert np.array_equal(at[1, 0], pixels(box.image.file)), "the cell of step 200 at 1 is what was tried out"
    assert np.array_equal(at[0, 0], at[2, 0]), "at 0 every step is the base"
    assert not np.array_equal(at[1, 0], at[3, 0]) and not np.array_equal(at[1, 0], at[0, 0])
    assert box.prompt_settings()["weights"] is None
    box.weights.click()
    assert box.prompt_settings()["weights"] is True
    box.weights.click()

    dialog.table.setCurrentCell(1, 3)
    qtbot.mouseClick(dialog.pick_button, Qt.MouseButton.LeftButton)
    assert panel.strip.current().step == 300 and box.strength.value() == 1.0

    box.prompt.setPlainText("another")
    box.start_rendering()
    qtbot.mouseClick(box.cancel_button, Qt.MouseButton.LeftButton)
    assert box.drawing.stage == "cancelled" and not box.cancel_button.isVisible()

    box.start_rendering()
    session.renderer.make_way(queued(WAITING))
    assert box.is_drawing(), "on the CPU there is room for both"
    with qtbot.waitSignal(panel.failed) as failed:
        session.renderer._served._process.kill()
    assert failed.args[0].code == "render.ended" and not box.is_drawing() and box.render_button.isEnabled()


WAITING = Entry("00000000", None, None, "waiting")


def queued(entry, *, held=False, working=True):
    return QueueState(QueueSnapshot((entry,), held=held), working=working)


def test_a_training_that_waits_takes_the_card(panel, session, qtbot):
    """The process that draws is ended: even without a base it would hold some of the card."""
    panel.trying.start_rendering()
    process = session.renderer._served._process
    for free in (
        queued(Entry("00000000", None, None, "running")),
        queued(Entry("00000000", None, None, "waiting", after=9e9)),
        queued(WAITING, held=True),
        queued(WAITING, working=False),
    ):
        session.renderer.make_way(free)
        assert panel.is_drawing()
    with qtbot.waitSignal(panel.failed) as failed:
        session.renderer.make_way(queued(WAITING))
    assert failed.args[0].code == "render.way" and not panel.is_drawing()
    assert process.wait(60) != 0


def test_what_was_written_stays_when_the_run_goes_on_and_begins_anew_with_another(panel, run, session, tmp_path):
    box = panel.trying
    box.prompt.setPlainText("my own")
    box.show_job(run.job.model_copy(update={"name": "longer"}), run.directory.path / "tries")
    assert box.prompt.toPlainText() == "my own"
    box.show_job(run.job, tmp_path)
    assert box.prompt.toPlainText() == PROMPTS[0]


def test_a_picture_goes_out_only_with_what_it_was_drawn_with(panel, session, qtbot, tmp_path):
    box, (first, second) = panel.trying, panel.strip.candidates.all[-2:]
    bare, drawn = [replace(one, images={}) for one in (first, second)], first.images[0]
    panel.choose(first.step)
    box.start_rendering()
    asked = box.drawing
    session.renderer._on_answered({"id": session.renderer._number, "state": "rendered", "image": 0, "file": str(drawn)})
    assert panel._image(bare[0]) == drawn and panel._image(bare[1]) is None
    box.show_job(panel._run.job, tmp_path)  # another run is looked at
    assert asked.stage == "cancelled" and box.image.file is None and panel._image(bare[0]) is None


def test_one_click_exports_to_a_program_and_asks_before_it_replaces(panel, session, qtbot, tmp_path, monkeypatch):
    comfy = Destination("ComfyUI", tmp_path / "ComfyUI" / "models" / "loras")
    monkeypatch.setattr(session.models, "destinations", lambda: [comfy])
    session.models.changed.emit(None)
    assert panel.send_button.text() == "Export to ComfyUI"
    with qtbot.waitSignal(panel.notified) as told:
        qtbot.mouseClick(panel.send_button, Qt.MouseButton.LeftButton)
    assert told.args[1] == "info"
    made = comfy.folder / "neon-step000200.safetensors"
    assert read_header(made, "lora").metadata["modelspec.thumbnail"].startswith("data:image/jpeg;base64,")
    assert np.array_equal(pixels(made.with_suffix(".png")), pixels(panel.strip.current().images[0]))
    made.write_bytes(b"another")
    with qtbot.waitSignal(panel.notified) as told:
        panel.send()
    sentence, kind, (title, replace) = told.args
    assert "already" in sentence and (kind, title) == ("warning", "Replace") and made.read_bytes() == b"another"
    with qtbot.waitSignal(panel.notified):
        replace()
    assert read_header(made, "lora").metadata["modelspec.title"] == "neon"


def test_the_export_dialog_takes_what_the_file_says_and_remembers_a_folder(panel, session, qtbot, tmp_path):
    panel.ask_export()
    qtbot.waitUntil(lambda: isinstance(panel.dialog, ExportDialog))
    dialog = panel.dialog
    assert (dialog.name.text(), dialog.title.text(), dialog.triggers.text()) == ("neon-step000200", "neon", "neontube")
    while dialog.folder_box.count():
        dialog.folder_box.removeItem(0)
    assert not dialog.export_button.isEnabled()
    dialog.add_folder(tmp_path / "Lora é")
    dialog.name.setText("glow")
    dialog.author.setText("<b>me</b>")
    dialog.license.setCurrentText("CC0-1.0")
    with qtbot.waitSignal(panel.notified):
        qtbot.mouseClick(dialog.export_button, Qt.MouseButton.LeftButton)
    said = read_header(tmp_path / "Lora é" / "glow.safetensors", "lora").metadata
    assert (said["modelspec.author"], said["modelspec.license"], said["ss_output_name"]) == (
        "<b>me</b>",
        "CC0-1.0",
        "glow",
    )
    assert session.models.destinations()[0].folder == tmp_path / "Lora é"
    assert panel.send_button.text() == "Export to Lora é"


def test_it_is_trained_longer_and_begun_anew(panel, session, run, qtbot, monkeypatch):
    asked = []
    monkeypatch.setattr(session.queue, "resume", lambda path, steps=None: asked.append((path, steps)))
    panel.ask_longer()
    assert isinstance(panel.dialog, QInputDialog) and panel.dialog.intValue() == 450
    panel.dialog.accept()
    assert asked == [(run.directory.path, 450)]
    went = []
    session.navigator.job.connect(went.append)
    panel.begin_again()
    qtbot.waitUntil(lambda: bool(went))
    draft = opened(went[0], session.tasks)
    assert draft.job and draft.job.recipe.steps == 300 and "fit" not in draft.values


def test_captions_that_were_edited_since_are_told_and_the_card_says_what_was_learned(panel, run, qtbot, tmp_path):
    assert not panel.edited_bar.isVisible()
    panel.show_run(None)
    (tmp_path / "pictures" / "neon-01.txt").write_text("something else", encoding="utf-8")
    panel.show_run(run)
    qtbot.waitUntil(panel.edited_bar.isVisible)
    assert "captions changed: 1" in panel.edited_words.text()
    (tmp_path / "pictures" / "neon-02.txt").unlink()
    panel.hide()
    panel.show()
    qtbot.waitUntil(lambda: "captions changed: 2" in panel.edited_words.text())
    qtbot.waitUntil(lambda: panel.strip.current() is not None)
    panel.show_model_card()
    qtbot.waitUntil(lambda: isinstance(panel.dialog, ModelCardDialog))
    text = panel.dialog.text.toPlainText()
    assert text.startswith("# neon\n") and "| Validation loss | 0.0832 |" in text and "| Images | 18 |" in text
    with qtbot.waitSignal(panel.dialog.message_shown):
        panel.dialog.save(tmp_path / "card.md")
    assert (tmp_path / "card.md").read_text(encoding="utf-8") == text
    panel.dialog.close()
