"""LoRA files dropped on the window: what is shown, what is refused, and the recipe that is made of one."""

import math

import pytest
from PySide6.QtCore import Qt

from app.core.loras.strength import BlockStrength
from app.qt.lora_viewer import LoraViewer, block_rows
from app.qt.presets.page import PresetsPage
from tests.qt.presets.test_presets import wait
from tests.qt.test_window import drop
from tests.support.artist import shown_page
from tests.support.screens_share import some_lora
from tests.unit.app.core.loras.test_loras import HOSTILE
from tests.unit.config.presets.test_lora import FOLDER, SD15, lora
from trainer.config.presets import library


def viewer_of(window, qtbot) -> LoraViewer:
    wait(qtbot, lambda: bool(window.findChildren(LoraViewer)))
    viewer = window.findChildren(LoraViewer)[-1]
    qtbot.addWidget(viewer)
    return viewer


def test_a_dropped_lora_is_shown(window, qtbot, tmp_path):
    drop(window, some_lora(tmp_path))
    viewer = viewer_of(window, qtbot)
    wait(qtbot, lambda: bool(viewer.blocks.lines.rows) and not viewer.state.isVisible())
    assert viewer.title.text() == "Soft gouache"
    assert viewer.facts.text().startswith("LoRA · SDXL · rank 16 · ")
    assert viewer.words.text() == "Trigger words: gch"
    assert not viewer.image.pixmap().isNull()
    rows = viewer.blocks.lines.rows
    assert [row.texts[0] for row in rows][:3] == ["TE1", "IN04", "IN05"]
    assert all(row.texts[2:5] == ("1", "16", "8") for row in rows)
    assert max(row.bar for row in rows) == 1.0
    assert [row.texts for row in viewer.tags.lines.rows][:2] == [("gch", "60"), ("landscape", "41")]
    assert ("Optimizer", "AdamW8bit") in [row.texts for row in viewer.settings.lines.rows]
    qtbot.keyClick(viewer, Qt.Key.Key_Escape)
    wait(qtbot, lambda: not window.findChildren(LoraViewer))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_in_words(kind, window, qtbot, tmp_path):
    path = tmp_path / "a.safetensors"
    HOSTILE[kind](path)
    window.session.navigator.lora.emit(path)
    viewer = viewer_of(window, qtbot)
    wait(qtbot, lambda: viewer.state.property("role") == "bad")
    assert len(viewer.state.text()) < 1000
    assert not viewer.tabs.isVisible()
    assert not viewer.recipe.isEnabled()


def test_a_recipe_is_made_of_it_and_shown(window, session, qtbot, tmp_path):
    drop(window, lora(tmp_path, SD15, FOLDER, rank=32))
    viewer = viewer_of(window, qtbot)
    wait(qtbot, viewer.recipe.isEnabled)
    viewer.recipe.click()
    wait(qtbot, lambda: "Added to your presets as “mika_v2”." in viewer.state.text())
    assert "not given: the job's values are used." in viewer.state.text()
    window.show_presets()
    page = shown_page(window, PresetsPage)
    wait(qtbot, lambda: page.chosen is not None and page.chosen.preset.name == "mika_v2")
    assert library.find_preset("mika_v2").preset.recipe.rank == 32
    viewer.recipe.click()
    wait(qtbot, lambda: "“mika_v2 2”" in viewer.state.text())


def test_a_lora_that_no_recipe_can_be_made_of_says_why(window, qtbot, tmp_path):
    drop(window, lora(tmp_path, SD15, {}))
    viewer = viewer_of(window, qtbot)
    wait(qtbot, lambda: viewer.state.text() == "This file has no training metadata.")
    viewer.recipe.click()
    wait(qtbot, lambda: "no training metadata (ss_*)" in viewer.state.text())
    assert viewer.recipe.isEnabled()


def test_texts_of_strangers_are_plain_and_one_line(window, qtbot, tmp_path):
    told = {"modelspec.title": "<h1>big</h1>\nsecond", "modelspec.trigger_phrase": "<a href='http://x'>x</a>"}
    drop(window, lora(tmp_path, SD15, told))
    viewer = viewer_of(window, qtbot)
    wait(qtbot, lambda: viewer.title.text() == "<h1>big</h1> second")
    assert viewer.words.text() == "Trigger words: <a href='http://x'>x</a>"
    labels = (viewer.title, viewer.facts, viewer.about, viewer.words, viewer.state)
    assert {label.textFormat() for label in labels} == {Qt.TextFormat.PlainText}
    lines = viewer.metadata.lines
    tips = [lines.data(lines.index(row, 1), Qt.ItemDataRole.ToolTipRole) for row in range(lines.rowCount())]
    assert not any("<h1>" in tip for tip in tips) and any("&lt;h1&gt;big" in tip for tip in tips)


def test_a_viewer_closed_at_once_leaves_nothing_behind(window, session, qtbot, tmp_path):
    path = some_lora(tmp_path)
    for _ in range(3):
        session.navigator.lora.emit(path)
        window.findChildren(LoraViewer)[-1].close()
    wait(qtbot, lambda: not window.findChildren(LoraViewer))
    done = []
    session.tasks.run(lambda: None, done.append, done.append)
    wait(qtbot, lambda: bool(done))


def test_blocks_that_cannot_be_counted_are_worded():
    def block(name, strength, unknown=0, alphas=()):
        return BlockStrength(name, 2, (4, 8), alphas, strength, unknown)

    rows = block_rows(
        [block("IN01", 2.0), block("MID", 1.0, 1, (2.0, 4.5)), block("OUT00", math.nan), block("?", None, 2)]
    )
    assert [row.texts[3:] for row in rows] == [
        ("4 to 8", "same as rank", "2"),
        ("4 to 8", "2 to 4.5", "1"),
        ("4 to 8", "same as rank", "broken: contains NaN or infinity"),
        ("4 to 8", "same as rank", "unknown"),
    ]
    assert [row.bar for row in rows] == [1.0, 0.5, None, None]
    assert rows[3].texts[0] == "–"
    assert rows[3].tip == "Layers that could not be measured: 2."
