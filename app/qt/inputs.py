"""Combo boxes, spin boxes and sliders that react to the mouse wheel only while they have the keyboard focus.

Otherwise, scrolling a page changes whichever setting passes under the pointer, and jobs are saved at once. Without
focus they pass the wheel on, so the scroll area around them scrolls. Build these instead of Qt's own classes: a test
rejects those (tests/qt/test_inputs.py).
"""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QComboBox, QDateTimeEdit, QDoubleSpinBox, QSlider, QSpinBox, QWidget


class ComboBox(QComboBox):
    """Choose one of several values."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)  # Qt's default takes the focus when the wheel turns

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Choose the next value if focused."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class SpinBox(QSpinBox):
    """Choose a whole number."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Step the number if focused."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class DoubleSpinBox(QDoubleSpinBox):
    """Choose a decimal number."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Step the number if focused."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class Slider(QSlider):
    """Choose a number on a scale."""

    def __init__(self, orientation: Qt.Orientation, parent: QWidget | None = None) -> None:
        super().__init__(orientation, parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Move the handle if focused."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class DateTimeEdit(QDateTimeEdit):
    """Choose a date and a time."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Step the section under the cursor if focused."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()
