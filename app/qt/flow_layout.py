"""Lays widgets out in rows, as words are laid out in lines, so that a row of buttons makes no window too wide."""

from __future__ import annotations

from PySide6.QtCore import QPoint, QRect, QSize, Qt
from PySide6.QtWidgets import QLayout, QLayoutItem

from app.qt.pictures.captions.flow import flow


class FlowLayout(QLayout):
    """As wide as its widest widget at least, and as high as its rows are at the width that it gets."""

    def __init__(self, gap: int) -> None:
        super().__init__()
        self._items: list[QLayoutItem] = []
        self.setSpacing(gap)

    def addItem(self, item: QLayoutItem) -> None:  # noqa: N802
        """Put another thing at the end."""
        self._items.append(item)

    def count(self) -> int:
        """Return how many things there are."""
        return len(self._items)

    def itemAt(self, index: int) -> QLayoutItem | None:  # noqa: N802 - Qt asks beyond the end
        """Return one of them; None where there is none."""
        return self._items[index] if 0 <= index < len(self._items) else None

    def takeAt(self, index: int) -> QLayoutItem | None:  # noqa: N802
        """Take one out."""
        return self._items.pop(index) if 0 <= index < len(self._items) else None

    def expandingDirections(self) -> Qt.Orientation:  # noqa: N802
        """Take no more room than needed."""
        return Qt.Orientation(0)

    def hasHeightForWidth(self) -> bool:  # noqa: N802
        """Be the higher the narrower it is."""
        return True

    def heightForWidth(self, width: int) -> int:  # noqa: N802
        """Return how high all rows are."""
        around = self.contentsMargins()
        inner = width - around.left() - around.right()
        return self._places(inner)[1] + around.top() + around.bottom()

    def sizeHint(self) -> QSize:  # noqa: N802
        """One row, if there is room."""
        sizes = [item.sizeHint() for item in self._shown()]
        width = sum(size.width() for size in sizes) + self.spacing() * max(0, len(sizes) - 1)
        return self._with_margins(QSize(width, max((size.height() for size in sizes), default=0)))

    def minimumSize(self) -> QSize:  # noqa: N802
        """The widest thing alone."""
        sizes = [item.minimumSize() for item in self._shown()]
        width, height = (max((getattr(size, side)() for size in sizes), default=0) for side in ("width", "height"))
        return self._with_margins(QSize(width, height))

    def setGeometry(self, place: QRect) -> None:  # noqa: N802
        """Lay all out."""
        super().setGeometry(place)
        inside = place.marginsRemoved(self.contentsMargins())
        corner = QPoint(inside.left(), inside.top())
        for item, where in zip(self._shown(), self._places(inside.width())[0], strict=True):
            item.setGeometry(where.translated(corner))

    def _shown(self) -> list[QLayoutItem]:
        return [item for item in self._items if not item.isEmpty()]

    def _places(self, width: int) -> tuple[list[QRect], int]:
        """Return where all stand, each as high as the highest: so they stand on one line."""
        sizes = [item.sizeHint() for item in self._shown()]
        height = max((size.height() for size in sizes), default=0)
        return flow([QSize(size.width(), height) for size in sizes], width, self.spacing())

    def _with_margins(self, size: QSize) -> QSize:
        around = self.contentsMargins()
        return size + QSize(around.left() + around.right(), around.top() + around.bottom())
