"""The form with all settings: what is typed is judged beside it and on disk within a second."""

from __future__ import annotations

import html
import math
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QAbstractSlider, QComboBox, QLabel, QLineEdit
from pytestqt.qtbot import QtBot

from app.qt.train.blocks import BlockRows
from app.qt.train.page import TrainPage
from app.qt.window import Window
from tests.support.train_page import reaches_disk, row_of, type_into


def test_what_is_typed_is_judged_beside_the_field_and_on_disk_within_a_second(page: TrainPage, qtbot: QtBot) -> None:
    row = row_of(page, "recipe.rank")
    type_into(qtbot, row.editor, "many")
    reaches_disk(qtbot, page, lambda values: values["recipe"]["rank"] == "many")
    assert row.hint.text() == 'Must be a whole number from 1 to 1024, not the text "many".'
    assert row.hint.property("role") == "bad" and "recipe.rank" in row.editor.toolTip()
    type_into(qtbot, row.editor, "24")
    reaches_disk(qtbot, page, lambda values: values["recipe"]["rank"] == 24)
    assert row.hint.text() == row.setting.doc
    assert row.mark.isVisible()
    row.back.click()
    reaches_disk(qtbot, page, lambda values: "recipe" not in values)
    assert isinstance(row.editor, QLineEdit) and row.editor.text() == "" and row.editor.placeholderText() == "16"
    assert not row.mark.isVisible()


def test_arguments_of_another_optimizer_are_typed_and_judged(page: TrainPage, qtbot: QtBot) -> None:
    assert page.draft is not None
    page.draft.set("recipe.optimizer.name", "other")
    names = row_of(page, "recipe.optimizer.optimizer", "other").editor
    assert isinstance(names, QComboBox) and names.currentText() == "ademamix"
    names.setCurrentText("lamb")
    names.activated.emit(names.currentIndex())
    row = row_of(page, "recipe.optimizer.args", "other")
    type_into(qtbot, row.editor, "betas = [0.9, 0.95], weight_dcay = 0.1")
    assert "did you mean weight_decay?" in row.hint.text() and row.hint.property("role") == "bad"
    type_into(qtbot, row.editor, "betas = [0.9, 0.95], weight_decay = 0.1")
    expected = {"name": "other", "optimizer": "lamb", "args": {"betas": [0.9, 0.95], "weight_decay": 0.1}}
    reaches_disk(qtbot, page, lambda values: values["recipe"]["optimizer"] == expected)
    assert row.hint.text() == row.setting.doc
    page.draft.set("recipe.optimizer.args", {"weight_decay": 0.2})
    assert isinstance(row.editor, QLineEdit) and row.editor.text() == "weight_decay = 0.2"


def test_a_setting_without_effect_is_greyed_with_the_reason_until_it_has_one(page: TrainPage) -> None:
    row, kind = row_of(page, "recipe.schedule.cycles"), row_of(page, "recipe.schedule.kind").editor
    assert not row.editor.isEnabled() and row.hint.text() == 'No effect here: it is used only with kind = "restarts".'
    assert isinstance(kind, QComboBox)
    kind.setCurrentText("restarts")
    kind.activated.emit(kind.currentIndex())
    assert row.editor.isEnabled() and row.hint.text() == row.setting.doc


def test_the_schedule_is_drawn_beside_its_settings(page: TrainPage, qtbot: QtBot) -> None:
    """The chart's points are those of transformers' schedule times the rate, and follow what is edited."""
    assert page.draft is not None
    for key, value in {"learning_rate": 2e-4, "steps": 300, "schedule.kind": "cosine", "schedule.warmup": 30}.items():
        page.draft.set(f"recipe.{key}", value)
    row = row_of(page, "recipe.schedule.kind")
    (group,) = {found for found in page.sheet.form._groups if row in found.rows}
    assert group.chart is not None
    qtbot.waitUntil(lambda: len(group.chart.chart.drawing.lines[0].values) == 300)
    (line,) = group.chart.chart.drawing.lines
    steps = range(300)
    waves = [(1.0 + math.cos(math.pi * (step - 30) / 270)) / 2.0 for step in steps]
    assert list(line.values) == pytest.approx([2e-4 * (s / 30 if s < 30 else wave) for s, wave in enumerate(waves)])
    assert "2e-4" in group.chart.chart.plot.accessibleDescription()
    page.draft.set("recipe.schedule.kind", "constant")
    qtbot.waitUntil(lambda: group.chart.chart.drawing.lines[0].values[-1] == 2e-4)


def test_the_search_finds_settings_by_name_key_and_help(page: TrainPage, qtbot: QtBot) -> None:
    form = page.sheet.form
    page.sheet.form.finish()

    def found(text: str) -> set[str]:
        page.sheet.search.setText(text)
        page.sheet.form.finish()
        return {row.key for row in form.rows.values() if row.isVisible()}

    page.commands["train.search"].trigger()
    qtbot.waitUntil(lambda: page.window().focusWidget() is page.sheet.search)  # whichever window is active
    assert found("min_snr") == {"recipe.objective.min_snr_gamma", "recipe.objective.debiased_estimation"}
    assert "recipe.images.flip" in found("mirror")
    assert found("weight decay") == {"recipe.optimizer.weight_decay"}  # of the one optimizer that is chosen
    assert found("sprocket") == set() and form.nothing.isVisible() and "sprocket" in form.nothing.text()
    assert found("network_dim") == found("Network Dim") == {"recipe.rank"}  # as kohya calls it
    assert found("lora_rank") == {"recipe.rank"}  # as OneTrainer calls it, which the help does not say
    assert "dataset.folders" not in found("caption dropout") >= {"recipe.captions.dropout"}
    assert found("face_crop_aug_range") == set() and "set crops in the app" in form.nothing.text()
    assert "network_dim" in row_of(page, "recipe.rank").title.toolTip()
    assert len(found("")) > 80


def test_what_the_search_finds_is_scrolled_into_view(page: TrainPage, qtbot: QtBot) -> None:
    sheet = page.sheet
    qtbot.keyClicks(sheet.search, "vae_encode_tiling")
    row = row_of(page, "fit.vae_encode_tiling")
    qtbot.waitUntil(lambda: sheet.viewport().rect().contains(row.mapTo(sheet.viewport(), row.rect().center())))
    sheet.search.clear()
    sheet.all.setChecked(False)
    sheet.verticalScrollBar().setValue(0)
    sheet.all.click()
    qtbot.waitUntil(lambda: 0 <= sheet.all.mapTo(sheet.viewport(), sheet.all.rect().topLeft()).y() < 20)
    sheet.verticalScrollBar().triggerAction(QAbstractSlider.SliderAction.SliderToMinimum)
    sheet.form.finish()
    assert sheet.verticalScrollBar().value() == 0  # where the user scrolled to


def test_prompts_are_added_edited_and_removed(page: TrainPage, qtbot: QtBot) -> None:
    prompts = page.sheet.essentials.prompts
    qtbot.mouseClick(prompts.add, Qt.MouseButton.LeftButton)
    type_into(qtbot, prompts.rows[2].field, "a cat on a chair")
    prompts.rows[2].more.click()
    seed = next(row for row in prompts.rows[2].details if row.key.endswith("2.seed"))
    type_into(qtbot, seed.editor, "7")
    qtbot.mouseClick(prompts.rows[0].remove, Qt.MouseButton.LeftButton)
    expected = [{"prompt": "a house by a lake"}, {"prompt": "a cat on a chair", "seed": 7}]
    reaches_disk(qtbot, page, lambda values: values["report"]["previews"]["prompts"] == expected)
    assert [row.field.text() for row in prompts.rows] == ["a house by a lake", "a cat on a chair"]


def test_blocks_are_a_table_of_the_form(page: TrainPage, window: Window, qtbot: QtBot) -> None:
    page.sheet.all.setChecked(True)
    page.sheet.form.finish()
    blocks = page.sheet.form.findChild(BlockRows)
    assert blocks is not None and blocks.isVisible() and not blocks.header.isVisible()
    for _ in range(2):
        blocks.add.click()
    first, second = blocks.rows
    assert blocks.header.isVisible() and not first.problem.isVisible()
    type_into(qtbot, second.editors["match"], "*.attn2.*")
    type_into(qtbot, second.editors["rank"], "")
    assert "set rank, alpha or rate_factor too" in second.problem.text() and not first.problem.isVisible()
    type_into(qtbot, second.editors["rate_factor"], "0.5")
    assert not second.problem.isVisible()
    first.remove.click()
    expected = [{"match": "*.attn2.*", "rate_factor": 0.5}]
    reaches_disk(qtbot, page, lambda values: values["recipe"]["blocks"] == expected)
    assert [row.editors["match"].text() for row in blocks.rows] == ["*.attn2.*"]
    page.sheet.search.setText("block_lr_weight")
    assert blocks.isVisible()
    page.sheet.search.setText("sprocket")
    assert not blocks.isVisible()
    page.sheet.search.setText("")
    blocks.rows[0].remove.click()
    reaches_disk(qtbot, page, lambda values: "blocks" not in values.get("recipe", {}))
    window.commands["edit.undo"].trigger()
    assert len(blocks.rows) == 1


def test_folders_are_told_what_they_are_for(page: TrainPage, qtbot: QtBot, tmp_path: Path) -> None:
    pictures = page.sheet.essentials.images
    pictures.add_folder(tmp_path / "klasse")
    assert len(pictures.rows) == 2
    pictures.rows[1].kind.setCurrentIndex(1)
    pictures.rows[1].kind.activated.emit(1)
    pictures.rows[0].repeats.setValue(5)
    reaches_disk(
        qtbot,
        page,
        lambda values: (
            [each.get("kind") for each in values["dataset"]["folders"]] == [None, "regularization"]
            and values["dataset"]["folders"][0]["repeats"] == 5
        ),
    )
    pictures.rows[0].kind.setCurrentIndex(1)
    pictures.rows[0].kind.activated.emit(1)
    labels = [label for label in page.sheet.essentials.findChildren(QLabel) if label.isVisible()]
    assert any("nothing to train on" in label.text() for label in labels)


def test_a_folder_has_settings_of_its_own(page: TrainPage, qtbot: QtBot, tmp_path: Path) -> None:
    pictures = page.sheet.essentials.images
    pictures.add_folder(tmp_path / "klasse")
    row = pictures.rows[1]
    row.more.click()
    rows = {each.key.removeprefix("dataset.folders.1."): each for each in row.details}
    assert {"weight", "class_words", "lines", "masks", "captions.dropout", "images.flip"} <= set(rows)
    type_into(qtbot, rows["captions.dropout"].editor, "0.2")
    flip = rows["images.flip"].editor
    assert isinstance(flip, QComboBox)
    assert flip.itemText(0) == "as in the recipe"
    flip.setCurrentIndex(flip.findData(False))
    flip.activated.emit(flip.currentIndex())
    expected = {"captions": {"dropout": 0.2}, "images": {"flip": False}}
    reaches_disk(qtbot, page, lambda values: expected.items() <= values["dataset"]["folders"][1].items())
    flip.setCurrentIndex(0)
    flip.activated.emit(0)
    reaches_disk(qtbot, page, lambda values: "images" not in values["dataset"]["folders"][1])
    assert not rows["captions.keep_tokens"].editor.isEnabled()  # nothing is shuffled
    qtbot.mouseClick(pictures.rows[0].remove, Qt.MouseButton.LeftButton)
    assert not pictures.rows[0].details  # it shows another folder now
    reaches_disk(qtbot, page, lambda values: values["dataset"]["folders"][0]["captions"] == {"dropout": 0.2})


def test_a_folder_can_have_an_empty_text_instead_of_the_recipes(page: TrainPage, qtbot: QtBot, tmp_path: Path) -> None:
    pictures = page.sheet.essentials.images
    pictures.add_folder(tmp_path / "klasse")
    row = pictures.rows[1]
    row.more.click()
    prefix = next(each.editor for each in row.details if each.key.endswith("captions.prefix"))
    assert 'Type "" for an empty text.' in html.unescape(prefix.toolTip())
    type_into(qtbot, prefix, '""')
    reaches_disk(qtbot, page, lambda values: values["dataset"]["folders"][1].get("captions") == {"prefix": ""})
    assert isinstance(prefix, QLineEdit)
    assert prefix.text() == '""'
    type_into(qtbot, prefix, "")
    reaches_disk(qtbot, page, lambda values: "captions" not in values["dataset"]["folders"][1])
