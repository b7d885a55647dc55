"""Notice bars above the page: messages that the user can act on without being interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from PySide6.QtCore import Qt
from PySide6.QtGui import QFontDatabase, QGuiApplication
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QFrame,
    QHBoxLayout,
    QLabel,
    QPlainTextEdit,
    QPushButton,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.settings.deferred_writer import DurableWriter
from app.core.words import full_message
from app.qt.theme import set_icon
from app.qt.widgets import close_row, icon_label, plain_label
from trainer.errors import ImpastoError

_ROLES: dict[Kind, str] = {"info": "link", "warning": "warning", "error": "bad"}
_MAX_BARS = 3
"""Maximum number of bars; beyond that, a new bar replaces the oldest."""


Kind = Literal["info", "warning", "error"]


class Notices(QWidget):
    """Stack of notice bars, newest last."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(0)
        self._bars: list[_NoticeBar] = []
        self.hide()

    def show_notice(
        self, sentence: str, kind: Kind = "info", act: tuple[str, Callable[[], object]] | None = None
    ) -> None:
        """Show a bar with this sentence, unless a bar already shows it.

        `act` is the (title, action) of a button, which also closes the bar.
        """
        if any(bar.sentence == sentence for bar in self._bars):
            return
        if len(self._bars) == _MAX_BARS:
            self._remove(self._bars[0])
        bar = _NoticeBar(sentence, kind, act[0] if act else None)
        if act and bar.act:
            bar.act.clicked.connect(lambda: self._run_action(bar, act[1]))
        bar.closing.clicked.connect(lambda: self._remove(bar))
        self._bars.append(bar)
        self._column.addWidget(bar)
        self.show()

    def show_error(self, error: ImpastoError) -> None:
        """Show a bar that says what happened and what the user can do."""
        self.show_notice(full_message(error), "error")

    def watch_files(self, *files: DurableWriter) -> None:
        """Show an error while any of these files cannot be written."""
        for file in files:
            file.failed.connect(self.show_error)
            file.resolved.connect(self.dismiss)

    def dismiss(self, notice: ImpastoError | str) -> None:
        """Remove the bar that shows this error or sentence."""
        sentence = notice if isinstance(notice, str) else full_message(notice)
        for bar in [bar for bar in self._bars if bar.sentence == sentence]:
            self._remove(bar)

    def sentences(self) -> list[str]:
        """Return the sentences of the bars that are shown."""
        return [bar.sentence for bar in self._bars]

    def _run_action(self, bar: _NoticeBar, act: Callable[[], object]) -> None:
        self._remove(bar)
        act()

    def _remove(self, bar: _NoticeBar) -> None:
        self._bars.remove(bar)
        bar.hide()
        bar.deleteLater()
        self.setVisible(bool(self._bars))


class _NoticeBar(QFrame):
    def __init__(self, sentence: str, kind: Kind, act: str | None) -> None:
        super().__init__()
        self.sentence = sentence
        self.setObjectName("notice")
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 6, 8, 6)
        row.setSpacing(10)
        place, words = icon_label(20), plain_label()
        set_icon(place, kind, _ROLES[kind])
        words.setText(sentence)
        words.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        row.addWidget(place)
        row.addWidget(words, 1)
        self.act = QPushButton(act) if act else None
        if self.act:
            row.addWidget(self.act)
        self.closing = QToolButton()
        self.closing.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.closing.setToolTip(self.tr("Close this notice"))
        self.closing.setAccessibleName(self.tr("Close this notice"))
        set_icon(self.closing, "close")
        row.addWidget(self.closing)


class CrashDialog(QDialog):
    """Dialog with the details of a crash and a button that copies them."""

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("What went wrong"))
        self.resize(720, 460)
        words = QLabel(self.tr("Your captions are safe: every edit is saved. To report this problem, copy the text."))
        words.setWordWrap(True)
        self.text = QPlainTextEdit(text)
        self.text.setReadOnly(True)
        self.text.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.text.setAccessibleName(self.windowTitle())
        buttons = close_row(self)
        self.copy = buttons.addButton(self.tr("Copy"), QDialogButtonBox.ButtonRole.ActionRole)
        self.copy.setAutoDefault(False)
        self.copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(text))
        column = QVBoxLayout(self)
        for widget in (words, self.text, buttons):
            column.addWidget(widget)
