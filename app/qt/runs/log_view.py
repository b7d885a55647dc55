"""What a run said: what should be known of it in words, and below all that its engine printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtGui import QGuiApplication, QHideEvent, QKeyEvent, QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QLineEdit, QVBoxLayout, QWidget

from app.core.runs.log import report_on
from app.core.session import Session
from app.core.tasks import raise_again
from app.qt.actions.commands import Commands
from app.qt.actions.table import Action
from app.qt.durations import moment
from app.qt.runs.log_text import LogText
from app.qt.runs.remark_panel import RemarkPanel, Told
from app.qt.runs.remark_words import sentence
from app.qt.words import QT_TRANSLATE_NOOP as _NOOP

if TYPE_CHECKING:
    from app.core.runs.run import Run

ACTIONS = (
    Action("log.find", _NOOP("Action", "Find in the log"), "runs", "ask_what", ("Ctrl+F",), "has_run", icon="search"),
    Action("log.next", _NOOP("Action", "Next place in the log"), "runs", "find_next", ("F3",), "has_run", icon="down"),
    Action(
        "log.previous",
        _NOOP("Action", "Previous place in the log"),
        "runs",
        "find_previous",
        ("Shift+F3",),
        "has_run",
        icon="up",
    ),
    Action("log.end", _NOOP("Action", "End of the log"), "runs", "to_end", ("Ctrl+Shift+End",), "is_away"),
    Action(
        "log.copy",
        _NOOP("Action", "Copy all for a bug report"),
        "runs",
        "copy_all",
        (),
        "has_run",
        icon="copy",
        tip=_NOOP("Action", "Copies versions, remarks, the job and the end of the log; your home folder is left out."),
    ),
)


class LogView(QWidget):
    """Shows the log of one run, with its remarks above."""

    said = Signal(str)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands = session, commands
        self._run: Run | None = None
        self._ends: list[Callable[[], None]] = []
        self.remarks = RemarkPanel()
        self.text = LogText(session.tasks)
        self.field = QLineEdit()
        self.result = QLabel()
        commands.add(ACTIONS, self)
        self._lay_out()
        self.text.moved.connect(commands.refresh)
        self.text.missed.connect(lambda: self.result.setText(self.tr("Not in the log")))
        self.text.unreadable.connect(self._tell_unreadable)
        self.field.textEdited.connect(lambda _: self.result.clear())
        self.field.installEventFilter(self)

    def show_run(self, run: Run | None) -> None:
        """Show another run, or none."""
        for end in self._ends:
            end()
        self._run = run
        self._ends = [run.looked.connect(lambda _: self._follow())] if run else []
        self.result.clear()
        self.text.show_log(run.directory.console if run else None)
        self.remarks.show_told(self.told())
        self._commands.refresh()

    def told(self) -> list[Told]:
        """Return what should be known of the run in words, the latest first."""
        now = time.time()
        remarks = reversed(self._run.remarks.all) if self._run else ()
        return [Told(one.kind, sentence(one), moment((one.last or one.event).time, now)) for one in remarks]

    def _follow(self) -> None:
        run = self._run
        if run and self.isVisible():
            self.remarks.show_told(self.told())
            self.text.follow(run.alive)

    def _tell_unreadable(self, why: str) -> None:
        self.result.setText(self.tr("The log cannot be read: {why}").format(why=why))

    # --- what the table of actions names

    def has_run(self) -> bool:
        """Tell whether there is a log."""
        return self._run is not None

    def is_away(self) -> bool:
        """Tell whether the end of the log is not what is seen."""
        return self._run is not None and not (self.text.at_bottom and self.text.at_end)

    def ask_what(self) -> None:
        """Ask what to look for."""
        self.field.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.field.selectAll()

    def find_next(self) -> None:
        """Go to the next place that holds what is asked for."""
        self._seek(back=False)

    def find_previous(self) -> None:
        """Go to the place before."""
        self._seek(back=True)

    def to_end(self) -> None:
        """Show the end of the log, and go along with what is printed."""
        self.text.to_end()

    def copy_all(self) -> None:
        """Put all that helps to understand what went wrong on the clipboard."""
        run = self._run
        if run:
            remarks = [f"{one.when} {one.sentence}".strip() for one in self.told()]
            self._session.tasks.run(lambda: report_on(run.directory, remarks), self._copied, raise_again)

    def _copied(self, text: str) -> None:
        QGuiApplication.clipboard().setText(text)
        self.said.emit(self.tr("Copied: paste it into the bug report."))

    def _seek(self, *, back: bool) -> None:
        self.result.clear()
        self.text.seek(self.field.text(), back=back)

    # --- Qt's events

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Enter finds the next place, with Shift the one before; Escape goes back to the log."""
        if watched is self.field and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self._seek(back=bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier))
                return True
            if event.key() == Qt.Key.Key_Escape:
                self.text.setFocus()
                return True
        return super().eventFilter(watched, event)

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Catch up with what was printed while it was hidden."""
        super().showEvent(event)
        self._follow()
        self._commands.refresh()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Its actions cannot be done while it is not seen."""
        super().hideEvent(event)
        self._commands.refresh()

    def _lay_out(self) -> None:
        self.text.setPlaceholderText(self.tr("Nothing was printed here yet."))
        self.field.setPlaceholderText(self.tr("Find in the log"))
        self.field.setAccessibleName(self.tr("Find in the log"))
        self.field.setClearButtonEnabled(True)
        self.field.setMaximumWidth(280)
        self.result.setProperty("role", "warning")
        self.result.setTextFormat(Qt.TextFormat.PlainText)
        row = QHBoxLayout()
        row.setContentsMargins(8, 4, 8, 4)
        row.addWidget(self.field, 1)
        for name in ("log.previous", "log.next"):
            row.addWidget(self._commands.button(name))
        row.addWidget(self.result)
        row.addStretch(1)
        row.addWidget(self._commands.button("log.end", Qt.ToolButtonStyle.ToolButtonTextOnly))
        row.addWidget(self._commands.button("log.copy", Qt.ToolButtonStyle.ToolButtonTextBesideIcon))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.remarks)
        column.addLayout(row)
        column.addWidget(self.text, 1)
