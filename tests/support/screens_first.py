"""Screens of the base picker, the welcome page and the tour."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from PySide6.QtWidgets import QApplication, QVBoxLayout, QWidget

from app.qt.first_run.tour import Tour
from app.qt.first_run.welcome import Welcome
from app.qt.train.base_picker import BaseDialog, BasePicker
from app.qt.window import Window
from tests.support import tool_homes
from tests.support.screens import screen, wait
from trainer.protocol import places


@cache
def place() -> Path:
    """Return a folder with other tools in it, which exists as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="impasto-"))
    atexit.register(shutil.rmtree, folder, True)
    tool_homes.a1111(folder)
    tool_homes.kohya(folder)
    comfy = tool_homes.comfy_portable(folder, folder / "AI models")
    tool_homes.sdxl_v(comfy / "models" / "checkpoints" / "noobaiXLNAIXL_vPred10.safetensors")
    tool_homes.swarm(folder)
    return folder


def furnish(window: Window) -> None:
    """Put other tools on this PC, and scan them."""
    models = window.session.models
    for name in ("SwarmUI", "kohya_ss", "stable-diffusion-webui", "ComfyUI_windows_portable/ComfyUI"):
        models.add_folder(place() / name)
    wait(QApplication.instance(), lambda: not models.is_searching and len(models.installations) > 3)


@screen("base-list")
def base_list(window: Window) -> QWidget:
    furnish(window)
    window.session.models.add_recent("stabilityai/stable-diffusion-xl-base-1.0")
    return BaseDialog(window.session.models, window)


@screen("base-list-unusable")
def base_list_unusable(window: Window) -> QWidget:
    furnish(window)
    dialog = BaseDialog(window.session.models, window)
    dialog.field.setText("a")
    return dialog


@screen("base-picker")
def base_picker(window: Window) -> QWidget:
    """Show four states: a good base, a wrong kind of file, a link, and nothing yet."""
    furnish(window)
    shown = QWidget(window)
    column = QVBoxLayout(shown)
    column.setSpacing(18)
    texts = (
        str(place() / "ComfyUI_windows_portable/ComfyUI/models/checkpoints/noobaiXLNAIXL_vPred10.safetensors"),
        str(place() / "kohya_ss/bases/flux1-dev.safetensors"),
        "https://example.org/models/dreamy.safetensors",
        "",
    )
    pickers = [BasePicker(window.session) for _ in texts]
    for picker, text in zip(pickers, texts, strict=True):
        column.addWidget(picker)
        picker.set_base(text)
    shown.resize(620, 320)
    wait(QApplication.instance(), lambda: all(p.verdict.text == t for p, t in zip(pickers, texts, strict=True)))
    return shown


@screen("welcome")
def welcome(window: Window) -> QWidget:
    furnish(window)
    dialog = Welcome(window.session, window)
    wait(QApplication.instance(), lambda: dialog.machine.disk.isVisibleTo(dialog))  # it takes longer to test
    return dialog


@screen("tour")
def tour(window: Window) -> QWidget:
    """Show only the tour's strip, as it appears above the page; the demo's images are closed again."""
    session = window.session
    for former in window.findChildren(Tour):
        former.end()
    window.show_tour()
    (running,) = window.findChildren(Tour)
    demo = places.home() / "demo" / "pictures"
    wait(QApplication.instance(), lambda: demo in session.datasets.folders)
    session.datasets.close(demo)
    return running.coach
