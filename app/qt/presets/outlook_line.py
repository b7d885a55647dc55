"""What a preset costs on a card, in sentences, with the choice of the card."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.core.planning.forecaster import GIGABYTES, HERE
from app.core.presets.outlooks import Outlooks
from app.qt.inputs import ComboBox
from app.qt.parts import plain_label, say, until_destroyed
from app.qt.presets.words import in_full
from trainer.config.presets.preset import Preset


class OutlookLine(QWidget):
    """Says how one preset would be fitted; the choice of the card counts for all presets."""

    def __init__(self, outlooks: Outlooks, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._outlooks = outlooks
        self._shown: tuple[Path, Preset] | None = None
        self.cards, self.words = ComboBox(), plain_label()
        self.cards.addItem(self.tr("This PC"), HERE)
        for size in GIGABYTES:
            self.cards.addItem(self.tr("A card with {size} GB").format(size=size), f"{size}GB")
        self.cards.setCurrentIndex(max(self.cards.findData(outlooks.card), 0))
        self.cards.setAccessibleName(self.tr("Graphics card"))
        self.cards.activated.connect(lambda _: outlooks.choose(self.cards.currentData()))
        head = QHBoxLayout()
        title = QLabel(self.tr("What it costs on"))
        title.setProperty("role", "heading")
        head.addWidget(title)
        head.addWidget(self.cards)
        head.addStretch()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addLayout(head)
        column.addWidget(self.words, 0, Qt.AlignmentFlag.AlignTop)
        until_destroyed(self, outlooks.changed.connect(lambda _: self._renew()))

    def show_preset(self, path: Path, preset: Preset) -> None:
        """Say it of this one, which lies in that file."""
        self._shown = path, preset
        self.setVisible(preset.recipe is not None)
        self._renew()

    def _renew(self) -> None:
        self.cards.setCurrentIndex(max(self.cards.findData(self._outlooks.card), 0))
        if self._shown is not None:
            outlook = self._outlooks.of(*self._shown)
            answer = outlook.answer if outlook else None
            doubtful = outlook is not None and (answer is None or answer.pick is None)
            say(self.words, in_full(outlook, self._outlooks.card), "warning" if doubtful else "")
