"""This PC in a few lines: graphics card, room on the disk, and whether training works."""

from __future__ import annotations

from PySide6.QtCore import QLocale
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.core.first import CheckUp, Machine, this_machine
from app.core.tasks import Tasks, raise_again
from app.core.words import in_words
from app.qt.first.line import Line
from app.qt.parts import while_there
from app.qt.train.forecast.words import gigabytes

_ENOUGH_BYTES = 20 * 10**9
"""Room for a base or two, cached pictures and some runs; `doctor` has its own, lower, limit."""


class MachinePanel(QWidget):
    """Asks when it is made; `close_down` ends the asking."""

    def __init__(self, tasks: Tasks, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.card, self.disk, self.check = Line(), Line(), Line()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        for line in (self.card, self.disk, self.check):
            column.addWidget(line)
        self.card.say("waiting", self.tr("Looking for graphics cards…"))
        self.disk.hide()
        self.check.say("waiting", self.tr("Testing whether training works here. It takes some seconds…"))
        self._check_up = CheckUp(tasks.post)
        self._check_up.changed.connect(while_there(self, lambda _: self._tell_check()))
        tasks.run(this_machine, while_there(self, self._tell), raise_again)
        self._check_up.start()

    @property
    def done(self) -> bool:
        """Whether the test is over."""
        return self._check_up.done

    def close_down(self) -> None:
        """End the test: its answer is wanted no more."""
        self._check_up.close()

    def _tell(self, found: Machine) -> None:
        self._tell_cards(found)
        if found.free is not None:
            words = self.tr("{free} free for models and runs, on the disk of {folder}.")
            enough = found.free >= _ENOUGH_BYTES
            more = "" if enough else self.tr(" Bases and checkpoints of SDXL take gigabytes: make room soon.")
            self.disk.say(
                "good" if enough else "warning", words.format(free=_size(found.free), folder=found.folder) + more
            )
            self.disk.show()

    def _tell_cards(self, found: Machine) -> None:
        if found.fault:
            self.card.say("bad", found.fault)
            return
        if not found.cards:
            words = self.tr("No NVIDIA graphics card. Everything works, but real training is very slow without one.")
            self.card.say("info", words)
            return
        words = self.tr("{name}: {free} of {total} free, driver {driver}.")
        lines = [
            words.format(
                name=card.name, free=gigabytes(card.free_bytes), total=gigabytes(card.total_bytes), driver=card.driver
            )
            for card in found.cards
        ]
        self.card.say("good", "\n".join(lines))

    def _tell_check(self) -> None:
        check = self._check_up
        if check.problem:
            self.check.say("bad", self.tr("The test did not run: {why}").format(why=check.problem))
        elif check.worst and (check.done or check.worst[0].verdict == "broken"):
            broken = check.worst[0].verdict == "broken"
            told = "\n".join(map(in_words, check.worst))
            self.check.say("bad" if broken else "warning", told)
        elif check.done:
            self.check.say("good", self.tr("Training works here."))


def _size(size: int) -> str:
    return QLocale().formattedDataSize(size, 0, QLocale.DataSizeFormat.DataSizeSIFormat)
