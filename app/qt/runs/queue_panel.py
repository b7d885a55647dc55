"""The queue below the list of runs: waiting, running and ended jobs, with their commands."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QDateTime, QLocale, Qt, QTime, QTimer, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QFrame,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QStackedWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.runs.queue import QueueState
from app.core.session import Session
from app.qt.actions.commands import Action, Commands
from app.qt.runs.lists import QueueList
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from app.qt.widgets import DateTimeEdit, plain_label, set_message, until_destroyed
from trainer.protocol.queue import Entry, State

_LOOK_EVERY = 1_000  # ms
_OPEN_STATES: tuple[State, ...] = ("waiting", "running", "paused", "interrupted")
ACTIONS = (
    Action(
        "queue.up", _NOOP("Action", "Move up in the queue"), "runs", "move_up", ("Alt+Up",), "can_move_up", icon="up",
    ),
    Action(
        "queue.down", _NOOP("Action", "Move down in the queue"), "runs", "move_down", ("Alt+Down",), "can_move_down",
        icon="down",
    ),
    Action(
        "queue.after", _NOOP("Action", "Start after…"), "runs", "start_after", (), "can_wait", icon="clock",
        tip=_NOOP("Action", "Starts the selected job no earlier than a given time, for example tonight"),
    ),
    Action(
        "queue.pause", _NOOP("Action", "Pause queued job"), "runs", "pause", (), "can_pause", icon="pause",
        tip=_NOOP("Action", "Pauses the selected job or keeps it from starting; the job keeps its place in the queue"),
    ),
    Action(
        "queue.stop", _NOOP("Action", "Stop queued job"), "runs", "stop", (), "can_stop", icon="stop",
        tip=_NOOP("Action", "Ends the selected job, saves its LoRA and removes the job from the queue"),
    ),
    Action(
        "queue.withdraw", _NOOP("Action", "Keep queued job running"), "runs", "withdraw", (), "can_withdraw",
        icon="undo", tip=_NOOP("Action", "Cancels a pause or stop that the run has not started yet"),
    ),
    Action(
        "queue.resume", _NOOP("Action", "Resume queued job"), "runs", "requeue", (), "can_resume", icon="resume",
        tip=_NOOP("Action", "Continues the selected job when its turn comes"),
    ),
    Action(
        "queue.duplicate", _NOOP("Action", "Queue again"), "runs", "duplicate", (), "can_duplicate", icon="copy",
        tip=_NOOP("Action", "Adds the selected job again at the end of the queue"),
    ),
    Action(
        "queue.remove", _NOOP("Action", "Remove from the queue"), "runs", "remove", (), "can_remove", icon="trash",
        tip=_NOOP("Action", "Removes the selected job from the queue; its files and its run are kept"),
    ),
    Action(
        "queue.clear", _NOOP("Action", "Remove ended jobs"), "runs", "clear", (), "has_ended",
        tip=_NOOP("Action", "Removes done, stopped and failed jobs from the queue; their runs are kept"),
    ),
    Action(
        "queue.hold", _NOOP("Action", "Hold the queue"), "runs", "set_held", (), checked="is_held",
        tip=_NOOP("Action", "Starts no new jobs; running jobs continue"),
    ),
    Action(
        "queue.careful", _NOOP("Action", "Hold the queue after a failure"), "runs", "set_careful", (),
        checked="is_careful", tip=_NOOP("Action", "Starts no new jobs after one fails; otherwise the next one starts"),
    ),
)  # fmt: skip
_MIN_LINES = 8
"""Minimum height of the list, in lines of text: enough for three entries."""


class AfterTimeDialog(QDialog):
    """Dialog for an entry's earliest start time; `chosen` is Unix time in seconds, or None for no limit."""

    def __init__(self, name: str, after: float | None, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.chosen: float | None = None
        self.setWindowTitle(self.tr("Start after"))
        words = QLabel(self.tr("Start “{name}” when its turn comes, but not before:").format(name=name))
        words.setTextFormat(Qt.TextFormat.PlainText)
        words.setWordWrap(True)
        self.moment = DateTimeEdit()
        self.moment.setDateTime(_proposed(after))
        self.moment.setCalendarPopup(True)
        self.moment.setDisplayFormat(QLocale().dateTimeFormat(QLocale.FormatType.ShortFormat))
        self.moment.setMinimumDateTime(min(QDateTime.currentDateTime(), self.moment.dateTime()))
        self.moment.setAccessibleName(self.tr("Start after"))
        standard = QDialogButtonBox.StandardButton
        self.buttons = QDialogButtonBox(standard.Ok | standard.Cancel)
        self.at_once = self.buttons.addButton(self.tr("No start time"), QDialogButtonBox.ButtonRole.ResetRole)
        self.at_once.clicked.connect(lambda: self._take(None))
        self.buttons.accepted.connect(lambda: self._take(float(self.moment.dateTime().toSecsSinceEpoch())))
        self.buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.addWidget(words)
        column.addWidget(self.moment)
        column.addWidget(self.buttons)

    def _take(self, moment: float | None) -> None:
        self.chosen = moment
        self.accept()


def _proposed(after: float | None) -> QDateTime:
    """Return the entry's start time or, if it has none, the next 10 p.m.: many users train overnight."""
    if after is not None:
        return QDateTime.fromSecsSinceEpoch(int(after))
    now = QDateTime.currentDateTime()
    evening = QDateTime(now.date(), QTime(22, 0))
    return evening if evening > now else evening.addDays(1)


_BUTTONS = tuple(action.id for action in ACTIONS[:9])


class QueuePanel(QWidget):
    """Panel with the queue entries and their commands; it polls the queue while it is visible."""

    message_shown = Signal(str)
    failed = Signal(object)
    """See `Page.failed`."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands, self._queue = session, commands, session.queue
        self.list = QueueList()
        self.bar = _MessageBar()
        self.buttons: dict[str, QToolButton] = {}
        commands.add(ACTIONS, self)
        self._lay_out()
        self._looking = QTimer(self)
        self._looking.setInterval(_LOOK_EVERY)
        self._looking.timeout.connect(self._look)
        until_destroyed(
            self,
            self._queue.changed.connect(lambda _: self._show()),
            self._queue.failed.connect(self.failed.emit),
        )
        self.list.chosen.connect(commands.refresh)
        self.list.activated.connect(lambda _: self._on_activated())
        self.list.queue.moved.connect(self._queue.move)
        self._show()

    # --- called by actions

    def move_up(self) -> None:
        """Move the selected entry up."""
        self._move(-1)

    def move_down(self) -> None:
        """Move the selected entry down."""
        self._move(1)

    def can_move_up(self) -> bool:
        """Return whether the selected entry can move up: it has not ended, and another such entry is above it."""
        return self._neighbor(-1) is not None

    def can_move_down(self) -> bool:
        """Return whether the selected entry can move down: it has not ended, and another such entry is below it."""
        return self._neighbor(1) is not None

    def start_after(self) -> None:
        """Ask for the earliest start time of the selected entry, then set it."""
        entry = self.list.entry()
        if entry is None:
            return
        dialog = AfterTimeDialog(entry.name, entry.after, self)
        if dialog.exec():
            self._queue.start_after(entry.id, dialog.chosen)

    def can_wait(self) -> bool:
        """Return whether the selected entry is waiting or paused."""
        return self._has_state("waiting", "paused")

    def pause(self) -> None:
        """Pause the selected entry."""
        self._for_chosen(self._queue.pause)

    def can_pause(self) -> bool:
        """Return whether the selected entry is waiting or running, and not already pausing or stopping."""
        return self._has_state("waiting", "running") and not self._is_ending()

    def stop(self) -> None:
        """Stop the selected entry."""
        self._for_chosen(self._queue.stop)

    def can_stop(self) -> bool:
        """Return whether the selected entry has a run that can be stopped and is not already pausing or stopping."""
        return self._has_state("running", "paused", "interrupted") and not self._is_ending()

    def withdraw(self) -> None:
        """Withdraw the pending command to pause or stop the selected entry."""
        self._for_chosen(self._queue.withdraw)

    def can_withdraw(self) -> bool:
        """Return whether the selected entry has a pending pause or stop."""
        return self._has_state("running") and self._is_ending()

    def requeue(self) -> None:
        """Queue the selected entry again, to resume its run."""
        self._for_chosen(self._queue.requeue)

    def can_resume(self) -> bool:
        """Return whether the selected entry can be resumed."""
        return self._has_state("paused", "interrupted", "stopped", "failed")

    def duplicate(self) -> None:
        """Queue the selected entry's job again."""
        self._for_chosen(self._queue.duplicate)

    def can_duplicate(self) -> bool:
        """Return whether the selected entry has a job, so that it can be queued again."""
        entry = self.list.entry()
        return entry is not None and entry.job is not None

    def remove(self) -> None:
        """Remove the selected entry from the queue."""
        self._for_chosen(self._queue.remove)

    def can_remove(self) -> bool:
        """Return whether an entry is selected and is not running."""
        return self._chosen_state() not in (None, "running")

    def clear(self) -> None:
        """Remove all ended entries."""
        self._queue.clear()

    def has_ended(self) -> bool:
        """Return whether the queue has ended entries."""
        return any(entry.ended for entry in self._queue.entries)

    def set_held(self, held: bool) -> None:
        """Put the queue on hold, or resume it."""
        if held:
            self._queue.hold()
        else:
            self._queue.resume_queue()

    def is_held(self) -> bool:
        """Return whether the queue is on hold."""
        return self._queue.now.reading.held

    def set_careful(self, careful: bool) -> None:
        """Set whether a failed job puts the queue on hold."""
        self._queue.set_hold_on_failure(careful)

    def is_careful(self) -> bool:
        """Return whether a failed job puts the queue on hold."""
        return self._queue.now.reading.hold_on_failure

    # --- Qt's events

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Start polling the queue, because the panel is visible."""
        super().showEvent(event)
        self._look()
        self._looking.start()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Stop polling the queue, because the panel is hidden."""
        super().hideEvent(event)
        self._looking.stop()

    # --- inside

    def _look(self) -> None:
        self._queue.look()
        self.list.queue.show(self._queue.entries)  # start times pass even if nothing else changes

    def _show(self) -> None:
        entries = self._queue.entries
        self.list.show_entries(entries)
        self.pages.setCurrentIndex(0 if entries else 1)
        self._show_status(self._queue.now)
        self._commands.refresh()

    def _show_status(self, now: QueueState) -> None:
        """Show the most important message about the queue, with a button if an action can help."""
        reading = now.reading
        resume = (self.tr("Resume queue"), self._queue.resume_queue)
        if now.problem:
            self.bar.show_message(now.problem, "bad")
        elif now.died is not None:
            words = self.tr("The queue stopped unexpectedly. Its last output: {words}")
            self.bar.show_message(words.format(words=now.died or "–"), "bad", resume)
        elif reading.faults:
            fault = reading.faults[0]
            act = (self.tr("Remove"), lambda: self._queue.remove(fault.id)) if fault.id else None
            self.bar.show_message(fault.sentence, "warning", act)
        elif reading.held:
            words = self.tr("The queue is on hold. {reason}").format(reason=reading.reason).strip()
            self.bar.show_message(words, "warning", resume)
        elif now.stuck_count:
            words = self.tr("Interrupted in the queue: %n job(s).", "", now.stuck_count)
            self.bar.show_message(words, "warning", resume)
        else:
            self.bar.hide()

    def _on_activated(self) -> None:
        """Show the selected entry's run, or its job if it has no run yet."""
        entry = self.list.entry()
        if entry is not None and entry.run is not None:
            self._session.navigator.run.emit(entry.run)
        elif entry is not None and entry.job is not None:
            self._session.navigator.job.emit(entry.job)

    def _move(self, by: int) -> None:
        entry, place, rows = self.list.entry(), self._neighbor(by), self.list.queue.rows
        if entry is None or place is None:
            return
        behind = place if by < 0 else place + 1
        self._queue.move(entry.id, rows[behind].id if behind < len(rows) else None)

    def _neighbor(self, by: int) -> int | None:
        """Return the row of the nearest entry, above (-1) or below (1) the selected one, that has not ended.

        Returns None if there is none, or if the selected entry itself has ended.
        """
        entry, rows = self.list.entry(), self.list.queue.rows
        if entry is None or entry.state not in _OPEN_STATES:
            return None
        place = rows.index(entry) + by
        while 0 <= place < len(rows):
            if rows[place].state in _OPEN_STATES:
                return place
            place += by
        return None

    def _chosen_state(self) -> State | None:
        entry = self.list.entry()
        return entry.state if entry else None

    def _has_state(self, *states: State) -> bool:
        return self._chosen_state() in states

    def _is_ending(self) -> bool:
        entry = self.list.entry()
        return entry is not None and entry.wish is not None

    def _for_chosen(self, ask: Callable[[str], None]) -> None:
        entry: Entry | None = self.list.entry()
        if entry is not None:
            ask(entry.id)

    def _lay_out(self) -> None:
        title = QLabel(self.tr("Queue"))
        title.setProperty("role", "heading")
        title.setContentsMargins(12, 8, 12, 4)
        empty = QLabel(
            self.tr(
                "The queue is empty. Jobs that you start on the Train page wait here and train one at a time "
                "on each GPU, even while this window is closed."
            )
        )
        empty.setProperty("role", "muted")
        empty.setWordWrap(True)
        empty.setMargin(12)
        empty.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.pages = QStackedWidget()
        self.pages.setMinimumHeight(_MIN_LINES * self.fontMetrics().height())
        self.pages.addWidget(self.list)
        self.pages.addWidget(empty)
        row = QHBoxLayout()
        row.setContentsMargins(8, 2, 8, 4)
        row.setSpacing(2)
        for name in _BUTTONS:
            self.buttons[name] = self._commands.button(name)
            row.addWidget(self.buttons[name])
        row.addStretch()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(title)
        column.addWidget(self.bar)
        column.addWidget(self.pages, 1)
        column.addLayout(row)


class _MessageBar(QFrame):
    """Bar above the list with one message, and a button if an action can help."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.button = plain_label(), QPushButton()
        self._act: Callable[[], object] | None = None
        self.button.clicked.connect(self._do)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 2, 12, 8)
        column.addWidget(self.words)
        column.addWidget(self.button, 0, Qt.AlignmentFlag.AlignLeft)
        self.hide()

    def show_message(self, sentence: str, role: str, act: tuple[str, Callable[[], object]] | None = None) -> None:
        """Show a message; `act` is the button's label and callback, or None for no button."""
        set_message(self.words, sentence, role)
        self.button.setVisible(act is not None)
        if act:
            self.button.setText(act[0])
            self._act = act[1]
        self.show()

    def _do(self) -> None:
        if self._act:
            self._act()
