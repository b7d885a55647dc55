"""The Images page: tags on the left, images in the middle, captions and problems on the right."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QSplitter, QVBoxLayout, QWidget

from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.images.captions.editor import CaptionEditor
from app.qt.images.finding.filter_box import FilterBox
from app.qt.images.finding.tag_panel import TagPanel
from app.qt.images.health.panel import HealthPanel
from app.qt.images.views import DiskPoller, ImageViews


class ImagesPage(QWidget):
    """The Images page: places for panels, with splitters between them.

    `tags`     left: the tag panel                            (app/qt/images/finding)
    `filter`   above the images: filter box                   (app/qt/images/finding)
    `views`    center: grid, loupe or comparison              (app/qt/images/views.py)
    `captions` top right: the caption editor                  (app/qt/images/captions)
    `health`   bottom right: problems and charts              (app/qt/images/health)
    """

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.commands = commands
        self.tags = _place("tags")
        self.filter = _place("filter")
        self.views = ImageViews(session, commands)
        self._clock = DiskPoller(session, self.views.grid.in_sight, self)
        self.captions = _place("captions")
        self.health = _place("health")
        self.columns = QSplitter(Qt.Orientation.Horizontal)
        self.right = QSplitter(Qt.Orientation.Vertical)
        self.columns.setObjectName("images.columns")  # the window saves their positions under these names
        self.right.setObjectName("images.right")
        self._build()
        self.put(self.filter, FilterBox(session, commands))
        self.put(self.tags, TagPanel(session, commands))
        self._put_captions()
        self._put_health()

    def put(self, place: QWidget, widget: QWidget) -> None:
        """Put a widget into one of the page's places."""
        layout = place.layout()
        assert layout is not None
        layout.addWidget(widget)

    def show_alone(self, on: bool) -> None:
        """Show only the images, or show all panels again."""
        for part in (self.tags, self.filter, self.right):
            part.setVisible(not on)

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Start checking the disk for changes."""
        super().showEvent(event)
        self._clock.start()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Stop checking the disk for changes."""
        super().hideEvent(event)
        self._clock.stop()

    def _put_captions(self) -> None:
        self.editor = CaptionEditor(self.session, self.commands)
        self.editor.message_shown.connect(self.views.message_shown)
        self.editor.focus_returned.connect(self.views.take_focus)
        self.put(self.captions, self.editor)

    def _put_health(self) -> None:
        self.health_panel = HealthPanel(self.session, self.commands)
        self.health_panel.message_shown.connect(self.views.message_shown)
        self.health_panel.edit_requested.connect(self.editor.focus_tags)
        self.put(self.health, self.health_panel)

    def _build(self) -> None:
        self.views.full_screen_requested.connect(self.show_alone)
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
