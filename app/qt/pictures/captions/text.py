"""The caption as free text, with what training does not read dimmed and a mark after every 75 tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from PySide6.QtCore import QEvent, QObject, QPoint, QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFocusEvent,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QTextCharFormat,
    QTextCursor,
)
from PySide6.QtWidgets import QPlainTextEdit, QTextEdit, QWidget

from app.core.tags.splitting import Lines
from app.core.tasks import Tasks, raise_again
from app.qt.theme import colours

CHUNK = 75
Limit = Literal[75, 150, 225]
LIMITS: tuple[Limit, ...] = (75, 150, 225)
_MOST = 20_000
"""Characters that are measured, in some 10 ms: ten times what training reads at most."""

_Ends = Callable[[str], list[int]]
_Holds = Callable[[str, str], bool]
_WIDTH = 2  # bytes of one of Qt's characters
_UNDO = (QKeySequence.StandardKey.Undo, QKeySequence.StandardKey.Redo)


@dataclass(frozen=True, slots=True)
class TokenCount:
    """One caption, or one line of it where each line is an alternative; places count characters of the whole text."""

    start: int
    end: int
    tokens: int
    """With the trigger word, where training puts it first."""
    marks: tuple[int, ...]
    """Where each row of the encoder ends, if more follows."""
    cut: int | None
    """Where training stops to read; None: it reads all."""
    trigger: bool = False
    """Whether the trigger word is counted."""


class Ruler(QObject):
    """Loads CLIP's vocabulary on a worker when it is first asked; until `ready` nothing is measured."""

    ready = Signal()

    def __init__(self, tasks: Tasks, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._tasks = tasks
        self._asked = False
        self._ends: _Ends | None = None
        self._holds: _Holds | None = None

    def measure(self, text: str, lines: Lines, limit: Limit, trigger: str = "") -> list[TokenCount] | None:
        """Return the measures of a caption, of each line that is an alternative; None: not loaded yet."""
        if self._ends is None:
            self._load()
            return None
        parts = _parts(text[:_MOST], lines)
        return [self._measure(part, start, limit, trigger) for start, part in parts]

    def _measure(self, text: str, start: int, limit: Limit, trigger: str) -> TokenCount:
        assert self._ends
        assert self._holds
        first = f"{trigger}, " if trigger and text.strip() and not self._holds(text, trigger) else ""
        ends = self._ends(first + text)
        # A row ends behind its last token. Where that is in the trigger word, the text is cut from its beginning.
        marks = [start + max(0, ends[place - 1] - len(first)) for place in range(CHUNK, len(ends), CHUNK)]
        cut = marks[limit // CHUNK - 1] if len(ends) > limit else None
        return TokenCount(start, start + len(text), len(ends), tuple(marks), cut, bool(first))

    def _load(self) -> None:
        if not self._asked:
            self._asked = True
            self._tasks.run(_loaded, self._have, raise_again)

    def _have(self, loaded: tuple[_Ends, _Holds]) -> None:
        self._ends, self._holds = loaded
        self.ready.emit()


def _loaded() -> tuple[_Ends, _Holds]:
    from trainer.dataset.sampling import holds_trigger
    from trainer.files.tokens import ClipTokens

    return ClipTokens().ends, holds_trigger


def _parts(text: str, lines: Lines) -> list[tuple[int, str]]:
    if lines == "caption":
        return [(0, text)]
    found, start = [], 0
    for row in text.splitlines(keepends=True):
        if row.strip():
            found.append((start, row.rstrip("\n")))
        start += len(row)
    return found or [(0, "")]


class CaptionText(QPlainTextEdit):
    """Keeps its text character by character: Qt's own would come back with other spaces and line ends.

    Undo and redo are the app's, not the field's. Ctrl+Up and Ctrl+Down step between pictures, Escape leaves.
    """

    edited = Signal(str)
    """The user wrote; with the whole text."""
    stepped = Signal(int)
    left = Signal()
    paused = Signal()
    """The keyboard went elsewhere."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._text = b""  # as Qt counts: UTF-16
        self._showing = False
        self._measured: Sequence[TokenCount] = ()
        self.setUndoRedoEnabled(False)
        self.setTabChangesFocus(True)
        self.setAccessibleName(self.tr("Caption"))
        self.setAccessibleDescription(self.tr("The whole caption as text; the tags above are the same words"))
        self.document().contentsChange.connect(self._follow)

    @property
    def text(self) -> str:
        """The text."""
        return self._text.decode("utf-16-le", "surrogatepass")

    def show_text(self, text: str) -> None:
        """Show another text; the cursor stays where it was, as far as the text reaches."""
        if text == self.text:
            return
        place = self.textCursor().position()
        self._showing = True
        self.setPlainText(text)
        self._showing = False
        self._text = text.encode("utf-16-le", "surrogatepass")
        cursor = self.textCursor()
        cursor.setPosition(min(place, self.document().characterCount() - 1))
        self.setTextCursor(cursor)
        self.mark(())

    def mark(self, measured: Sequence[TokenCount]) -> None:
        """Show where the rows of the text encoder end, and dim what training does not read."""
        self._measured = measured
        look = QTextCharFormat()
        look.setForeground(QColor(colours().muted))
        look.setBackground(QColor(colours().hover))
        text = self.text
        dimmed = [self._selection(text, one.cut, one.end, look) for one in measured if one.cut is not None]
        self.setExtraSelections(dimmed)
        self.viewport().update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return room for four lines."""
        return QSize(200, 4 * self.fontMetrics().lineSpacing() + 20)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return room for two lines."""
        return QSize(80, 2 * self.fontMetrics().lineSpacing() + 20)

    def event(self, event: QEvent) -> bool:
        """Leave undo and redo to the window."""
        if (
            event.type() == QEvent.Type.ShortcutOverride
            and isinstance(event, QKeyEvent)
            and any(map(event.matches, _UNDO))
        ):
            event.ignore()
            return False
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """See the class."""
        control = bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
        if control and event.key() in (Qt.Key.Key_Up, Qt.Key.Key_Down):
            self.stepped.emit(1 if event.key() == Qt.Key.Key_Down else -1)
        elif event.key() == Qt.Key.Key_Escape:
            self.left.emit()
        elif any(map(event.matches, _UNDO)):
            event.ignore()
        else:
            super().keyPressEvent(event)

    def focusOutEvent(self, event: QFocusEvent) -> None:  # noqa: N802
        """End the edit that typing is."""
        super().focusOutEvent(event)
        self.paused.emit()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw the marks over the text."""
        super().paintEvent(event)
        painter = QPainter(self.viewport())
        text = self.text
        for one in self._measured:
            for number, place in enumerate(one.marks, start=1):
                look = colours().bad if place == one.cut else colours().focus
                self._draw_mark(painter, qt_place(text, place), str(number * CHUNK), QColor(look))

    def _draw_mark(self, painter: QPainter, place: int, number: str, ink: QColor) -> None:
        cursor = QTextCursor(self.document())
        cursor.setPosition(min(place, self.document().characterCount() - 1))
        box = self.cursorRect(cursor)
        painter.fillRect(box.left(), box.top(), 2, box.height(), ink)
        font = painter.font()
        font.setPointSizeF(max(5.0, self.font().pointSizeF() * 0.65))
        painter.setFont(font)
        painter.setPen(ink)
        painter.drawText(QPoint(box.left() + 4, box.top() + painter.fontMetrics().ascent() - 3), number)

    def _selection(self, text: str, start: int, end: int, look: QTextCharFormat) -> QTextEdit.ExtraSelection:
        made = QTextEdit.ExtraSelection()
        cursor = QTextCursor(self.document())
        last = self.document().characterCount() - 1
        cursor.setPosition(min(qt_place(text, start), last))
        cursor.setPosition(min(qt_place(text, end), last), QTextCursor.MoveMode.KeepAnchor)
        made.cursor, made.format = cursor, look
        return made

    def _follow(self, place: int, removed: int, added: int) -> None:
        """Do to our text what was done to Qt's."""
        if self._showing:
            return
        # Qt's ends of paragraphs are line ends here. Some changes count the document's own last end, which is none.
        raw = self.document().toRawText().replace("\u2029", "\n").encode("utf-16-le", "surrogatepass")
        start = place * _WIDTH
        new = raw[start : start + added * _WIDTH]
        text = self._text[:start] + new + self._text[start + removed * _WIDTH :]
        if text != self._text:
            self._text = text
            self.edited.emit(self.text)


def qt_place(text: str, place: int) -> int:
    """Return a place in the text as Qt counts it: emoji and rare characters count twice."""
    return len(text[:place].encode("utf-16-le", "surrogatepass")) // _WIDTH
