"""The slider by which a grid's pictures are made larger or smaller."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QSlider

from app.qt.inputs import Slider


def size_slider(sides: tuple[int, int], side: int, name: str) -> QSlider:
    """Return a slider from the smaller to the larger of `sides`, in Qt's pixels; `name` says what has that size."""
    slider = Slider(Qt.Orientation.Horizontal)
    slider.setRange(*sides)
    slider.setSingleStep(8)
    slider.setPageStep(48)
    slider.setValue(side)
    slider.setFixedWidth(140)
    slider.setAccessibleName(name)
    slider.setToolTip(name)
    return slider
