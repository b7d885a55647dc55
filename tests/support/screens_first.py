"""Screens of the choice of a base, the welcome and the tour."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from PySide6.QtWidgets import QApplication, QVBoxLayout, QWidget

from app.qt.first.tour import Tour
from app.qt.first.welcome import Welcome
from app.qt.train.base_dialog import BaseDialog
from app.qt.train.base_picker import BasePicker
from app.qt.window import Window
from tests.support import tool_homes
from tests.support.screens import screen, wait

_PLACE = Path(tempfile.gettempdir()) / "impasto-screens"


def furnish(window: Window) -> None:
    """Put other tools on this PC, and look for them."""
    if not _PLACE.exists():
        tool_homes.a1111(_PLACE)
        tool_homes.kohya(_PLACE)
        tool_homes.comfy_portable(_PLACE, _PLACE / "AI models")
        tool_homes.swarm(_PLACE)
        tool_homes.sdxl_v(
            _PLACE / "ComfyUI_windows_portable/ComfyUI/models/checkpoints/noobaiXLNAIXL_vPred10.safetensors"
        )
    os.environ["IMPASTO_LOOK_IN"] = str(_PLACE)
    models = window.session.models
    models.look(again=True)
    wait(QApplication.instance(), lambda: not models.looking)


@screen("base-list")
def base_list(window: Window) -> QWidget:
    furnish(window)
    window.session.models.used("stabilityai/stable-diffusion-xl-base-1.0")
    return BaseDialog(window.session.models, window)


@screen("base-list-unusable")
def base_list_unusable(window: Window) -> QWidget:
    furnish(window)
    dialog = BaseDialog(window.session.models, window)
    dialog.field.setText("a")
    return dialog


@screen("base-picker")
def base_picker(window: Window) -> QWidget:
    """Four of them: good, a wrong kind of file, a link, nothing yet."""
    furnish(window)
    place = QWidget(window)
    column = QVBoxLayout(place)
    column.setSpacing(18)
    texts = (
        str(_PLACE / "ComfyUI_windows_portable/ComfyUI/models/checkpoints/noobaiXLNAIXL_vPred10.safetensors"),
        str(_PLACE / "kohya_ss/bases/flux1-dev.safetensors"),
        "https://example.org/models/dreamy.safetensors",
        "",
    )
    pickers = [BasePicker(window.session) for _ in texts]
    for picker, text in zip(pickers, texts, strict=True):
        column.addWidget(picker)
        picker.set_base(text)
    place.resize(620, 320)
    wait(QApplication.instance(), lambda: all(p.verdict.text == t for p, t in zip(pickers, texts, strict=True)))
    return place


@screen("welcome")
def welcome(window: Window) -> QWidget:
    furnish(window)
    dialog = Welcome(window.session, window)
    wait(
        QApplication.instance(), lambda: dialog.machine.disk.isVisibleTo(dialog)
    )  # its test takes longer
    return dialog


def tour(window: Window, step: int) -> QWidget:
    window.show_tour()
    (running,) = window.findChildren(Tour)
    for _ in range(step):
        running.coach.next.click()
    wait(QApplication.instance(), lambda: len(window.session.view.ids) > 5)
    return window


@screen("tour")
def tour_of_pictures(window: Window) -> QWidget:
    return tour(window, 0)


@screen("tour-job")
def tour_of_job(window: Window) -> QWidget:
    (running,) = window.findChildren(Tour)
    for _ in range(3):
        running.coach.next.click()
    return window


@screen("tour-end")
def tour_end(window: Window) -> QWidget:
    (running,) = window.findChildren(Tour)
    running.coach.next.click()
    running.coach.next.click()
    running.coach.next.click()
    wait(QApplication.instance(), lambda: not window.findChildren(Tour))
    return window
