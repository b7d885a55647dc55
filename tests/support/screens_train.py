"""The Train page's screens."""

from __future__ import annotations

from PySide6.QtWidgets import QApplication, QWidget

from app.core.jobs import essentials
from app.qt.train.page import TrainPage
from app.qt.window import Window
from tests.support.artist import shown_page
from tests.support.screens import screen, wait


def set_up(window: Window) -> TrainPage:
    """Set up a job with the open images, a recipe, a trigger word, and an impossible value."""
    window.show_train()
    page = shown_page(window, TrainPage)
    wait(QApplication.instance(), lambda: page.draft is not None and bool(page.sheet.essentials.cards.cards))
    assert page.draft is not None
    page.draft.set("base.family", "sdxl")
    card = next(card for card in page.sheet.essentials.cards.cards if card.entry.preset.name == "character")
    card.click()
    essentials.set_trigger(page.draft, "ohwx")
    page.draft.set("recipe.rank", 16)
    wait(QApplication.instance(), lambda: not page.draft.file.unsaved)
    return page


@screen("train")
def train(window: Window) -> QWidget:
    page = set_up(window)
    page.sheet.verticalScrollBar().setValue(0)
    return window


@screen("train-settings")
def train_settings(window: Window) -> QWidget:
    page = set_up(window)
    assert page.draft is not None
    page.draft.set("recipe.alpha", "a lot")
    page.sheet.all.setChecked(True)
    page.sheet.form.finish()
    QApplication.processEvents()
    page.sheet.verticalScrollBar().setValue(page.sheet.search.y() - 20)
    return window


@screen("train-search")
def train_search(window: Window) -> QWidget:
    page = set_up(window)
    page.sheet.search.setText("learning rate")
    page.sheet.form.finish()
    QApplication.processEvents()
    page.sheet.verticalScrollBar().setValue(page.sheet.search.y() - 20)
    return window


@screen("train-layers")
def train_layers(window: Window) -> QWidget:
    """Show ranks of single layers, one of which is impossible."""
    page = set_up(window)
    assert page.draft is not None
    blocks = [{"match": "unet.mid_block.*", "rank": 8, "rate_factor": 0.5}, {"match": "*.to_q", "rank": 0}]
    page.draft.set("recipe.blocks", blocks)
    page.sheet.search.setText("layers")
    page.sheet.form.finish()
    QApplication.processEvents()
    page.sheet.verticalScrollBar().setValue(page.sheet.search.y() - 20)
    return window


@screen("train-folders")
def train_folders(window: Window) -> QWidget:
    """Show the settings of one folder."""
    page = set_up(window)
    page.sheet.essentials.images.rows[0].more.click()
    QApplication.processEvents()
    page.sheet.verticalScrollBar().setValue(page.sheet.essentials.images.y() - 20)
    return window
