"""From the Start button to the run: the job goes into the queue, and the Runs page shows it at once."""

from __future__ import annotations

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QMessageBox, QWidget

from app.core.jobs.draft import Draft
from app.core.jobs.job_file import to_toml
from app.core.session import Session
from app.qt.train.forecast.panel import ForecastPanel
from app.qt.widgets import duration, until_destroyed, while_there
from trainer.errors import ImpastoError, JobError
from trainer.protocol.queue import Entry

# A job that is forecast to take longer than this on the CPU is started only once the user has agreed.
LONG_ON_CPU = 600.0


class JobStarter(QObject):
    """Knows what was started here and has no run yet."""

    said = Signal(str)
    told = Signal(str, str, object)
    mended = Signal(object)
    """As of `Page`."""
    failed = Signal(object)
    changed = Signal()
    """What is awaited is another now."""

    def __init__(self, session: Session, page: QWidget, forecast: ForecastPanel) -> None:
        super().__init__(page)
        self._session, self._page, self._forecast = session, page, forecast
        self._settling: list[Draft] = []
        """Those whose last change is on its way to the disk."""
        self._undecided: list[tuple[Draft, str]] = []
        """Those whose forecast on the CPU, or whose user's decision, is awaited, and their text."""
        self._awaited: dict[str, Draft] = {}
        """By their entries in the queue."""
        self._asking: QMessageBox | None = None
        self._seen: set[str] = set()
        """Of these, those that the queue has shown."""
        self._waits: dict[str, tuple[str, bool]] = {}
        """What was told of entries that wait, and whether it was that the queue is held."""
        until_destroyed(
            self,
            session.queue.changed.connect(lambda _: self._follow()),
            session.queue.failed.connect(self._fail),
            forecast.forecaster.changed.connect(lambda _: self._decide()),
            session.jobs.closed.connect(lambda _: self._queue_unasked()),
        )

    def start(self, draft: Draft) -> None:
        """Put a job into the queue as it stands now, once its file says the same; where that fails, say so."""
        text = to_toml(draft.values)
        self._settling.append(draft)
        self.changed.emit()
        draft.file.settle(while_there(self, lambda error: self._settled(draft, text, error)))

    def awaits(self, draft: Draft) -> bool:
        """Tell whether a job was started here and nothing is known of it yet."""
        return any(
            each.path == draft.path
            for each in (*self._settling, *(undecided for undecided, _ in self._undecided), *self._awaited.values())
        )

    def look(self) -> None:
        """See whether a run has begun."""
        if self._awaited or self._waits:
            self._session.queue.look()

    def _settled(self, draft: Draft, text: str, error: JobError | None) -> None:
        self._settling.remove(draft)
        if error is None:
            self._undecided.append((draft, text))
            self._decide()
        else:
            self.failed.emit(error)
        self.changed.emit()

    def _decide(self) -> None:
        """Put what is not known to take long into the queue, and ask about the rest; wait for forecasts on the CPU."""
        for draft, text in tuple(self._undecided):
            if not self._session.jobs.agreed_to_cpu(draft.path) and self._forecast.awaits_cpu_seconds(draft):
                continue
            seconds = self._forecast.cpu_seconds(draft)
            if self._session.jobs.agreed_to_cpu(draft.path) or seconds is None or seconds <= LONG_ON_CPU:
                self._queue(draft, text)
            elif self._asking is None:
                self._ask(draft, text, seconds)

    def _queue_unasked(self) -> None:
        """Keep what was started when the app ends before a forecast is there; a question that is open is a no."""
        for draft, text in tuple(self._undecided):
            if self._forecast.awaits_cpu_seconds(draft):
                self._queue(draft, text)

    def _ask(self, draft: Draft, text: str, seconds: float) -> None:
        """Ask whether to train on the CPU for so long."""
        title = self.tr("Train on the CPU?")
        words = self.tr("“{name}” will take about {time} on this PC's CPU.")
        words = words.format(name=draft.name, time=duration(seconds))
        box = self._asking = QMessageBox(QMessageBox.Icon.Question, title, words, parent=self._page)
        why = self.tr("No NVIDIA GPU is used. You can pause or stop the training at any time.")
        box.setInformativeText(why)
        train = box.addButton(self.tr("Train on the CPU"), QMessageBox.ButtonRole.AcceptRole)
        leave = box.addButton(self.tr("Do not start"), QMessageBox.ButtonRole.RejectRole)
        box.setDefaultButton(leave)
        box.setEscapeButton(leave)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        box.finished.connect(lambda _: self._take_answer(draft, text, agreed=box.clickedButton() is train))
        box.open()

    def _take_answer(self, draft: Draft, text: str, *, agreed: bool) -> None:
        self._asking = None
        if agreed:
            self._session.jobs.agree_to_cpu(draft.path)
            self._queue(draft, text)
        else:
            self._undecided.remove((draft, text))
            self.changed.emit()
        self._decide()

    def _queue(self, draft: Draft, text: str) -> None:
        self._undecided.remove((draft, text))
        number = self._session.queue.start(draft.path, text)
        self._awaited[number] = draft
        self._session.telling.awaited.add(number)
        self._session.going.entry.emit(number)
        if not (self._session.queue.now.reading.held or self._busy()):
            self.said.emit(self.tr("“{name}” starts…").format(name=draft.name))
        self.changed.emit()

    def _follow(self) -> None:
        queue, busy = self._session.queue, self._busy()
        self._take_back()
        for number in tuple(self._awaited):
            entry = queue.entry(number)
            if entry is not None:
                self._seen.add(number)
                self._tell(entry, busy)
            elif number in self._seen:
                self._forget(number)  # somebody took it out of the queue

    def _tell(self, entry: Entry, busy: bool) -> None:
        """Say what became of a job that was started, as soon as anything is known."""
        name, now = self._awaited[entry.id].name, self._session.queue.now
        if entry.run is not None:
            self._forget(entry.id)  # the Runs page shows it
            return
        if entry.problem or entry.state == "failed":
            words = self.tr("“{name}” could not begin. {why}")
            self.told.emit(words.format(name=name, why=entry.problem).strip(), "error", None)
        elif now.reading.held:
            words = self.tr("“{name}” is in the queue, which is held: nothing more begins until it goes on. {reason}")
            sentence = words.format(name=name, reason=now.reading.reason).strip()
            self._waits[entry.id] = sentence, True
            self.told.emit(sentence, "warning", (self.tr("Go on"), self._session.queue.go_on))
        elif busy:
            sentence = self.tr("“{name}” waits in the queue: it begins when what runs now has ended.").format(name=name)
            self._waits[entry.id] = sentence, False
            self.told.emit(sentence, "info", None)
        elif now.died is None:
            return  # it is being looked at by the trainer
        self._forget(entry.id)

    def _busy(self) -> bool:
        """Tell whether something runs that was not started here just now."""
        return any(one.state == "running" and one.id not in self._awaited for one in self._session.queue.entries)

    def _take_back(self) -> None:
        """Take back what is no longer so: a job does not wait any more, or the queue is not held."""
        now = self._session.queue.now.reading
        for number, (sentence, held) in tuple(self._waits.items()):
            entry = now.find(number)
            if entry is None or entry.state != "waiting" or (held and not now.held):
                del self._waits[number]
                if all(other != sentence for other, _ in self._waits.values()):  # else a job of that name still waits
                    self.mended.emit(sentence)

    def _forget(self, number: str) -> None:
        self._awaited.pop(number)
        self._session.telling.awaited.discard(number)
        self._seen.discard(number)
        self.changed.emit()

    def _fail(self, error: ImpastoError) -> None:
        """Give up waiting for what never came into the queue."""
        unseen = [number for number in self._awaited if number not in self._seen]
        for number in unseen:
            self._forget(number)
        if unseen:
            self.failed.emit(error)
