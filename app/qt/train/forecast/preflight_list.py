"""What stands in the way of a job, each thing with its remedy."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QCoreApplication, QSize, Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QToolButton, QVBoxLayout, QWidget

from app.core.jobs.settings import title_of
from app.core.planning.answer import Check
from app.qt.theme import set_icon
from app.qt.tips import plain_tip
from app.qt.train.forecast.clearing import clear
from trainer.errors import joined

_ICONS = {"error": ("error", "bad"), "warning": ("warning", "warning"), "info": ("info", "muted")}
_SHOWN = 12


class PreflightList(QWidget):
    """`wanted` with the key of a setting that the user wants to see."""

    wanted = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.checks: Sequence[Check] = ()
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(6)

    def show_checks(self, checks: Sequence[Check]) -> None:
        """Show these, the worst first."""
        if checks == self.checks and self._column.count():
            return
        self.checks = checks
        clear(self._column)
        if not checks:
            fine = QLabel(self.tr("Nothing stands in the way."))
            fine.setProperty("role", "good")
            self._column.addWidget(fine)
        for check in checks[:_SHOWN]:
            self._column.addWidget(self._line(check))
        if len(checks) > _SHOWN:
            more = QLabel(self.tr("and %n more", "", len(checks) - _SHOWN))
            more.setProperty("role", "muted")
            self._column.addWidget(more)

    def _line(self, check: Check) -> QWidget:
        line, mark = QWidget(), QToolButton()
        name, role = _ICONS[check.severity]
        set_icon(mark, name, role)
        mark.setIconSize(QSize(18, 18))
        mark.setAutoRaise(True)
        mark.setEnabled(True)
        if check.key:
            mark.setToolTip(self.tr("Go to {setting}").format(setting=title_of(check.key)))
            mark.setAccessibleName(mark.toolTip())
            mark.clicked.connect(lambda: self.wanted.emit(check.key))
        else:
            mark.setFocusPolicy(Qt.FocusPolicy.NoFocus)
            mark.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        remedy = QCoreApplication.translate("Preflight", check.remedy) if check.remedy else ""
        text = QLabel(joined(_told(check), remedy))
        text.setToolTip(plain_tip(check.key))
        text.setTextFormat(Qt.TextFormat.PlainText)
        text.setWordWrap(True)
        row = QHBoxLayout(line)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(mark, 0, Qt.AlignmentFlag.AlignTop)
        row.addWidget(text, 1)
        return line


def _told(check: Check) -> str:
    """Return what is to be said: "Rank: must be ...", for a setting stands beside its name elsewhere."""
    sentence = check.sentence
    if not check.key or not sentence:
        return sentence
    plain = sentence[1:2].islower()  # no name of something, such as SDXL
    return f"{title_of(check.key)}: {sentence[:1].lower() if plain else sentence[:1]}{sentence[1:]}"
