"""From the Start button to the run: the job goes into the queue, and the Runs page shows it at once."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QWidget

from app.core.jobs.draft import Draft
from app.core.jobs.values import to_toml
from app.core.session import Session
from app.qt.parts import until_destroyed, while_there
from trainer.errors import ImpastoError, JobError
from trainer.protocol.queue import Entry


class Starting(QObject):
    """Knows what was started here and has no run yet."""

    said = Signal(str)
    told = Signal(str, str, object)
    mended = Signal(object)
    """As of `Page`."""
    failed = Signal(object)
    changed = Signal()
    """What is awaited is another now."""

    def __init__(self, session: Session, page: QWidget) -> None:
        super().__init__(page)
        self._session, self._page = session, page
        self._settling: list[Draft] = []
        """Those whose last change is on its way to the disk."""
        self._awaited: dict[str, Draft] = {}
        """By their entries in the queue."""
        self._seen: set[str] = set()
        """Of these, those that the queue has shown."""
        self._waits: dict[str, tuple[str, bool]] = {}
        """What was told of entries that wait, and whether it was that the queue is held."""
        until_destroyed(
            self, session.queue.changed.connect(lambda _: self._follow()), session.queue.failed.connect(self._fail)
        )

    def start(self, draft: Draft) -> None:
        """Put a job into the queue as it stands now, once its file says the same; where that fails, say so."""
        text = to_toml(draft.values)
        self._settling.append(draft)
        self.changed.emit()
        draft.file.settle(while_there(self, lambda error: self._settled(draft, text, error)))

    def awaits(self, draft: Draft) -> bool:
        """Tell whether a job was started here and nothing is known of it yet."""
        return any(each.path == draft.path for each in (*self._settling, *self._awaited.values()))

    def look(self) -> None:
        """See whether a run has begun."""
        if self._awaited or self._waits:
            self._session.queue.look()

    def _settled(self, draft: Draft, text: str, error: JobError | None) -> None:
        self._settling.remove(draft)
        if error is None:
            number = self._session.queue.start(draft.path, text)
            self._awaited[number] = draft
            self._session.telling.awaited.add(number)
            self._session.going.entry.emit(number)
            if not (self._session.queue.now.reading.held or self._busy()):
                self.said.emit(self.tr("“{name}” starts…").format(name=draft.name))
        else:
            self.failed.emit(error)
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
