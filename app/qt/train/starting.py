"""Start jobs: put them into the queue, and report their state until their runs exist."""

from __future__ import annotations

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QMessageBox, QWidget

from app.core.jobs.draft import Draft
from app.core.jobs.job_file import to_toml
from app.core.session import Session
from app.qt.train.forecast.panel import ForecastPanel
from app.qt.widgets import format_duration, until_destroyed, while_alive
from trainer.errors import ImpastoError, JobError
from trainer.protocol.queue import Entry

# Seconds on the CPU: a job that is forecast to take longer is started only after the user has agreed.
LONG_ON_CPU = 600.0


class JobStarter(QObject):
    """Queues jobs and tracks the ones that were started here until their runs exist."""

    message_shown = Signal(str)
    notified = Signal(str, str, object)
    resolved = Signal(object)
    """`message_shown`, `notified`, `resolved` and `failed` have the same meaning as in `Page`."""
    failed = Signal(object)
    changed = Signal()
    """Emitted when the set of jobs being started has changed."""

    def __init__(self, session: Session, page: QWidget, forecast: ForecastPanel) -> None:
        super().__init__(page)
        self._session, self._page, self._forecast = session, page, forecast
        self._saving: list[Draft] = []
        """Drafts whose last change is being saved."""
        self._undecided: list[tuple[Draft, str]] = []
        """Drafts that are waiting for a CPU forecast or the user's decision, each with its TOML text."""
        self._awaited: dict[str, Draft] = {}
        """Queued drafts without a run, by the ids of their queue entries."""
        self._question: QMessageBox | None = None
        self._listed: set[str] = set()
        """Ids of the awaited entries that the queue has listed at least once."""
        self._wait_notices: dict[str, tuple[str, bool]] = {}
        """Notices about waiting entries, by entry id: the text, and whether it says that the queue is on hold."""
        until_destroyed(
            self,
            session.queue.changed.connect(lambda _: self._on_queue_changed()),
            session.queue.failed.connect(self._on_queue_failed),
            forecast.forecaster.changed.connect(lambda _: self._queue_decided()),
            session.jobs.closed.connect(lambda _: self._on_closed()),
        )

    def start(self, draft: Draft) -> None:
        """Queue a job with its current values as soon as its file is saved; report an error if saving fails."""
        text = to_toml(draft.values)
        self._saving.append(draft)
        self.changed.emit()
        draft.file.settle(while_alive(self, lambda error: self._on_saved(draft, text, error)))

    def is_starting(self, draft: Draft) -> bool:
        """Return whether a job was started here and it is not yet known whether the start succeeds or fails."""
        return any(
            each.path == draft.path
            for each in (*self._saving, *(undecided for undecided, _ in self._undecided), *self._awaited.values())
        )

    def look(self) -> None:
        """Read the queue again if a job queued here has no run yet, or if a notice says that such a job is waiting."""
        if self._awaited or self._wait_notices:
            self._session.queue.look()

    def _on_saved(self, draft: Draft, text: str, error: JobError | None) -> None:
        self._saving.remove(draft)
        if error is None:
            self._undecided.append((draft, text))
            self._queue_decided()
        else:
            self.failed.emit(error)
        self.changed.emit()

    def _queue_decided(self) -> None:
        """Queue each undecided job, but ask the user first if training on the CPU would take long.

        Jobs whose CPU forecast is still pending stay undecided.
        """
        for draft, text in tuple(self._undecided):
            if not self._session.jobs.has_agreed_to_cpu(draft.path) and self._forecast.awaits_cpu_seconds(draft):
                continue
            seconds = self._forecast.cpu_seconds(draft)
            if self._session.jobs.has_agreed_to_cpu(draft.path) or seconds is None or seconds <= LONG_ON_CPU:
                self._queue(draft, text)
            elif self._question is None:
                self._ask(draft, text, seconds)

    def _on_closed(self) -> None:
        """Queue the jobs whose forecasts are pending when the app closes; an unanswered question counts as no."""
        for draft, text in tuple(self._undecided):
            if self._forecast.awaits_cpu_seconds(draft):
                self._queue(draft, text)

    def _ask(self, draft: Draft, text: str, seconds: float) -> None:
        """Ask whether to train on the CPU for this many seconds."""
        title = self.tr("Train on the CPU?")
        words = self.tr("“{name}” will take about {time} on this PC's CPU.")
        words = words.format(name=draft.name, time=format_duration(seconds))
        box = self._question = QMessageBox(QMessageBox.Icon.Question, title, words, parent=self._page)
        why = self.tr("No NVIDIA GPU is used. You can pause or stop the training at any time.")
        box.setInformativeText(why)
        train = box.addButton(self.tr("Train on the CPU"), QMessageBox.ButtonRole.AcceptRole)
        leave = box.addButton(self.tr("Do not start"), QMessageBox.ButtonRole.RejectRole)
        box.setDefaultButton(leave)
        box.setEscapeButton(leave)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        box.finished.connect(lambda _: self._on_answered(draft, text, agreed=box.clickedButton() is train))
        box.open()

    def _on_answered(self, draft: Draft, text: str, *, agreed: bool) -> None:
        self._question = None
        if agreed:
            self._session.jobs.agree_to_cpu(draft.path)
            self._queue(draft, text)
        else:
            self._undecided.remove((draft, text))
            self.changed.emit()
        self._queue_decided()

    def _queue(self, draft: Draft, text: str) -> None:
        self._undecided.remove((draft, text))
        number = self._session.queue.start(draft.path, text)
        self._awaited[number] = draft
        self._session.run_watcher.awaited.add(number)
        self._session.navigator.entry.emit(number)
        if not (self._session.queue.now.reading.held or self._busy()):
            self.message_shown.emit(self.tr("Starting “{name}”…").format(name=draft.name))
        self.changed.emit()

    def _on_queue_changed(self) -> None:
        queue, busy = self._session.queue, self._busy()
        self._clear_stale_notices()
        for number in tuple(self._awaited):
            entry = queue.entry(number)
            if entry is not None:
                self._listed.add(number)
                self._report(entry, busy)
            elif number in self._listed:
                self._forget(number)  # it was removed from the queue

    def _report(self, entry: Entry, busy: bool) -> None:
        """Notify the user if a started job failed or has to wait; stop tracking it as soon as its state is known."""
        name, now = self._awaited[entry.id].name, self._session.queue.now
        if entry.run is not None:
            self._forget(entry.id)  # the Runs page shows it
            return
        if entry.problem or entry.state == "failed":
            words = self.tr("“{name}” could not start. {why}")
            self.notified.emit(words.format(name=name, why=entry.problem).strip(), "error", None)
        elif now.reading.held:
            words = self.tr("“{name}” is queued, but the queue is on hold. {reason}")
            sentence = words.format(name=name, reason=now.reading.reason).strip()
            self._wait_notices[entry.id] = sentence, True
            self.notified.emit(sentence, "warning", (self.tr("Resume queue"), self._session.queue.resume_queue))
        elif busy:
            sentence = self.tr("“{name}” is queued; it starts when the current run ends.").format(name=name)
            self._wait_notices[entry.id] = sentence, False
            self.notified.emit(sentence, "info", None)
        elif now.died is None:
            return  # the engine is checking it
        self._forget(entry.id)

    def _busy(self) -> bool:
        """Return whether the queue is running an entry that was not just started here."""
        return any(one.state == "running" and one.id not in self._awaited for one in self._session.queue.entries)

    def _clear_stale_notices(self) -> None:
        """Remove notices that are outdated: the job is no longer waiting, or the queue is no longer on hold."""
        now = self._session.queue.now.reading
        for number, (sentence, held) in tuple(self._wait_notices.items()):
            entry = now.find(number)
            if entry is None or entry.state != "waiting" or (held and not now.held):
                del self._wait_notices[number]
                if all(
                    other != sentence for other, _ in self._wait_notices.values()
                ):  # else another job of that name still waits
                    self.resolved.emit(sentence)

    def _forget(self, number: str) -> None:
        self._awaited.pop(number)
        self._session.run_watcher.awaited.discard(number)
        self._listed.discard(number)
        self.changed.emit()

    def _on_queue_failed(self, error: ImpastoError) -> None:
        """Stop tracking the entries that the queue has never listed; report the error if there are any."""
        unseen = [number for number in self._awaited if number not in self._listed]
        for number in unseen:
            self._forget(number)
        if unseen:
            self.failed.emit(error)
