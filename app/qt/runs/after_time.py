"""Asks when an entry of the queue shall begin."""

from __future__ import annotations

from PySide6.QtCore import QDateTime, QLocale, Qt, QTime
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QLabel, QVBoxLayout, QWidget

from app.qt.inputs import DateTimeEdit


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
