"""The queue below the list of runs: what waits, what runs, and what became of the rest."""

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

from app.core.runs.queue import Look
from app.core.session import Session
from app.qt.actions.commands import Action, Commands
from app.qt.runs.lists import QueueList
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from app.qt.widgets import DateTimeEdit, plain_label, say, until_destroyed
from trainer.protocol.queue import Entry, State

_LOOK_EVERY = 1_000
_ORDERED: tuple[State, ...] = ("waiting", "running", "paused", "interrupted")
ACTIONS = (
    Action(
        "queue.up", _NOOP("Action", "Earlier in the queue"), "runs", "move_up", ("Alt+Up",), "can_move_up", icon="up",
    ),
    Action(
        "queue.down", _NOOP("Action", "Later in the queue"), "runs", "move_down", ("Alt+Down",), "can_move_down",
        icon="down",
    ),
    Action(
        "queue.after", _NOOP("Action", "Start after…"), "runs", "start_after", (), "can_wait", icon="clock",
        tip=_NOOP("Action", "Lets the chosen job wait for a time, tonight for example"),
    ),
    Action(
        "queue.pause", _NOOP("Action", "Pause in the queue"), "runs", "pause", (), "can_pause", icon="pause",
        tip=_NOOP("Action", "Pauses the chosen job or holds it back; it keeps its place"),
    ),
    Action(
        "queue.stop", _NOOP("Action", "Stop in the queue"), "runs", "stop", (), "can_stop", icon="stop",
        tip=_NOOP("Action", "Ends the chosen job, with the LoRA as it is then; it leaves the queue"),
    ),
    Action(
        "queue.withdraw", _NOOP("Action", "Keep training in the queue"), "runs", "withdraw", (), "can_withdraw",
        icon="undo", tip=_NOOP("Action", "Cancels a pause or stop that the run has not started yet"),
    ),
    Action(
        "queue.resume", _NOOP("Action", "Resume in the queue"), "runs", "again", (), "can_resume", icon="resume",
        tip=_NOOP("Action", "Goes on with the chosen job when its turn comes"),
    ),
    Action(
        "queue.duplicate", _NOOP("Action", "Queue once more"), "runs", "duplicate", (), "can_duplicate", icon="copy",
        tip=_NOOP("Action", "Puts the chosen job in once more, at the end"),
    ),
    Action(
        "queue.remove", _NOOP("Action", "Remove from the queue"), "runs", "remove", (), "can_remove", icon="trash",
        tip=_NOOP("Action", "Takes the chosen job out of the queue; its files and its run stay"),
    ),
    Action(
        "queue.clear", _NOOP("Action", "Remove what has ended"), "runs", "clear", (), "has_ended",
        tip=_NOOP("Action", "Takes all that is done, stopped or failed out of the queue; runs stay"),
    ),
    Action(
        "queue.hold", _NOOP("Action", "Hold the queue"), "runs", "set_held", (), checked="is_held",
        tip=_NOOP("Action", "Begins nothing more; what runs is not touched"),
    ),
    Action(
        "queue.careful", _NOOP("Action", "Hold the queue after a failure"), "runs", "set_careful", (),
        checked="is_careful", tip=_NOOP("Action", "Otherwise the next job begins, whatever became of the one before"),
    ),
)  # fmt: skip
_LINES = 8
"""Lines of text that the list has room for at least: three entries, with what is between them."""


class AfterTimeDialog(QDialog):
    """A moment from now on; `chosen` is Unix time in seconds once it is accepted, None for at once."""

    def __init__(self, name: str, after: float | None, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.chosen: float | None = None
        self.setWindowTitle(self.tr("Start after"))
        words = QLabel(self.tr("When its turn has come, “{name}” begins no earlier than:").format(name=name))
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
        self.at_once = self.buttons.addButton(self.tr("As soon as it can"), QDialogButtonBox.ButtonRole.ResetRole)
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
    """Return what was chosen before, else the next ten in the evening: when nobody needs the card."""
    if after is not None:
        return QDateTime.fromSecsSinceEpoch(int(after))
    now = QDateTime.currentDateTime()
    evening = QDateTime(now.date(), QTime(22, 0))
    return evening if evening > now else evening.addDays(1)


_BUTTONS = tuple(action.id for action in ACTIONS[:9])


class QueuePanel(QWidget):
    """Shows the queue while it is visible."""

    said = Signal(str)
    failed = Signal(object)
    """As of `Page`."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands, self._keeper = session, commands, session.queue
        self.list = QueueList()
        self.bar = _SentenceBar()
        self.buttons: dict[str, QToolButton] = {}
        commands.add(ACTIONS, self)
        self._lay_out()
        self._looking = QTimer(self)
        self._looking.setInterval(_LOOK_EVERY)
        self._looking.timeout.connect(self._look)
        until_destroyed(
            self,
            self._keeper.changed.connect(lambda _: self._show()),
            self._keeper.failed.connect(self.failed.emit),
        )
        self.list.chosen.connect(commands.refresh)
        self.list.activated.connect(lambda _: self._go())
        self.list.queue.moved.connect(self._keeper.move)
        self._show()

    # --- what the table of actions names

    def move_up(self) -> None:
        """Put the chosen entry before the one above it."""
        self._move(-1)

    def move_down(self) -> None:
        """Put the chosen entry behind the one below it."""
        self._move(1)

    def can_move_up(self) -> bool:
        """Tell whether there is one above."""
        return self._place(-1) is not None

    def can_move_down(self) -> bool:
        """Tell whether there is one below."""
        return self._place(1) is not None

    def start_after(self) -> None:
        """Ask for a time, and let the chosen entry wait for it."""
        entry = self.list.entry()
        if entry is None:
            return
        dialog = AfterTimeDialog(entry.name, entry.after, self)
        if dialog.exec():
            self._keeper.start_after(entry.id, dialog.chosen)

    def can_wait(self) -> bool:
        """Tell whether the chosen entry has not begun."""
        return self._stands("waiting", "paused")

    def pause(self) -> None:
        """Pause the chosen entry."""
        self._for_chosen(self._keeper.pause)

    def can_pause(self) -> bool:
        """Tell whether the chosen entry runs or waits, and was not asked to end."""
        return self._stands("waiting", "running") and not self._wished()

    def stop(self) -> None:
        """Stop the chosen entry."""
        self._for_chosen(self._keeper.stop)

    def can_stop(self) -> bool:
        """Tell whether the chosen entry has not ended."""
        return self._stands("running", "paused", "interrupted") and not self._wished()

    def withdraw(self) -> None:
        """Withdraw the pending pause or stop of the selected entry."""
        self._for_chosen(self._keeper.withdraw)

    def can_withdraw(self) -> bool:
        """Return whether the selected entry has a pending pause or stop."""
        return self._stands("running") and self._wished()

    def again(self) -> None:
        """Go on with the chosen entry."""
        self._for_chosen(self._keeper.again)

    def can_resume(self) -> bool:
        """Tell whether the chosen entry can be gone on with."""
        return self._stands("paused", "interrupted", "stopped", "failed")

    def duplicate(self) -> None:
        """Put the chosen job in once more."""
        self._for_chosen(self._keeper.duplicate)

    def can_duplicate(self) -> bool:
        """Tell whether the chosen entry came from a job."""
        entry = self.list.entry()
        return entry is not None and entry.job is not None

    def remove(self) -> None:
        """Take the chosen entry out."""
        self._for_chosen(self._keeper.remove)

    def can_remove(self) -> bool:
        """Tell whether the chosen entry does not run."""
        return self._chosen_state() not in (None, "running")

    def clear(self) -> None:
        """Take out all that has ended."""
        self._keeper.clear()

    def has_ended(self) -> bool:
        """Tell whether something has ended."""
        return any(entry.ended for entry in self._keeper.entries)

    def set_held(self, held: bool) -> None:
        """Hold the queue, or go on with it."""
        if held:
            self._keeper.hold()
        else:
            self._keeper.go_on()

    def is_held(self) -> bool:
        """Tell whether nothing is begun."""
        return self._keeper.now.reading.held

    def set_careful(self, careful: bool) -> None:
        """Choose what a failure does to the rest."""
        self._keeper.set_hold_on_failure(careful)

    def is_careful(self) -> bool:
        """Tell whether a failure holds the queue."""
        return self._keeper.now.reading.hold_on_failure

    # --- Qt's events

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Watch, from now on."""
        super().showEvent(event)
        self._look()
        self._looking.start()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Watch no more: nobody sees it."""
        super().hideEvent(event)
        self._looking.stop()

    # --- inside

    def _look(self) -> None:
        self._keeper.look()
        self.list.queue.show(self._keeper.entries)  # times pass, even where nothing else changes

    def _show(self) -> None:
        entries = self._keeper.entries
        self.list.show_entries(entries)
        self.pages.setCurrentIndex(0 if entries else 1)
        self._tell(self._keeper.now)
        self._commands.refresh()

    def _tell(self, now: Look) -> None:
        """Say the one thing about the queue that matters most, with what can be done about it."""
        reading = now.reading
        go_on = (self.tr("Go on"), self._keeper.go_on)
        if now.problem:
            self.bar.tell(now.problem, "bad")
        elif now.died is not None:
            words = self.tr("What works on the queue ended unexpectedly. Its last words: {words}")
            self.bar.tell(words.format(words=now.died or "–"), "bad", go_on)
        elif reading.faults:
            fault = reading.faults[0]
            act = (self.tr("Remove"), lambda: self._keeper.remove(fault.id)) if fault.id else None
            self.bar.tell(fault.sentence, "warning", act)
        elif reading.held:
            words = self.tr("The queue is held. {reason}").format(reason=reading.reason).strip()
            self.bar.tell(words, "warning", go_on)
        elif now.left:
            words = self.tr("Cut off in the queue: %n job(s).", "", now.left)
            self.bar.tell(words, "warning", go_on)
        else:
            self.bar.hide()

    def _go(self) -> None:
        """Show the chosen entry's run, or its job where there is none yet."""
        entry = self.list.entry()
        if entry is not None and entry.run is not None:
            self._session.going.run.emit(entry.run)
        elif entry is not None and entry.job is not None:
            self._session.going.job.emit(entry.job)

    def _move(self, by: int) -> None:
        entry, place, rows = self.list.entry(), self._place(by), self.list.queue.rows
        if entry is None or place is None:
            return
        behind = place if by < 0 else place + 1
        self._keeper.move(entry.id, rows[behind].id if behind < len(rows) else None)

    def _place(self, by: int) -> int | None:
        """Return the place of the next open entry above or below the chosen one; ended ones are passed over."""
        entry, rows = self.list.entry(), self.list.queue.rows
        if entry is None or entry.state not in _ORDERED:
            return None
        place = rows.index(entry) + by
        while 0 <= place < len(rows):
            if rows[place].state in _ORDERED:
                return place
            place += by
        return None

    def _chosen_state(self) -> State | None:
        entry = self.list.entry()
        return entry.state if entry else None

    def _stands(self, *states: State) -> bool:
        return self._chosen_state() in states

    def _wished(self) -> bool:
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
                "Nothing waits. What you start on the Train page comes here and is trained one after the other, "
                "on each graphics card one at a time, also while this window is closed."
            )
        )
        empty.setProperty("role", "muted")
        empty.setWordWrap(True)
        empty.setMargin(12)
        empty.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.pages = QStackedWidget()
        self.pages.setMinimumHeight(_LINES * self.fontMetrics().height())
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


class _SentenceBar(QFrame):
    """One sentence above the list, with a button where something can be done about it."""

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

    def tell(self, sentence: str, role: str, act: tuple[str, Callable[[], object]] | None = None) -> None:
        """Show a sentence; `act` is a button's title and what it does."""
        say(self.words, sentence, role)
        self.button.setVisible(act is not None)
        if act:
            self.button.setText(act[0])
            self._act = act[1]
        self.show()

    def _do(self) -> None:
        if self._act:
            self._act()
