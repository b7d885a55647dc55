"""Chooser for a job's base: a base found on this PC or used before, a file, a link, or a Hub id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PySide6.QtCore import (
    QAbstractListModel,
    QEvent,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QRect,
    QRectF,
    QSize,
    Qt,
    QTimer,
    Signal,
)
from PySide6.QtGui import QColor, QFont, QFontMetrics, QHideEvent, QKeyEvent, QPainter
from PySide6.QtWidgets import (
    QDialog,
    QFileDialog,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QListView,
    QPushButton,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QVBoxLayout,
    QWidget,
)
from shiboken6 import isValid

from app.core.models.models import Models
from app.core.models.verdict import BaseDescription, BaseVerdict, FoundBase, cleaned
from app.core.session import Session
from app.qt.theme import colors
from app.qt.train.words import details, family_of, verdict_words
from app.qt.widgets import plain_label, plain_tip, set_message, until_destroyed

_Index = QModelIndex | QPersistentModelIndex
_MOVES = (Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_PageUp, Qt.Key.Key_PageDown)
_PAUSE = 250
"""Pause in typing after which the text is checked, in milliseconds."""
_SIDE, _GAP = 12, 8


@dataclass(frozen=True, slots=True)
class BaseRow:
    """Row in the list: a heading or a base, whose `text` is the value for `base.model`."""

    kind: Literal["heading", "base", "unusable"]
    name: str
    text: str = ""
    detail: str = ""
    badge: str = ""


def rows(
    found: Iterable[FoundBase], recent: Mapping[str, BaseVerdict | None], typed: str, titles: tuple[str, str, str]
) -> Iterator[BaseRow]:
    """Yield the rows that match the `typed` words, in groups with these `titles`: recent, on this PC, unusable.

    `recent` maps each recently used text to its verdict, which is None until the text has been checked. Unusable files
    are listed only if something was typed.
    """
    words = typed.casefold().split()
    known = {str(one.path): one for one in found}
    used = [_row(known[text]) if text in known else _recent_row(text, verdict) for text, verdict in recent.items()]
    others = [_row(one) for text, one in known.items() if text not in recent]
    usable = [row for row in others if row.kind == "base"]
    unusable = [row for row in others if row.kind == "unusable"] if words else []
    for title, group in zip(titles, (used, usable, unusable), strict=True):
        matching = [row for row in group if _matches(row, words)]
        if matching:
            yield BaseRow("heading", title)
            yield from matching


def _row(found: FoundBase) -> BaseRow:
    kind: Literal["base", "unusable"] = "unusable" if found.description.problem else "base"
    return BaseRow(kind, found.name, str(found.path), details(found), family_of(found.description))


def _recent_row(text: str, verdict: BaseVerdict | None) -> BaseRow:
    """Return the row of a recently used base that was not found in the searched folders."""
    if verdict is None:
        return BaseRow("base", text, text)
    base, path = verdict.description, Path(text)
    kind: Literal["base", "unusable"] = "unusable" if base.problem else "base"
    if verdict.place != "here":
        return BaseRow(kind, text, text, base.problem or verdict_words(verdict), family_of(base))
    name = path.stem if path.suffix.lower() == ".safetensors" else path.name
    detail = base.problem or " · ".join(filter(None, (verdict_words(verdict), str(path.parent))))
    return BaseRow(kind, name, text, detail, family_of(base))


def _matches(row: BaseRow, words: list[str]) -> bool:
    text = f"{row.name}\n{row.text}\n{row.detail}\n{row.badge}".casefold()
    return all(word in text for word in words)


class BaseRows(QAbstractListModel):
    """List model of the rows; headings and unusable files cannot be selected."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[BaseRow] = []

    def show(self, rows: Iterable[BaseRow]) -> None:
        """Show these rows."""
        self.beginResetModel()
        self.rows = list(rows)
        self.endResetModel()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802
        """Return the number of rows."""
        return 0 if parent.isValid() else len(self.rows)

    def flags(self, index: _Index) -> Qt.ItemFlag:
        """Return flags that make only bases selectable."""
        usable = index.isValid() and self.rows[index.row()].kind == "base"
        return (Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable) if usable else Qt.ItemFlag.NoItemFlags

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return a row's name, its value for `base.model` (also as a tooltip), or its text for screen readers."""
        if not index.isValid():
            return None
        row = self.rows[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return row.name
        if role == Qt.ItemDataRole.UserRole:
            return row.text
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(row.text)
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return ", ".join(part for part in (row.name, row.badge, row.detail) if part)
        return None

    def first(self) -> QModelIndex:
        """Return the index of the first base; invalid if there is none."""
        return next((self.index(n) for n, row in enumerate(self.rows) if row.kind == "base"), QModelIndex())


class BaseDelegate(QStyledItemDelegate):
    """Delegate that paints a base on two lines, with its family badge on the right."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Paint one row."""
        model = index.model()
        assert isinstance(model, BaseRows)
        row, scheme = model.rows[index.row()], colors()
        painter.save()
        inside = option.rect.adjusted(_SIDE, 0, -_SIDE, 0)
        if row.kind == "heading":
            painter.setFont(option.font)
            painter.setPen(QColor(scheme.muted))
            bottom = inside.adjusted(0, 0, 0, -4)
            painter.drawText(bottom, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignBottom, row.name)
        else:
            chosen = bool(option.state & QStyle.StateFlag.State_Selected)
            self._paint_background(painter, option, chosen)
            self._paint_lines(painter, option, inside, row, chosen)
        painter.restore()

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return a row's size."""
        model = index.model()
        assert isinstance(model, BaseRows)
        line = option.fontMetrics.height()
        return QSize(200, line + 16 if model.rows[index.row()].kind == "heading" else 2 * line + 14)

    def _paint_background(self, painter: QPainter, option: QStyleOptionViewItem, chosen: bool) -> None:
        scheme = colors()
        if chosen:
            painter.fillRect(option.rect, QColor(scheme.accent))
        elif option.state & QStyle.StateFlag.State_MouseOver and option.state & QStyle.StateFlag.State_Enabled:
            painter.fillRect(option.rect, QColor(scheme.hover))

    def _paint_lines(
        self, painter: QPainter, option: QStyleOptionViewItem, inside: QRect, row: BaseRow, chosen: bool
    ) -> None:
        scheme, metrics = colors(), option.fontMetrics
        if row.badge:
            inside.setRight(self._paint_badge(painter, option, inside, row.badge, chosen) - _GAP)
        usable = row.kind == "base"
        painter.setFont(option.font)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.text if usable else scheme.muted))
        name = metrics.elidedText(row.name, Qt.TextElideMode.ElideMiddle, inside.width())
        upper = Qt.AlignmentFlag.AlignTop if row.detail else Qt.AlignmentFlag.AlignVCenter
        lines = inside.adjusted(0, 6, 0, -6)
        painter.drawText(lines, Qt.AlignmentFlag.AlignLeft | upper, name)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.muted if usable else scheme.warning))
        mode = Qt.TextElideMode.ElideMiddle if usable else Qt.TextElideMode.ElideRight
        detail = metrics.elidedText(row.detail, mode, inside.width())
        painter.drawText(lines, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignBottom, detail)

    def _paint_badge(
        self, painter: QPainter, option: QStyleOptionViewItem, inside: QRect, words: str, chosen: bool
    ) -> int:
        """Paint the badge on the right and return its left edge."""
        scheme = colors()
        font = QFont(option.font)
        font.setWeight(QFont.Weight.DemiBold)
        metrics = QFontMetrics(font)
        size = QSize(metrics.horizontalAdvance(words) + 16, metrics.height() + 4)
        place = QRect(inside.right() - size.width(), inside.center().y() - size.height() // 2, *size.toTuple())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.edge))
        painter.setBrush(Qt.BrushStyle.NoBrush if chosen else QColor(scheme.raised))
        painter.drawRoundedRect(QRectF(place).adjusted(0.5, 0.5, -0.5, -0.5), 4, 4)
        painter.setFont(font)
        painter.setPen(QColor(scheme.on_accent if chosen else scheme.text))
        painter.drawText(place, Qt.AlignmentFlag.AlignCenter, words)
        return place.left()


class BaseDialog(QDialog):
    """Dialog with the bases on this PC; when accepted, `text` is the value for `base.model`."""

    def __init__(self, models: Models, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._models = models
        self.text = ""
        self.setWindowTitle(self.tr("Choose a base"))
        self.resize(680, 540)
        self.field, self.list, self.rows = QLineEdit(), QListView(), BaseRows(self)
        self.state, self.use = QLabel(), QPushButton(self.tr("Use this base"))
        self.file = QPushButton(self.tr("Choose a file…"))
        self.folder = QPushButton(self.tr("Add a folder…"))
        self.again = QPushButton(self.tr("Search again"))
        self._build()
        self._listen()
        models.search()
        models.look_at_recent()
        self._fill()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Pass arrow and page keys to the list while the search field keeps the focus."""
        if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress and event.key() in _MOVES:
            self.list.keyPressEvent(event)
            return True
        return super().eventFilter(watched, event)

    def choose_file(self) -> None:
        """Ask for a model file, then accept the dialog with it."""
        words = self.tr("Choose a base")
        path, _ = QFileDialog.getOpenFileName(self, words, "", self.tr("Models (*.safetensors);;All files (*)"))
        if path:
            self._take(str(Path(path)))

    def add_folder(self) -> None:
        """Ask for a folder to search for models, now and in the future."""
        folder = QFileDialog.getExistingDirectory(self, self.tr("Choose a folder with models, or the folder of a tool"))
        if folder:
            self._models.add_folder(Path(folder))

    def _build(self) -> None:
        self.field.setPlaceholderText(self.tr("Search by name, folder, tool or family"))
        self.field.setAccessibleName(self.tr("Search for a base"))
        self.field.setClearButtonEnabled(True)
        self.list.setAccessibleName(self.tr("Bases"))
        self.list.setModel(self.rows)
        self.list.setItemDelegate(BaseDelegate(self.list))
        self.list.setMouseTracking(True)
        self.list.setVerticalScrollMode(QListView.ScrollMode.ScrollPerPixel)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.state.setProperty("role", "muted")
        self.state.setWordWrap(True)
        self.use.setDefault(True)
        for button in (self.file, self.folder, self.again):
            button.setAutoDefault(False)
        self.folder.setToolTip(self.tr("Models are used in place; nothing is copied or moved"))
        row = QHBoxLayout()
        for button in (self.file, self.folder, self.again):
            row.addWidget(button)
        row.addStretch()
        row.addWidget(self.use)
        column = QVBoxLayout(self)
        for part in (self.field, self.list, self.state):
            column.addWidget(part)
        column.addLayout(row)

    def _listen(self) -> None:
        until_destroyed(self, self._models.changed.connect(lambda _: self._fill()))
        self.field.textChanged.connect(lambda _: self._fill())
        self.field.installEventFilter(self)
        self.list.selectionModel().currentChanged.connect(lambda *_: self._update_state())
        self.list.activated.connect(lambda index: self._choose(index))
        self.use.clicked.connect(lambda: self._choose(self.list.currentIndex()))
        self.file.clicked.connect(lambda: self.choose_file())
        self.folder.clicked.connect(lambda: self.add_folder())
        self.again.clicked.connect(lambda: self._models.search(again=True))

    def _fill(self) -> None:
        """Show the matching rows and keep the current row selected if it still matches."""
        before = self.list.currentIndex().data(Qt.ItemDataRole.UserRole)
        titles = (self.tr("Recently used"), self.tr("On this PC"), self.tr("Cannot be used as a base"))
        used = {text: self._models.judged.get(text) for text in self._models.recent}
        self.rows.show(rows(self._models.bases, used, self.field.text(), titles))
        kept = self.rows.match(self.rows.index(0), Qt.ItemDataRole.UserRole, before, 1, Qt.MatchFlag.MatchExactly)
        self.list.setCurrentIndex(kept[0] if before and kept else self.rows.first())
        self._update_state()

    def _update_state(self) -> None:
        self.use.setEnabled(self.list.currentIndex().isValid())
        self.again.setEnabled(not self._models.is_searching)
        self.state.setText(self._words())

    def _words(self) -> str:
        usable = sum(not one.description.problem for one in self._models.bases)
        others = len(self._models.bases) - usable
        if self._models.is_searching:
            return self.tr("Searching this PC… %n base(s) so far.", "", usable)
        words = self.tr("%n base(s) on this PC.", "", usable)
        if others and not self.field.text():
            more = self.tr("%n unusable file(s): search for one to see why.", "", others)
            return f"{words} {more}"
        return words

    def _choose(self, index: QModelIndex) -> None:
        if index.isValid() and index.flags() & Qt.ItemFlag.ItemIsSelectable:
            self._take(str(index.data(Qt.ItemDataRole.UserRole)))

    def _take(self, text: str) -> None:
        self.text = text
        self.accept()


class BasePicker(QWidget):
    """Field for the base, with a verdict below that is updated while the user types."""

    chosen = Signal(str)
    """Value for `base.model`: chosen in the dialog, confirmed with Enter or Tab, or typed and valid."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._models = session.models
        self._settled = ""
        self._requested = ""
        self._by_user = False
        self.verdict = BaseVerdict("", "nowhere", BaseDescription())
        """Verdict of the last check of the field's text."""
        self.field, self.badge, self.state = QLineEdit(), QLabel(), plain_label()
        self.button = QPushButton(self.tr("Choose…"))
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(_PAUSE)
        self._build()
        self._timer.timeout.connect(lambda: self._ask())
        self.field.textEdited.connect(lambda _: self._timer.start())
        self.field.editingFinished.connect(lambda: self._settle(cleaned(self.field.text())))
        self.button.clicked.connect(lambda: self.choose())
        self._show(self.verdict)

    def set_base(self, text: str) -> None:
        """Show this base without emitting `chosen`."""
        self._settled = text
        self._by_user = False
        self._write(text)

    def choose(self) -> None:
        """Open the dialog with all bases on this PC."""
        dialog = BaseDialog(self._models, self)
        dialog.accepted.connect(lambda: self._accept_choice(dialog.text))
        dialog.finished.connect(dialog.deleteLater)
        dialog.open()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Accept text that was being typed, because the field disappears."""
        if self._timer.isActive():
            self._timer.stop()
            self._settle(cleaned(self.field.text()))
        super().hideEvent(event)

    def _build(self) -> None:
        self.field.setAccessibleName(self.tr("Base"))
        self.field.setPlaceholderText(self.tr("A .safetensors file, an https link, or a Hugging Face id"))
        self.badge.setProperty("role", "badge")
        self.badge.setAccessibleName(self.tr("Family of the base"))
        self.button.setAccessibleName(self.tr("Choose a base on this PC"))
        self.button.setAutoDefault(False)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.field, 1)
        row.addWidget(self.badge)
        row.addWidget(self.button)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(5)
        column.addLayout(row)
        column.addWidget(self.state)
        self.setFocusProxy(self.field)

    def _accept_choice(self, text: str) -> None:
        self._write(text)
        self._settle(text)

    def _write(self, text: str) -> None:
        self._timer.stop()
        self.field.setText(text)
        self._ask()

    def _settle(self, text: str) -> None:
        """Accept the text as the user's choice."""
        self._timer.stop()
        self._by_user = True
        if text != self._settled:
            self._settled = text
            self.chosen.emit(text)
        if text == self.verdict.text:
            self._remember()
        elif text != self._requested:
            self._ask()

    def _ask(self) -> None:
        """Start checking the field's text."""
        self._requested = cleaned(self.field.text())
        self._models.judge(self._requested, self._on_verdict)

    def _on_verdict(self, verdict: BaseVerdict) -> None:
        """Show a verdict, unless the field's text has changed since."""
        # The verdict comes from a worker: by now the field may be destroyed or contain another text.
        if not isValid(self) or verdict.text != self._requested:
            return
        self.verdict = verdict
        self._show(verdict)
        if verdict.text == self._settled:
            self._remember()
        elif _is_whole(verdict) and not verdict.description.problem:
            self._settle(verdict.text)

    def _remember(self) -> None:
        if self._by_user and self.verdict.place != "nowhere" and not self.verdict.description.problem:
            self._models.add_recent(self.verdict.text)

    def _show(self, verdict: BaseVerdict) -> None:
        self.badge.setText(family_of(verdict.description))
        self.badge.setVisible(bool(verdict.description.family))
        words = verdict_words(verdict)
        set_message(self.state, words, "bad" if verdict.description.problem else "muted")
        self.field.setAccessibleDescription(words)


def _is_whole(verdict: BaseVerdict) -> bool:
    """Return whether a valid base was certainly typed in full; a Hub id or a link may still be incomplete."""
    return verdict.place == "here" or (verdict.place == "link" and verdict.text.lower().endswith(".safetensors"))
