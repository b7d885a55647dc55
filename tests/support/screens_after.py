"""Screens of what follows a run."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from PySide6.QtWidgets import QApplication, QWidget

from app.core.after.drawing import RenderJob, grid
from app.core.models.verdict import Destination
from app.qt.runs.after.export import ExportDialog, ModelCardDialog
from app.qt.runs.after.grid_dialog import GridDialog
from app.qt.runs.after.panel import AfterPanel
from app.qt.runs.page import RunsPage
from app.qt.window import Window
from tests.support.artist import shown_page
from tests.support.finished import DEMO, write_finished_run
from tests.support.screens import screen, wait


@cache
def place() -> Path:
    """Write a finished run whose dataset was edited since; once per process, deleted at its end."""
    made = Path(tempfile.mkdtemp(prefix="impasto-after-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    shutil.copytree(DEMO / "pictures", made / "pictures")
    write_finished_run(made / "runs", made / "pictures")
    (made / "pictures" / "neon-01.txt").write_text("edited", encoding="utf-8")
    return made


def finished(window: Window) -> AfterPanel:
    """Show a finished run, with a test image rendered."""
    window.show_runs()
    page = shown_page(window, RunsPage)
    page.open(place() / "runs" / "neon")
    page.tabs.setCurrentWidget(page.after)
    panel: AfterPanel = page.after
    found = panel.strip.candidates
    wait(QApplication.instance(), lambda: len(found.all) == 3 and panel.has_job())
    panel.trying.image.show_file(DEMO / "pictures" / "neon-08.png")
    wait(QApplication.instance(), lambda: all(found.image(one) for one in found.all) and panel.trying.image.shows)
    wait(QApplication.instance(), panel.edited_bar.isVisible)
    window.session.models.add_destination(Path("D:/ComfyUI/models/loras"))
    return panel


@screen("after")
def after(window: Window) -> QWidget:
    finished(window)
    return window


@screen("after-export")
def after_export(window: Window) -> QWidget:
    panel = finished(window)
    candidate = panel.strip.current()
    assert candidate
    from app.core.after.export import LoraSummary

    summary = LoraSummary("Neon signs", "Ada", "CC-BY-4.0", "Everything glows.", "neontube", candidate.images[0])
    places = [
        Destination("ComfyUI", Path("D:/ComfyUI/models/loras")),
        Destination("A1111/Forge", Path("D:/forge/Lora")),
    ]
    dialog = ExportDialog(window.session, candidate, summary, places, window)
    wait(QApplication.instance(), lambda: dialog.image.shows)
    return dialog


@screen("after-card")
def after_card(window: Window) -> QWidget:
    panel = finished(window)
    panel.show_model_card()
    wait(QApplication.instance(), lambda: isinstance(panel.dialog, ModelCardDialog))
    assert panel.dialog
    return panel.dialog


@screen("after-grid")
def after_grid(window: Window) -> QWidget:
    panel = finished(window)
    job, found = panel._run.job, panel.strip.candidates.all  # type: ignore[union-attr]
    dialog = GridDialog(window.session, job, found, panel.trying.prompt_settings(), place(), window)  # type: ignore[arg-type]
    dialog.prompts.setPlainText("neontube, a blue house on a white background\na red star")
    strengths, prompts = [0.6, 0.8, 1.0], dialog.chosen_prompts()
    dialog._lay_table(dialog.chosen(), strengths, prompts)
    cells = grid([one.file for one in dialog.chosen()], strengths, [{"prompt": text} for text in prompts])
    drawing = dialog.drawing = RenderJob(tuple(cells), stage="drawing", share=0.7)
    for number in range(9):
        drawing.files[number] = DEMO / "pictures" / f"neon-{number + 1:02d}.png"
        dialog._show(drawing, number, number % 2, number // 2)
    wait(QApplication.instance(), lambda: all(dialog.table.item(n % 2, n // 2) for n in range(9)))
    dialog._refresh()
    return dialog
