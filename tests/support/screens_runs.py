"""The Runs page's screens: one run in charts, several compared, one that was killed."""

from __future__ import annotations

import shutil
from pathlib import Path

from PySide6.QtWidgets import QApplication, QWidget

from app.qt.runs.notifier import CloseNotice
from app.qt.runs.page import RunsPage
from app.qt.window import Window
from tests.support.artist import shown_page
from tests.support.runs import write_checkpoint, write_run
from tests.support.screens import screen, wait
from trainer.protocol.places import home
from trainer.protocol.run_directory import RunDirectory, known_runs


def made(name: str, **more: object) -> Path:
    """Return the run of this name, written on the first call."""
    known = next((path for path in known_runs() if path.name == name), None)
    return known or write_run(home() / "runs", name, 800, **more).path  # type: ignore[arg-type]


def shown(window: Window, *paths: Path) -> RunsPage:
    """Show these runs, with their charts drawn."""
    window.show_runs()
    page = shown_page(window, RunsPage)
    application = QApplication.instance()
    page.open(paths[0])
    wait(application, lambda: page.list.paths == [paths[0]])
    page.tabs.setCurrentWidget(page.progress)
    page.show_runs(list(paths))
    wait(application, lambda: all(run.loaded for run in page.progress.runs) and page.progress.board is not None)
    page.progress.draw()
    board = page.progress.board
    assert board is not None
    wait(application, lambda: not board._next.isActive())  # the charts are drawn one after the other
    return page


@screen("runs-charts")
def runs_charts(window: Window) -> QWidget:
    page = shown(window, made("watercolour"))
    page.progress.area.verticalScrollBar().setValue(0)
    return window


@screen("runs-memory")
def runs_memory(window: Window) -> QWidget:
    page = shown(window, made("watercolour"))
    memory = page.progress.memory
    assert memory is not None
    QApplication.processEvents()
    page.progress.area.ensureWidgetVisible(memory.kinds)
    return window


@screen("runs-overlaid")
def runs_overlaid(window: Window) -> QWidget:
    page = shown(window, made("watercolour"), made("watercolour, rank 32", rank=32, seed=2))
    QApplication.processEvents()
    page.progress.area.verticalScrollBar().setValue(page.progress.area.verticalScrollBar().maximum())
    return window


@screen("runs-killed")
def runs_killed(window: Window) -> QWidget:
    path = made("portrait", done=300, state="running", seed=3)
    if not (path / "checkpoints" / "step-00000250").exists():
        write_checkpoint(RunDirectory(path), 250)
    (path / "console.log").write_text("step 299\nstep 300\nKilled\n", encoding="utf-8")
    page = shown(window, path)
    wait(QApplication.instance(), page.failure_banner.isVisible)
    return window


@screen("runs-gone")
def runs_gone(window: Window) -> QWidget:
    path = made("landscape", seed=4)
    page = shown(window, path)
    other = path.with_name("landscape, first try")
    shutil.rmtree(other, ignore_errors=True)  # left by the look before
    path.rename(other)
    wait(QApplication.instance(), page.failure_banner.isVisible)
    return window


@screen("runs-farewell")
def runs_farewell(window: Window) -> QWidget:
    return CloseNotice(window, "training")
