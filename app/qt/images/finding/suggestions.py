"""Drop-down list of suggestions below a text field."""

from __future__ import annotations

from PySide6.QtCore import QAbstractListModel, QModelIndex, QPersistentModelIndex, QPoint, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QPainter, QPalette
from PySide6.QtWidgets import QListView, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.core.query.completion import Proposal

_Index = QModelIndex | QPersistentModelIndex
_MOST = 12
_GAP = 12


class ProposalModel(QAbstractListModel):
    """List model of the current suggestions."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.proposals: list[Proposal] = []

    def show(self, proposals: list[Proposal]) -> None:
        """Replace the suggestions."""
        self.beginResetModel()
        self.proposals = proposals
        self.endResetModel()

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008, N802
        """Return the number of suggestions."""
        return 0 if parent.isValid() else len(self.proposals)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        """Return the suggested text; for screen readers, with its description."""
        if not index.isValid():
            return None
        proposal = self.proposals[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return proposal.text
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return f"{proposal.text}, {self.reason(index)}"
        return None

    def reason(self, index: _Index) -> str:
        """Return the description of a suggestion."""
        proposal = self.proposals[index.row()]
        if proposal.images is None:
            return proposal.sentence
        return self.tr("%n image(s)", "", proposal.images)


class _Delegate(QStyledItemDelegate):
    """Delegate that paints the text on the left and a muted description on the right."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        model = index.model()
        assert isinstance(model, ProposalModel)
        chosen = bool(option.state & QStyle.StateFlag.State_Selected)
        palette, inside = option.palette, option.rect.adjusted(8, 0, -8, 0)
        if chosen:
            painter.fillRect(option.rect, palette.color(QPalette.ColorRole.Highlight))
        ink = palette.color(QPalette.ColorRole.HighlightedText if chosen else QPalette.ColorRole.Text)
        quiet = ink if chosen else palette.color(QPalette.ColorRole.PlaceholderText)
        text = model.data(index)
        width = option.fontMetrics.horizontalAdvance(str(text)) + _GAP
        self._write(painter, inside, ink, str(text), Qt.AlignmentFlag.AlignLeft)
        self._write(painter, inside.adjusted(width, 0, 0, 0), quiet, model.reason(index), Qt.AlignmentFlag.AlignRight)

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return the size of a row with padding."""
        model = index.model()
        assert isinstance(model, ProposalModel)
        measure = option.fontMetrics.horizontalAdvance
        width = measure(str(model.data(index))) + measure(model.reason(index)) + 16 + 3 * _GAP
        return QSize(width, option.fontMetrics.height() + 8)

    def _write(self, painter: QPainter, place: QRect, ink: QColor, text: str, side: Qt.AlignmentFlag) -> None:
        painter.setPen(ink)
        text = painter.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, place.width())
        painter.drawText(place, side | Qt.AlignmentFlag.AlignVCenter, text)


class ProposalList(QListView):
    """Drop-down list inside the window, below the anchor widget, which keeps the focus."""

    accepted = Signal(object)
    """The user clicked this `Proposal`."""

    def __init__(self, anchor: QWidget) -> None:
        super().__init__(anchor)
        self._anchor = anchor
        self.proposals = ProposalModel(self)
        self.setModel(self.proposals)
        self.setItemDelegate(_Delegate(self))
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setStyleSheet("QListView { border: 1px solid palette(dark); }")
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(self.tr("Suggestions"))
        self.clicked.connect(lambda index: self.accepted.emit(self.proposals.proposals[index.row()]))
        self.hide()

    def show_suggestions(self, proposals: list[Proposal]) -> None:
        """Show these suggestions with none selected; hide the list if there are none."""
        self.proposals.show(proposals)
        if not proposals:
            self.hide()
            return
        window = self._anchor.window()
        if self.parent() is not window:
            self.setParent(window)
        rows = min(len(proposals), _MOST)
        height = self.sizeHintForRow(0) * rows + 2 * self.frameWidth() + 2
        place = self._anchor.mapTo(window, QPoint(0, self._anchor.height() + 2))
        room = window.width() - place.x() - 8
        width = min(room, max(self._anchor.width(), self.sizeHintForColumn(0) + 24))
        self.setGeometry(place.x(), place.y(), width, min(height, window.height() - place.y() - 8))
        self.show()
        self.raise_()

    def step(self, step: int) -> None:
        """Select the next or previous suggestion, wrapping around."""
        count = self.proposals.rowCount()
        row = self.currentIndex().row()
        start = row if row >= 0 else (-1 if step > 0 else 0)
        self.setCurrentIndex(self.proposals.index((start + step) % count))

    @property
    def chosen(self) -> Proposal | None:
        """Return the selected suggestion, or None."""
        row = self.currentIndex().row()
        return self.proposals.proposals[row] if 0 <= row < len(self.proposals.proposals) else None
