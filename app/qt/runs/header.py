"""The header of a run: its name, its state, the progress of each phase, and its commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication, QLocale, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QHideEvent, QPainter, QPaintEvent, QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QSizePolicy, QToolButton, QVBoxLayout, QWidget

from app.core.runs.run import Run
from app.core.runs.runs import RunCommand
from app.core.session import Session
from app.qt.actions.commands import Action, Commands
from app.qt.runs.lists import entry_status
from app.qt.runs.rows import ending_word, run_word, starting_word, state_color
from app.qt.theme import colors
from app.qt.widgets import QT_TRANSLATE_NOOP as _NOOP
from app.qt.widgets import ElidedLabel, format_duration, open_folder, plain_tip, set_message, until_destroyed
from trainer.protocol.commands import CommandName, CommandResult, Ending
from trainer.protocol.events import Phase
from trainer.protocol.progress import PhaseState
from trainer.protocol.queue import Entry

if TYPE_CHECKING:
    from app.core.runs.run import Run


_NAMES: dict[Phase, str] = {
    "download": _NOOP("Phases", "Download"),
    "load": _NOOP("Phases", "Load"),
    "check": _NOOP("Phases", "Check"),
    "cache_pictures": _NOOP("Phases", "Images"),
    "cache_texts": _NOOP("Phases", "Captions"),
    "train": _NOOP("Phases", "Train"),
    "validate": _NOOP("Phases", "Validate"),
    "preview": _NOOP("Phases", "Preview"),
    "save": _NOOP("Phases", "Save"),
}
"""Titles of the phases, in the order in which a run enters them."""
_BAR = 6
_TRAIN_WEIGHT = 3
_UNKNOWN = 0.33
"""Fraction of the bar that is filled while the total is unknown."""
ACTIONS = (
    Action(
        "runs.sample",
        _NOOP("Action", "Preview now"),
        "runs",
        "preview_now",
        (),
        "can_preview",
        icon="images",
        tip=_NOOP("Action", "Generates the preview images after this step, then continues training"),
    ),
    Action(
        "runs.save",
        _NOOP("Action", "Save now"),
        "runs",
        "save_now",
        (),
        "can_save",
        icon="save",
        tip=_NOOP("Action", "Saves the LoRA and a checkpoint after this step, then continues training"),
    ),
    Action(
        "runs.pause",
        _NOOP("Action", "Pause"),
        "runs",
        "pause",
        (),
        "can_end",
        icon="pause",
        tip=_NOOP("Action", "Saves a checkpoint and frees the GPU; the run keeps its place in the queue"),
    ),
    Action(
        "runs.stop",
        _NOOP("Action", "Stop"),
        "runs",
        "stop",
        (),
        "can_end",
        icon="stop",
        tip=_NOOP("Action", "Saves a checkpoint and the LoRA and leaves the queue; the run can be resumed later"),
    ),
    Action(
        "runs.withdraw",
        _NOOP("Action", "Keep training"),
        "runs",
        "withdraw",
        (),
        "can_withdraw",
        icon="undo",
        tip=_NOOP("Action", "Cancels a pause or stop that the run has not started yet"),
    ),
    Action(
        "runs.resume",
        _NOOP("Action", "Resume"),
        "runs",
        "resume",
        (),
        "can_resume",
        icon="resume",
        tip=_NOOP("Action", "Continues from the last checkpoint when its turn in the queue comes"),
    ),
    Action("runs.folder", _NOOP("Action", "Open run folder"), "runs", "open_folder", (), "has_folder", icon="folder"),
)
_WHILE_ALIVE = ("runs.sample", "runs.save", "runs.pause", "runs.stop", "runs.withdraw")


class PhaseBar(QWidget):
    """Progress bar of one phase, below the phase's name and the amount done."""

    def __init__(self, phase: Phase, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.name = QCoreApplication.translate("Phases", _NAMES[phase])
        self.amount = ""
        self.part: float | None = 0.0
        """Completed fraction, from 0 to 1; None while the total is unknown."""
        self.current = False
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def show_state(self, amount: str, part: float | None, *, current: bool) -> None:
        """Show the phase's progress."""
        if (amount, part, current) != (self.amount, self.part, self.current):
            self.amount, self.part, self.current = amount, part, current
            percent = "" if part is None else QLocale().toString(round(100 * part)) + QLocale().percent()
            self.setAccessibleName(" ".join(filter(None, (self.name, percent, amount))))
            self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return a size that fits the name and the bar."""
        metrics = self.fontMetrics()
        return QSize(metrics.horizontalAdvance(self.name) + 12, metrics.height() + _BAR + 4)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the minimum size, at which a long name is elided."""
        return QSize(24, self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the name and the amount above the bar."""
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        metrics = self.fontMetrics()
        line = QRect(0, 0, self.width(), metrics.height())
        painter.setPen(QColor(colors().text if self.current else colors().muted))
        painter.drawText(line, int(Qt.AlignmentFlag.AlignLeft), self._cut(self.name, line.width()))
        left = line.width() - metrics.horizontalAdvance(self.name) - 8
        if metrics.horizontalAdvance(self.amount) <= left:
            painter.setPen(QColor(colors().muted))
            painter.drawText(line, int(Qt.AlignmentFlag.AlignRight), self.amount)
        room = QRectF(0.5, line.bottom() + 3.5, self.width() - 1, _BAR - 1)
        self._paint_bar(painter, room)
        painter.end()

    def _paint_bar(self, painter: QPainter, room: QRectF) -> None:
        painter.setPen(QColor(colors().edge))
        painter.setBrush(QColor(colors().base))
        painter.drawRoundedRect(room, _BAR / 2, _BAR / 2)
        part = _UNKNOWN if self.part is None else self.part
        if part > 0:
            painter.setBrush(QColor(colors().focus if self.current else colors().edge))
            painter.setPen(Qt.PenStyle.NoPen)
            filled = QRectF(room.left(), room.top(), max(room.height(), room.width() * part), room.height())
            painter.drawRoundedRect(filled, _BAR / 2, _BAR / 2)

    def _cut(self, text: str, width: int) -> str:
        return self.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, width)


class PhaseBars(QWidget):
    """Progress bars of the phases that the latest attempt has entered."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.bars: dict[Phase, PhaseBar] = {}
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(12)
        for phase in _NAMES:
            bar = self.bars[phase] = PhaseBar(phase)
            row.addWidget(bar, _TRAIN_WEIGHT if phase == "train" else 1)
            bar.hide()

    def show_run(self, run: Run | None) -> None:
        """Show a run's progress; None hides the bars."""
        phases = run.phases if run else {}
        for phase, bar in self.bars.items():
            state = phases.get(phase)
            bar.setVisible(state is not None)
            if run and state:
                current = run.alive and run.progress.current == phase
                bar.show_state(_amount(phase, state, run.now() if current else None), _part(state), current=current)
        self.setVisible(bool(phases))


def _part(state: PhaseState) -> float | None:
    if state.total:
        return min(1.0, state.done / state.total)
    return None if state.started is not None else 1.0


def _amount(phase: Phase, state: PhaseState, now: float | None) -> str:
    """Return a phase's amount as text: "completed / total" while it runs, its duration once it has ended.

    Training always shows "completed / total"; a running phase without a meaningful total shows its duration so far.
    `now` is the current time for a running phase, otherwise None.
    """
    if phase != "train" and now is None:
        return format_duration(state.seconds)
    if state.total is None or state.total <= 1:
        return format_duration(state.elapsed(now or 0.0)) if now else ""
    return f"{_units(phase, state.done)} / {_units(phase, state.total)}"


def _units(phase: Phase, number: int) -> str:
    if phase == "download":
        return QLocale().formattedDataSize(number, 1, QLocale.DataSizeFormat.DataSizeSIFormat)
    return QLocale().toString(number)


class RunHeader(QWidget):
    """Header of one run; it exchanges commands and answers with the engine through files in the run's folder."""

    message_shown = Signal(str)
    notified = Signal(str, str, object)
    """See `Page.notified`: message, kind and an optional action."""
    failed = Signal(object)

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._commands = session, commands
        self._run: Run | None = None
        self._ends: list[Callable[[], None]] = []
        self._orders = session.run_commands
        self._starting: Entry | None = None
        """Queue entry to show while it has no run yet, or None."""
        self._enabled: tuple[bool, ...] = ()
        self.name, self.state, self.facts = ElidedLabel(), QLabel(), QLabel()
        self.phases = PhaseBars()
        self.buttons: dict[str, QToolButton] = {}
        commands.add(ACTIONS, self)
        self._lay_out()
        until_destroyed(
            self,
            self._orders.answered.connect(lambda found: self._on_answered(*found)),
            self._orders.failed.connect(self.failed.emit),
            self._orders.changed.connect(lambda _: self._show()),
            session.queue.changed.connect(lambda _: self._show()),
        )
        self._show()

    def show_run(self, run: Run | None, starting: Entry | None = None) -> None:
        """Show a run or, if `run` is None, the queue entry `starting`; show nothing if both are None."""
        for end in self._ends:
            end()
        self._run, self._starting = run, starting
        self._ends = [run.polled.connect(lambda _: self._on_looked())] if run else []
        self._show()

    # --- which commands are enabled

    def has_folder(self) -> bool:
        """Return whether the run's folder still exists."""
        return self._run is not None and self._run.summary.missing is None

    def can_preview(self) -> bool:
        """Return whether the run is training, has preview prompts and has no pending preview command."""
        job = self._run.job if self._run else None
        return self.can_save("sample") and bool(job and job.report.previews.prompts)

    def can_save(self, name: CommandName = "save") -> bool:
        """Return whether the run is training and not ending, and the command `name` is not already pending."""
        run = self._run
        return bool(
            run and run.alive and "train" in run.phases and name not in self._pending_commands and not self._ending
        )

    def can_end(self) -> bool:
        """Return whether the run is active and not already ending."""
        return bool(self._run and self._run.alive and not self._ending)

    def can_withdraw(self) -> bool:
        """Return whether a command to end the run is pending and can still be withdrawn."""
        return bool(self._ending and not self._ending.accepted)

    def can_resume(self) -> bool:
        """Return whether the run can be resumed and is not already queued or starting."""
        return bool(self._run and self._run.resumable and not self._is_queued and not self._is_starting)

    @property
    def _pending_commands(self) -> set[CommandName]:
        return set(self._orders.waiting(self._run.directory)) if self._run else set()

    @property
    def _ending(self) -> Ending | None:
        """Command that will end the run, whether accepted by the engine or only requested; None if there is none."""
        run = self._run
        if run is None or not run.alive:
            return None
        # What the engine has confirmed comes first; a command that was only sent may still be withdrawn.
        request = next((entry.wish for entry in self._queue_entries if entry.state == "running" and entry.wish), None)
        name = self._orders.ending(run.directory) or request
        return run.summary.ending or (Ending(name, accepted=False) if name else None)

    @property
    def _queue_entries(self) -> list[Entry]:
        """Queue entries for this run."""
        path = self._run.directory.path if self._run else None
        return [entry for entry in self._session.queue.entries if path and entry.run == path]

    @property
    def _is_queued(self) -> bool:
        """Whether the run is waiting in the queue."""
        return any(entry.state == "waiting" for entry in self._queue_entries)

    @property
    def _is_starting(self) -> bool:
        """Whether the run's engine is starting, which takes a few seconds."""
        return bool(self._run and self._session.queue.is_starting(self._run.summary))

    # --- called by actions

    def preview_now(self) -> None:
        """Ask the engine for previews now."""
        self._send("sample")

    def save_now(self) -> None:
        """Ask the engine to save the LoRA now."""
        self._send("save")

    def pause(self) -> None:
        """Pause the run, which frees the GPU; it keeps its place in the queue."""
        self._send("pause")

    def stop(self) -> None:
        """Stop the run and save its LoRA."""
        self._send("stop")

    def withdraw(self) -> None:
        """Withdraw the pending command to pause or stop the run."""
        for entry in self._queue_entries:
            if entry.state == "running" and entry.wish:
                self._session.queue.withdraw(entry.id)
        if self._run:
            self._orders.withdraw(self._run.directory)

    def resume(self) -> None:
        """Queue the run to continue from its last checkpoint."""
        if self._run:
            self._session.queue.resume(self._run.directory.path)
            self.message_shown.emit(self.tr("{run} continues when its turn comes.").format(run=self._run.summary.name))

    def open_folder(self) -> None:
        """Open the run's folder in the system's file manager."""
        if self._run:
            open_folder(self._run.directory.path)

    def _send(self, name: CommandName) -> None:
        if self._run:
            self._orders.send(self._run.directory, name)

    def _on_answered(self, order: RunCommand, answer: CommandResult) -> None:
        """Report a command's result: success briefly in the status bar, failure as a notice that stays."""
        if answer.outcome == "done":
            self.message_shown.emit(self._done(order.name).format(run=order.run.name, detail=answer.detail))
            return
        if answer.outcome == "withdrawn":
            self.message_shown.emit(self.tr("{run} continues.").format(run=order.run.name))
            return
        title = self._commands[f"runs.{order.name}"].text()
        if answer.outcome == "void":
            words = self.tr("{run} ended before it received “{order}”.")
        elif answer.outcome == "refused":
            words = self.tr("{run} refused “{order}”: {detail}")
        else:
            words = self.tr("{run} could not carry out “{order}”: {detail}")
        self.notified.emit(words.format(run=order.run.name, order=title, detail=answer.detail), "warning", None)

    def _done(self, name: CommandName) -> str:
        return {
            "sample": self.tr("{run} has generated its previews."),
            "save": self.tr("{run} has saved {detail}."),
            "pause": self.tr("{run} is paused and its GPU memory is free."),
            "stop": self.tr("{run} is stopped and its LoRA is saved."),
        }[name]

    # --- state and progress

    def _on_looked(self) -> None:
        self._orders.look()
        self._show()

    def _show(self) -> None:
        run = self._run
        if self._starting and self._session.queue.entry(self._starting.id) is None:
            self._starting = None  # removed from the queue
        entry = self._starting
        self.name.setText(run.summary.name if run else entry.name if entry else self.tr("No run"))
        self.name.setToolTip(plain_tip(str(run.directory.path)) if run else "")
        self._show_state()
        self.phases.show_run(run)
        self.facts.setText(self._facts(run) if run else "")
        alive = bool(run and run.alive)
        for name, button in self.buttons.items():
            button.setVisible(run is not None and (name in _WHILE_ALIVE) == alive)
        self.buttons["runs.withdraw"].setVisible(self._ending is not None)
        self.buttons["runs.folder"].setVisible(self.has_folder())
        self.buttons["runs.resume"].setVisible(bool(run and run.resumable))
        can = (
            self.can_preview(),
            self.can_save(),
            self.can_end(),
            self.can_withdraw(),
            self.can_resume(),
            self.has_folder(),
        )
        if can != self._enabled:
            self._enabled = can
            self._commands.refresh()

    def _show_state(self) -> None:
        run, entry = self._run, self._starting and self._session.queue.entry(self._starting.id)
        state = run.summary.state if run else None
        if entry:
            is_starting = entry.state == "running"
            status = starting_word() if is_starting else entry_status(entry, time.time())
            set_message(self.state, status, state_color("running" if is_starting else "paused"))
            return
        if self._is_starting:
            set_message(self.state, starting_word(), state_color("running"))
            return
        words = [run_word(run.summary)] if run else []
        if self._is_queued:
            words.append(self.tr("queued"))
        if ending := self._ending:
            words = [ending_word(ending.name)]
        elif self._pending_commands:
            words.append(self._pending_words())
        set_message(self.state, " · ".join(words), state_color(state) if state else "muted")

    def _pending_words(self) -> str:
        if "sample" in self._pending_commands:
            return self.tr("preview requested")
        return self.tr("save requested")

    def _facts(self, run: Run) -> str:
        """Return one line with the known facts, such as the step, time left, speed, device and skipped steps."""
        number, summary, story = QLocale().toString, run.summary, run.progress
        step = max(summary.step, story.step.step if story.step else 0) if run.alive else summary.step
        parts = []
        if summary.steps:
            parts.append(self.tr("Step {step} of {steps}").format(step=number(step), steps=number(summary.steps)))
        if (left := run.seconds_left()) is not None:
            parts.append(self.tr("about {duration} left").format(duration=format_duration(left)))
        if run.alive and (speed := story.images_per_second):
            parts.append(self.tr("{speed} images/s").format(speed=QLocale().toString(speed, "g", 3)))
        if run.alive and (share := story.data_share) is not None:
            percent = QLocale().toString(100 * share, "f", 1)
            parts.append(self.tr("{percent}% waiting for data").format(percent=percent))
        if story.device:
            parts.append(self.tr("on {device}").format(device=self._device(run)))
        if story.attempt > 1:
            parts.append(self.tr("attempt {number}").format(number=number(story.attempt)))
        if story.skipped:
            parts.append(self.tr("%n step(s) skipped", "", story.skipped))
        return " · ".join(parts)

    def _device(self, run: Run) -> str:
        """Return the device's name: a GPU's model if the run has a forecast, otherwise a name such as “cuda:0”."""
        device = run.progress.device
        if device == "cpu":
            return self.tr("the CPU")
        return run.forecast.gpu if run.forecast and device.startswith("cuda") else device

    # --- the rest

    def _lay_out(self) -> None:
        for label, role in ((self.name, "title"), (self.state, "muted"), (self.facts, "muted")):
            label.setProperty("role", role)
            label.setTextFormat(Qt.TextFormat.PlainText)
        self.facts.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.facts.setMinimumWidth(1)
        row = QHBoxLayout()
        row.setSpacing(6)
        row.addWidget(self.name)
        row.addSpacing(8)
        row.addWidget(self.state)
        row.addStretch(1)
        for action in ACTIONS:
            row.addWidget(self._button(action.id))
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 10, 10, 8)
        column.setSpacing(6)
        column.addLayout(row)
        column.addWidget(self.phases)
        column.addWidget(self.facts)

    def _button(self, name: str) -> QToolButton:
        with_text, alone = Qt.ToolButtonStyle.ToolButtonTextBesideIcon, Qt.ToolButtonStyle.ToolButtonIconOnly
        button = self.buttons[name] = self._commands.button(name, alone if name == "runs.folder" else with_text)
        return button

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Enable the commands, which work only while the header is visible."""
        super().showEvent(event)
        self._commands.refresh()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Disable the commands, which work only while the header is visible."""
        super().hideEvent(event)
        self._commands.refresh()
