"""Free-text caption field: marks the end of every 75 tokens and dims what training truncates."""

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
from app.core.tasks import Tasks, reraise
from app.qt.theme import colors

CHUNK = 75
Limit = Literal[75, 150, 225]
LIMITS: tuple[Limit, ...] = (75, 150, 225)
_MOST = 20_000
"""Maximum number of characters to tokenize: ten times what training can use; takes about 10 ms."""

_Ends = Callable[[str], list[int]]
_Holds = Callable[[str, str], bool]
_WIDTH = 2  # bytes of one of Qt's characters
_UNDO = (QKeySequence.StandardKey.Undo, QKeySequence.StandardKey.Redo)


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Token count of a caption, or of a line that is a separate caption; positions refer to the whole text."""

    start: int
    end: int
    tokens: int
    """Number of tokens, including the trigger word if training adds it."""
    marks: tuple[int, ...]
    """Positions at which a full chunk of 75 tokens ends and more tokens follow."""
    cut: int | None
    """Position at which training truncates the caption; None if it fits."""
    trigger: bool = False
    """Whether the trigger word is included in the count."""


class TokenCounter(QObject):
    """Token counter. The first call to `count` loads CLIP's vocabulary on a worker; `ready` means it is loaded."""

    ready = Signal()

    def __init__(self, tasks: Tasks, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._tasks = tasks
        self._requested = False
        self._ends: _Ends | None = None
        self._holds: _Holds | None = None

    def count(self, text: str, lines: Lines, limit: Limit, trigger: str = "") -> list[TokenCount] | None:
        """Return the token count of the caption, or of each line if every line is a separate caption.

        Returns None while the vocabulary is loading.
        """
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
        # A chunk ends after its last token. If that is inside the trigger word, the mark is at the start of the text.
        marks = [start + max(0, ends[place - 1] - len(first)) for place in range(CHUNK, len(ends), CHUNK)]
        cut = marks[limit // CHUNK - 1] if len(ends) > limit else None
        return TokenCount(start, start + len(text), len(ends), tuple(marks), cut, bool(first))

    def _load(self) -> None:
        if not self._requested:
            self._requested = True
            self._tasks.run(_load_tokenizer, self._on_loaded, reraise)

    def _on_loaded(self, loaded: tuple[_Ends, _Holds]) -> None:
        self._ends, self._holds = loaded
        self.ready.emit()


def _load_tokenizer() -> tuple[_Ends, _Holds]:
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
    """Text field that preserves the exact text; Qt itself would change some spaces and line endings.

    The window handles undo and redo. Ctrl+Up and Ctrl+Down change the image; Escape leaves the field.
    """

    edited = Signal(str)
    """The user changed the text; the argument is the whole text."""
    stepped = Signal(int)
    left = Signal()
    paused = Signal()
    """Emitted when the field loses the focus."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._text = b""  # UTF-16, so that offsets match Qt's
        self._showing = False
        self._measured: Sequence[TokenCount] = ()
        self.setUndoRedoEnabled(False)
        self.setTabChangesFocus(True)
        self.setAccessibleName(self.tr("Caption"))
        self.setAccessibleDescription(self.tr("The whole caption as text; the tags above show the same words"))
        self.document().contentsChange.connect(self._on_contents_change)

    @property
    def text(self) -> str:
        """Return the exact text."""
        return self._text.decode("utf-16-le", "surrogatepass")

    def show_text(self, text: str) -> None:
        """Replace the text, keeping the cursor position if possible."""
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
        """Show the chunk marks and dim what training truncates."""
        self._measured = measured
        look = QTextCharFormat()
        look.setForeground(QColor(colors().muted))
        look.setBackground(QColor(colors().hover))
        text = self.text
        dimmed = [self._selection(text, one.cut, one.end, look) for one in measured if one.cut is not None]
        self.setExtraSelections(dimmed)
        self.viewport().update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return space for four lines."""
        return QSize(200, 4 * self.fontMetrics().lineSpacing() + 20)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return space for two lines."""
        return QSize(80, 2 * self.fontMetrics().lineSpacing() + 20)

    def event(self, event: QEvent) -> bool:
        """Let the window handle undo and redo."""
        if (
            event.type() == QEvent.Type.ShortcutOverride
            and isinstance(event, QKeyEvent)
            and any(map(event.matches, _UNDO))
        ):
            event.ignore()
            return False
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Change the image, leave the field, or edit the text."""
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
        """Emit `paused`, which ends the current undo step."""
        super().focusOutEvent(event)
        self.paused.emit()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the chunk marks over the text."""
        super().paintEvent(event)
        painter = QPainter(self.viewport())
        text = self.text
        for one in self._measured:
            for number, place in enumerate(one.marks, start=1):
                look = colors().bad if place == one.cut else colors().focus
                self._draw_mark(painter, to_qt_position(text, place), str(number * CHUNK), QColor(look))

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
        selection = QTextEdit.ExtraSelection()
        cursor = QTextCursor(self.document())
        last = self.document().characterCount() - 1
        cursor.setPosition(min(to_qt_position(text, start), last))
        cursor.setPosition(min(to_qt_position(text, end), last), QTextCursor.MoveMode.KeepAnchor)
        selection.cursor, selection.format = cursor, look
        return selection

    def _on_contents_change(self, place: int, removed: int, added: int) -> None:
        """Apply a change in Qt's document to our exact text."""
        if self._showing:
            return
        # Qt separates paragraphs with U+2029. Some changes also count the document's final paragraph end, which is not
        # part of the text.
        raw = self.document().toRawText().replace("\u2029", "\n").encode("utf-16-le", "surrogatepass")
        start = place * _WIDTH  # Qt counts UTF-16 units, our bytes are two per unit
        new = raw[start : start + added * _WIDTH]
        text = self._text[:start] + new + self._text[start + removed * _WIDTH :]
        if text != self._text:
            self._text = text
            self.edited.emit(self.text)


def to_qt_position(text: str, place: int) -> int:
    """Convert a position to Qt's UTF-16 units, in which emoji and rare characters count twice."""
    return len(text[:place].encode("utf-16-le", "surrogatepass")) // _WIDTH
