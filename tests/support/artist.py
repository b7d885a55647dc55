"""A simulated user who goes from images to a LoRA by mouse and keyboard, starting from whatever is shown.

Each step looks at the window first, so that a user whose window was killed simply starts again from the beginning.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from PySide6.QtCore import QCoreApplication, QEvent, QEventLoop, Qt, QTimer
from PySide6.QtGui import QKeyEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QAbstractButton, QLineEdit, QPushButton, QWidget

from app.core.session import Session
from app.qt.main_thread import MainThreadQueue
from app.qt.page_loader import Page
from app.qt.runs.page import RunsPage
from app.qt.train.form import CheckEditor, LineEditor
from app.qt.train.page import TrainPage
from app.qt.train.prompts import PromptRow
from app.qt.window import Window
from trainer.files.assets import asset_path

_LOOK_MS = 20
PATIENCE = 120.0
"""Seconds allowed for something that takes one or two; on a busy machine, slowness is not the app's fault."""
_Page = TypeVar("_Page", bound=Page)


@dataclass(frozen=True)
class TrainingRequest:
    """What the user wants to train, as typed."""

    base: Path
    pictures: Path
    recipe: str
    trigger: str
    steps: int
    prompts: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    """All other settings by key, found through the search over all settings."""
    prompt_settings: Mapping[str, str] = field(default_factory=dict)


def neon(folder: Path, steps: int = 12) -> TrainingRequest:
    """Return a request for the demo's style, trained for a few steps on a copy of its images in this folder."""
    pictures = folder / "Bilder für Neon"
    if not pictures.exists():
        shutil.copytree(asset_path("demo", "pictures"), pictures)
    return TrainingRequest(
        base=asset_path("demo", "base"),
        pictures=pictures,
        recipe="Style",
        trigger="neontube",
        steps=steps,
        prompts=("neontube, a blue house on a white background",),
        settings={
            "fit.threads": "1",  # two threads that share busy cores mostly wait for each other
            "recipe.resolution": "128",
            "recipe.rank": "4",
            "recipe.effective_batch": "2",
            "dataset.validation_share": "0.2",
            "report.validation.every": "6",
            "report.saving.every_steps": "6",
            "report.previews.every": "6",
        },
        prompt_settings={"width": "128", "height": "128", "steps": "4", "guidance": "2"},
    )


def until(reached: Callable[[], object], seconds: float, what: str) -> None:
    """Process the window's events until a condition holds; raise TimeoutError with what was awaited."""
    if reached():
        return
    loop, look, end = QEventLoop(), QTimer(), QTimer()
    look.timeout.connect(lambda: loop.quit() if reached() else None)
    end.setSingleShot(True)
    end.timeout.connect(lambda: loop.exit(1))
    look.start(_LOOK_MS)
    end.start(int(seconds * 1000))
    late = loop.exec()
    look.stop()
    end.stop()
    if late:
        raise TimeoutError(f"in {seconds:.0f} s not: {what}")


def shown_page(window: Window, kind: type[_Page], seconds: float = PATIENCE) -> _Page:
    """Return the page that the window shows once it exists; it must be of this kind."""
    until(lambda: isinstance(window.pages.currentWidget(), Page), seconds, f"the {kind.__name__}")
    page = window.pages.currentWidget()
    assert isinstance(page, kind)
    return page


class Sitting:
    """One start of the app: session, window and a simulated user."""

    def __init__(self) -> None:
        self._poster = MainThreadQueue()
        self.session = Session(self._poster.post)
        self.window = Window(self.session)
        self.window.resize(1400, 900)
        self.window.show()
        self.artist = Artist(self.window)
        self._open = True

    def end(self) -> None:
        """Close the window and end the session; what was started keeps running."""
        if self._open:
            self._open = False
            self.window.close()
            self.session.close()
            self.window.deleteLater()
            self._poster.close()


class Artist:
    """Drives one window by mouse and keyboard."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.session = window.session

    @property
    def train(self) -> TrainPage:
        """Return the Train page after showing it."""
        self._go("window.train")
        return shown_page(self.window, TrainPage)

    @property
    def runs(self) -> RunsPage:
        """Return the Runs page after showing it."""
        self._go("window.runs")
        return shown_page(self.window, RunsPage)

    # --- steps

    def open_images(self, folder: Path) -> None:
        """Open the images, and wait until all of them are loaded."""
        self._go("window.images")
        if not self.session.library.images:
            self.window.open([folder])
        until(lambda: self.session.library.images, PATIENCE, "images in the library")

    def set_up(self, request: TrainingRequest) -> None:
        """Fill in the job that is open on the Train page, changing only what is not set as requested yet."""
        page = self.train
        until(lambda: page.draft is not None, PATIENCE, "a job on the Train page")
        essentials = page.sheet.essentials
        if essentials.base.field.text() != str(request.base):
            self.type(essentials.base.field, str(request.base))
        until(lambda: essentials.base.badge.text() == "SD 1.5", PATIENCE, "the family of the base")
        until(
            lambda: any(self._names(card, request.recipe) for card in essentials.cards.cards), PATIENCE, "recipe cards"
        )
        card = next(card for card in essentials.cards.cards if self._names(card, request.recipe))
        if not card.isChecked():
            self.click(card)
            until(card.isChecked, PATIENCE, "the recipe's card on")
        if essentials.trigger.text() != request.trigger:
            self.type(essentials.trigger, request.trigger)
        self._choose_length(page, request.steps)
        self._write_prompts(page, request)
        for key, text in request.settings.items():
            self.set(page, key, text)
        draft = page.draft
        until(
            lambda: draft is not None and draft.job is not None and not draft.file.unsaved,
            PATIENCE,
            "a sound job on disk",
        )

    def set(self, page: TrainPage, key: str, text: str) -> None:
        """Find a setting by the search over all of them and type its value."""
        self._go("train.search")
        self.type(page.sheet.search, key)
        page.sheet.form.finish()
        row = next(row for (name, _), row in page.sheet.form.rows.items() if name == key)
        until(row.isVisible, PATIENCE, f"{key} in the form")
        if isinstance(row.editor, CheckEditor):
            if row.editor.isChecked() != (text == "true"):
                self.click(row.editor)
            return
        assert isinstance(row.editor, LineEditor), key
        if row.editor.text() != text:
            self.type(row.editor, text)

    def start(self) -> Path:
        """Press Start unless something was started already, and return the run that appears."""
        page = self.train
        until(lambda: page.start_button.isEnabled(), PATIENCE, "Start to be possible")
        self.click(page.start_button)
        until(lambda: self.session.queue.queue.read().entries, PATIENCE, "the job in the queue")
        run = self.begun()
        assert run is not None
        return run

    def begun(self) -> Path | None:
        """Return the run that is running or finished, resuming it if necessary; None if nothing was started."""
        page = self.runs
        entries = self.session.queue.queue.read().entries
        if not entries:
            return None
        until(lambda: self._run() is not None or self._go_on(page), 240, "the run of what was started")
        return self._run()

    def see_through(self, page: RunsPage) -> None:
        """Wait for the end of the run, and press Resume if it was interrupted."""

        def over() -> bool:
            run = page.run
            assert run is not None
            if run.summary.state == "done":
                return run.loaded
            self._go_on(page)
            return False

        until(over, 600, "the end of the run")

    def go_whole_way(self, request: TrainingRequest) -> Path:
        """Go from whatever is there to the file in ComfyUI's folder; return that file."""
        self.open_images(request.pictures)
        run = self.begun()
        if run is None:
            self.set_up(request)
            run = self.start()
        page = self.watch(run)
        self.see_through(page)
        return self.send_to_comfy(page)

    def watch(self, run: Path) -> RunsPage:
        """Show a run on the Runs page."""
        page = self.runs
        until(lambda: any(each.path == run for each in self.session.runs.all), PATIENCE, "the run in the list")
        if page.run is None or page.run.directory.path != run:
            page.list.choose(run)
        until(lambda: page.run is not None and page.run.directory.path == run, PATIENCE, "the run that is shown")
        return page

    def send_to_comfy(self, page: RunsPage) -> Path:
        """Choose the best step after the run and export it with one click; return the file."""
        page.tabs.setCurrentWidget(page.after)
        strip = page.after.strip
        until(lambda: any(each.last for each in strip.candidates.all), PATIENCE, "the candidates")
        best = next(place for place, each in enumerate(strip.candidates.all) if each.best)
        strip.choose(best)
        button = page.after.send_button
        until(
            lambda: button.isVisible() and button.isEnabled() and "ComfyUI" in button.text(),
            PATIENCE,
            "a folder to send to",
        )
        folder = self.session.models.destinations()[0].folder
        file = folder / strip.candidates.all[best].file.name
        if not file.exists():
            self.click(button)
        until(lambda: file.exists() or self._replace(), PATIENCE, f"{file.name} in ComfyUI's folder")
        return file

    # --- input

    def type(self, line: QLineEdit, text: str) -> None:
        """Replace the text of a line edit by typing."""
        line.setFocus()
        line.selectAll()
        QTest.keyClick(line, Qt.Key.Key_Delete)
        for letter in text:  # QTest.keyClicks crashes the program at characters outside ASCII
            for kind in (QEvent.Type.KeyPress, QEvent.Type.KeyRelease):
                QCoreApplication.sendEvent(line, QKeyEvent(kind, 0, Qt.KeyboardModifier.NoModifier, letter))
        QTest.keyClick(line, Qt.Key.Key_Tab)

    def click(self, button: QAbstractButton) -> None:
        """Click a button with the mouse, where it is on the screen."""
        assert button.isEnabled(), button.text()
        self._bring_into_sight(button)
        QTest.mouseClick(button, Qt.MouseButton.LeftButton)

    def _bring_into_sight(self, widget: QWidget) -> None:
        page = self.window.pages.currentWidget()
        if isinstance(page, TrainPage) and page.sheet.isAncestorOf(widget):
            page.sheet.ensureWidgetVisible(widget)

    def _go(self, name: str) -> None:
        command = self.window.commands[name]
        until(command.isEnabled, PATIENCE, f"{name} to be possible")
        command.trigger()

    def _names(self, card: object, recipe: str) -> bool:
        return getattr(card, "name", "").lower() == recipe.lower()

    def _choose_length(self, page: TrainPage, steps: int) -> None:
        length = page.sheet.essentials.length
        if length.measure.currentData() != "steps":
            length.measure.setFocus()
            QTest.keyClicks(length.measure, "s")
            length.measure.activated.emit(length.measure.currentIndex())
        if length.number.text() != str(steps):
            self.type(length.number, str(steps))

    def _write_prompts(self, page: TrainPage, request: TrainingRequest) -> None:
        prompts = page.sheet.essentials.prompts
        while len(prompts.rows) > len(request.prompts):
            self.click(prompts.rows[-1].remove)
        for place, text in enumerate(request.prompts):
            if place == len(prompts.rows):
                self.click(prompts.add)
            self._write_prompt(prompts.rows[place], text, request.prompt_settings)

    def _write_prompt(self, row: PromptRow, text: str, settings: Mapping[str, str]) -> None:
        if row.field.text() != text:
            self.type(row.field, text)
        if settings and not row.more.isChecked():
            self.click(row.more)
        for detail in row.details:
            wanted = settings.get(detail.key.rpartition(".")[2])
            if wanted is not None and isinstance(detail.editor, LineEditor) and detail.editor.text() != wanted:
                self.type(detail.editor, wanted)

    def _go_on(self, page: RunsPage) -> bool:
        """Press the button that resumes an interrupted run; always return False."""
        resume, bar = page.header.buttons["runs.resume"], page.queue.bar.button
        for button in (resume, bar):
            if button.isVisible() and button.isEnabled():
                self.click(button)
                break
        return False

    def _replace(self) -> bool:
        """Repeat an export that was interrupted; always return False."""
        for button in self.window.notices.findChildren(QPushButton):
            if button.isVisible() and button.text() == "Replace":
                self.click(button)
        return False

    def _run(self) -> Path | None:
        entries = [entry for entry in self.session.queue.entries if entry.run]
        return entries[-1].run if entries else None
