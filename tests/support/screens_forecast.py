"""Screens of the forecast: a job whose plan needs no tracing, on a given GPU; and one with errors."""

from __future__ import annotations

import tempfile
from pathlib import Path

from PySide6.QtWidgets import QApplication, QWidget

from app.core.planning.forecaster import ForecastRequest
from app.qt.actions.commands import Commands
from app.qt.train.forecast.panel import ForecastPanel
from app.qt.train.sweep import SweepDialog
from app.qt.window import Window
from tests.support.drafts import opened
from tests.support.forecasts import known_job
from tests.support.screens import screen, wait

_folder = tempfile.TemporaryDirectory()
_panels: dict[str, ForecastPanel] = {}


def panel_of(window: Window, card: str, *, wrong: bool = False) -> ForecastPanel:
    """Return a separate panel with its result; all looks share it, because a result takes seconds."""
    if card in _panels:
        _panels[card].show()
        return _panels[card]
    session = window.session
    draft = opened(known_job(Path(_folder.name) / card, "sd15" if wrong else "sdxl"), session.tasks)
    panel = _panels[card] = ForecastPanel(session, Commands())
    panel.resize(480, 1180)
    panel.show()
    panel.chooser.box.setCurrentIndex(panel.chooser.box.findData(card))
    panel.show_draft(draft)
    wait(QApplication.instance(), lambda: panel.forecaster.state == "done", 120_000)
    if wrong:
        draft.set("recipe.rank", 0)
        wait(QApplication.instance(), lambda: not draft.file.unsaved)
    return panel


@screen("forecast")
def forecast(window: Window) -> QWidget:
    return panel_of(window, "12GB")


@screen("forecast-stale")
def forecast_stale(window: Window) -> QWidget:
    return panel_of(window, "6GB", wrong=True)


@screen("sweep")
def sweep(window: Window) -> QWidget:
    job = Path(_folder.name) / "sweep"
    path = job / "job.toml" if job.exists() else known_job(job, "sd15")
    known = ("fit.quantize=none", "fit.gradient_checkpointing=none")  # only their traces ship
    dialog = SweepDialog(window.session, ForecastRequest(path, "8GB", known), window)
    wait(QApplication.instance(), lambda: dialog.sweeper.state in ("done", "failed"), 120_000)
    return dialog
