"""Says, when the window is closed while something trains or waits for its turn, that this goes on."""

from __future__ import annotations

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QFrame, QLabel, QVBoxLayout, QWidget

from app.core.runs.watcher import GoesOn

_SECONDS = 2.5


class Farewell(QFrame):
    """Stands for a moment where the window stood; the app ends with it, unless the window was opened again."""

    def __init__(self, window: QWidget, goes_on: GoesOn) -> None:
        # A window of its own: the app would not wait for one that belongs to the window that is closed.
        super().__init__(None, Qt.WindowType.SplashScreen)
        self.setObjectName("farewell")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setAttribute(Qt.WidgetAttribute.WA_QuitOnClose)
        self.setAttribute(Qt.WidgetAttribute.WA_ShowWithoutActivating)
        trains = goes_on == "training"
        self.title = QLabel(
            self.tr("Training continues in the background.")
            if trains
            else self.tr("The queue continues in the background.")
        )
        self.title.setProperty("role", "title")
        self.words = QLabel(self.tr("Open Impasto again at any time to watch it."))
        self.words.setProperty("role", "muted")
        column = QVBoxLayout(self)
        column.setContentsMargins(36, 26, 36, 28)
        column.setSpacing(8)
        for label in (self.title, self.words):
            label.setAlignment(Qt.AlignmentFlag.AlignCenter)
            column.addWidget(label)
        self.adjustSize()
        self.move(window.frameGeometry().center() - self.rect().center())
        self.timer = QTimer(self, interval=round(_SECONDS * 1000), singleShot=True)
        self.timer.timeout.connect(self.close)
        self.timer.start()
        window.destroyed.connect(self.close)

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        """Wait for nothing any more."""
        self.timer.stop()
        super().closeEvent(event)
