"""The Pictures page: tags on the left, pictures in the middle, captions and problems on the right."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QSplitter, QStackedWidget, QVBoxLayout, QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands


class PicturesPage(QWidget):
    """The page's places, each filled by the room that it is named after; splitters between them.

    `tags`     left: the tag panel                            (app/qt/pictures/finding)
    `filter`   above the pictures: filter box                 (app/qt/pictures/finding)
    `views`    centre, a stack: grid, loupe, compare          (app/qt/pictures/grid, loupe, compare)
    `captions` right, above: the caption editor               (app/qt/pictures/captions)
    `health`   right, below: problems and charts              (app/qt/pictures/health)

    `put(place, widget)` fills one of them.
    """

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.commands = commands
        self.tags = _place("tags")
        self.filter = _place("filter")
        self.views = QStackedWidget()
        self.captions = _place("captions")
        self.health = _place("health")
        self.columns = QSplitter(Qt.Orientation.Horizontal)
        self.right = QSplitter(Qt.Orientation.Vertical)
        self.columns.setObjectName("pictures.columns")  # by their names the window remembers how they stood
        self.right.setObjectName("pictures.right")
        self._build()

    def put(self, place: QWidget, widget: QWidget) -> None:
        """Fill one of the page's places."""
        layout = place.layout()
        assert layout is not None
        layout.addWidget(widget)

    def _build(self) -> None:
        middle = QWidget()
        column = QVBoxLayout(middle)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.filter)
        column.addWidget(self.views, 1)
        for part in (self.captions, self.health):
            self.right.addWidget(part)
        for part in (self.tags, middle, self.right):
            self.columns.addWidget(part)
        self.columns.setStretchFactor(1, 1)
        self.columns.setSizes([220, 760, 300])
        self.right.setSizes([420, 280])
        whole = QVBoxLayout(self)
        whole.setContentsMargins(0, 0, 0, 0)
        whole.addWidget(self.columns)


def _place(name: str) -> QWidget:
    place = QWidget()
    place.setObjectName(name)
    layout = QVBoxLayout(place)
    layout.setContentsMargins(0, 0, 0, 0)
    layout.setSpacing(0)
    return place
