"""The tools on this PC whose models can be used, each with a box to tick."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QCheckBox,
    QFileDialog,
    QFrame,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from app.core.models.models import Models
from app.core.models.tools import Installation
from app.qt.parts import until_destroyed
from app.qt.tips import plain_tip
from app.qt.train.base_words import owner_of


class ToolsPanel(QWidget):
    """Looks for them when it is made, and shows each as it is found."""

    def __init__(self, models: Models, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._models = models
        self.boxes: dict[Path, QCheckBox] = {}
        self.state = QLabel()
        self.folder = QPushButton(self.tr("Add a folder…"))
        self._list, self._column = QWidget(), QVBoxLayout()
        self._build()
        until_destroyed(self, models.changed.connect(lambda _: self._fill()))
        self.folder.clicked.connect(lambda: self.add_folder())
        models.look()
        self._fill()

    def add_folder(self) -> None:
        """Ask for a folder of models, or of a tool that was not found."""
        folder = QFileDialog.getExistingDirectory(self, self.tr("A folder of models, or of a tool that keeps models"))
        if folder:
            self._models.add_folder(Path(folder))

    def _build(self) -> None:
        self.state.setProperty("role", "muted")
        self.state.setWordWrap(True)
        self.folder.setAutoDefault(False)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(2)
        self._list.setLayout(self._column)
        self._column.addStretch()
        area = QScrollArea()
        area.setWidget(self._list)
        area.setWidgetResizable(True)
        area.setFrameShape(QFrame.Shape.NoFrame)
        area.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        row = QHBoxLayout()
        row.addWidget(self.state, 1)
        row.addWidget(self.folder)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(area, 1)
        column.addLayout(row)

    def _fill(self) -> None:
        tools = {one.folder: one for one in self._models.installations}
        for folder in [folder for folder in self.boxes if folder not in tools]:
            self.boxes.pop(folder).deleteLater()
        for folder, tool in tools.items():
            if folder not in self.boxes:
                self._add(tool)
            self._word(self.boxes[folder], tool)
        self.state.setText(self._words())

    def _add(self, tool: Installation) -> None:
        box = QCheckBox()
        box.setChecked(self._models.wants(tool))
        box.setToolTip(plain_tip(str(tool.folder)))
        box.toggled.connect(lambda wanted: self._models.want(tool, wanted))
        self._column.insertWidget(self._column.count() - 1, box)
        self.boxes[tool.folder] = box

    def _word(self, box: QCheckBox, tool: Installation) -> None:
        count = self.tr("%n base(s)", "", self._models.count_of(tool))
        text = f"{owner_of(tool.tool)} · {count} · {tool.folder}"
        room = max(self._list.width() - 40, 300)
        shown = box.fontMetrics().elidedText(text, Qt.TextElideMode.ElideMiddle, room)
        box.setText(shown.replace("&", "&&"))
        box.setAccessibleName(text)

    def _words(self) -> str:
        if self._models.looking:
            return self.tr("Looking for models of other tools on this PC…")
        if not self.boxes:
            return self.tr("No other tool was found. Is there a folder with your models?")
        return self.tr("Bases are offered from what is ticked.")
