"""List of problems; each row has a severity icon and a word-wrapped sentence."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import (
    QAbstractListModel,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QRect,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QKeyEvent, QPainter, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QListView, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.core.health.findings import HealthFinding
from app.qt.theme import colors, icon

_Index = QModelIndex | QPersistentModelIndex
_ICONS = {"error": "error", "warning": "warning", "info": "info"}
_COLORS = {"error": "bad", "warning": "warning", "info": "muted"}
_SIDE, _GAP, _ABOVE = 10, 8, 7
_ICON = 18
_WRAP = int(Qt.TextFlag.TextWordWrap | Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop)


class FindingModel(QAbstractListModel):
    """List model of the current problems."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: tuple[HealthFinding, ...] = ()
        self._texts: tuple[tuple[str, str], ...] = ()

    def show(self, findings: Sequence[HealthFinding]) -> None:
        """Replace the problems; if they are of the same kinds in the same order, update only changed texts."""
        texts = tuple((one.code, one.sentence) for one in findings)
        codes = [code for code, _ in texts]
        if codes != [code for code, _ in self._texts]:
            self.beginResetModel()
            self.rows, self._texts = tuple(findings), texts
            self.endResetModel()
            return
        changed = [row for row, pair in enumerate(zip(texts, self._texts, strict=True)) if pair[0] != pair[1]]
        self.rows, self._texts = tuple(findings), texts
        for row in changed:
            self.dataChanged.emit(self.index(row), self.index(row))

    def index_of(self, code: str) -> QModelIndex:
        """Return the index of the problem with this code; an invalid index if there is none."""
        row = next((row for row, one in enumerate(self.rows) if one.code == code), -1)
        return self.index(row) if row >= 0 else QModelIndex()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: N802, B008 (Qt's signature)
        """Return the number of problems."""
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return the sentence, the tooltip, or the accessible description."""
        if not index.isValid():
            return None
        finding = self.rows[index.row()]
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            return finding.sentence
        if role == Qt.ItemDataRole.ToolTipRole:
            return "\n".join(filter(None, (finding.path_tooltip, finding.remedy)))
        if role == Qt.ItemDataRole.AccessibleDescriptionRole:
            return finding.remedy
        return None


class FindingDelegate(QStyledItemDelegate):
    """Delegate that paints a problem."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Paint background, icon and sentence."""
        scheme, finding = colors(), _finding(index)
        chosen = bool(option.state & QStyle.StateFlag.State_Selected)
        if chosen:
            painter.fillRect(option.rect, QColor(scheme.pressed))
            painter.fillRect(QRect(option.rect.topLeft(), QSize(3, option.rect.height())), QColor(scheme.focus))
        elif option.state & QStyle.StateFlag.State_MouseOver:
            painter.fillRect(option.rect, QColor(scheme.hover))
        corner = option.rect.topLeft()
        drawn = icon(_ICONS[finding.severity]).pixmap(QSize(_ICON, _ICON), painter.device().devicePixelRatio())
        tinted = QPainter(drawn)
        tinted.setCompositionMode(QPainter.CompositionMode.CompositionMode_SourceIn)
        tinted.fillRect(QRect(0, 0, _ICON, _ICON), QColor(getattr(scheme, _COLORS[finding.severity])))
        tinted.end()
        painter.drawPixmap(corner.x() + _SIDE, corner.y() + _ABOVE, drawn)
        painter.setFont(option.font)
        painter.setPen(QColor(scheme.text))
        painter.drawText(option.rect.adjusted(_indent(), _ABOVE, -_SIDE, 0), _WRAP, finding.sentence)

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return the size of a row; its height fits the sentence wrapped to the list's width."""
        view = option.widget
        width = view.viewport().width() if isinstance(view, QAbstractItemView) else option.rect.width()
        room = QRect(0, 0, max(width - _indent() - _SIDE, 40), 10_000)
        height = option.fontMetrics.boundingRect(room, _WRAP, _finding(index).sentence).height()
        return QSize(80, max(height, _ICON) + 2 * _ABOVE)


class FindingView(QListView):
    """List view of problems; emits `asked` when the user clicks one or presses Enter."""

    asked = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.findings = FindingModel(self)
        self.setModel(self.findings)
        self.setItemDelegate(FindingDelegate(self))
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setMouseTracking(True)
        self.setAccessibleName(self.tr("Problems"))
        self.setAccessibleDescription(self.tr("Enter shows the images with this problem"))
        self.clicked.connect(lambda _: self.asked.emit())

    @property
    def finding(self) -> HealthFinding | None:
        """Return the selected problem, or None."""
        row = self.currentIndex().row()
        return self.findings.rows[row] if 0 <= row < len(self.findings.rows) else None

    def show_findings(self, findings: Sequence[HealthFinding]) -> None:
        """Replace the problems, keeping the selection if possible."""
        code = self.finding.code if self.finding else ""
        self.findings.show(findings)
        place = self.findings.index_of(code)
        if place.isValid() and place != self.currentIndex():
            self.setCurrentIndex(place)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Emit `asked` on Enter."""
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.finding:
            self.asked.emit()
        else:
            super().keyPressEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Wrap the sentences to the new width."""
        super().resizeEvent(event)
        self.scheduleDelayedItemsLayout()


def _finding(index: _Index) -> HealthFinding:
    model = index.model()
    assert isinstance(model, FindingModel)
    return model.rows[index.row()]


def _indent() -> int:
    return _SIDE + _ICON + _GAP
