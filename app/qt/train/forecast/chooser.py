"""Which device the details are for: the one that training will use, or another GPU to compare with."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.core.planning.forecaster import GIGABYTES, HERE, NAMED, Forecaster
from app.core.words import in_words
from app.qt.inputs import ComboBox
from app.qt.train.forecast import words

_NAMES = 4


class CardChooser(QWidget):
    """`chosen` with `HERE`, or a GPU as the planner takes it: a name or an amount of memory."""

    chosen = Signal(str)

    def __init__(self, forecaster: Forecaster, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._forecaster = forecaster
        self._on_cpu = False
        self.box, self.uses = ComboBox(), QLabel()
        self._build()
        self._fill()
        self.box.activated.connect(lambda _: self.chosen.emit(self.card))
        line = self.box.lineEdit()
        assert line is not None
        line.returnPressed.connect(lambda: self.chosen.emit(self.card))

    @property
    def card(self) -> str:
        """What is planned for."""
        text = self.box.currentText().strip()
        known = self.box.findText(text)
        return str(self.box.itemData(known)) if known >= 0 else text or HERE

    def renew(self, *, on_cpu: bool) -> None:
        """Show this PC's GPUs as they are now, or its CPU where training uses that."""
        self._on_cpu = on_cpu
        if self.box.itemText(0) != self._here():
            self._fill()
        self.uses.setText(self._uses())
        self.uses.setVisible(bool(self.uses.text()))

    def _build(self) -> None:
        label = QLabel(self.tr("Details for"))
        label.setBuddy(self.box)
        self.box.setEditable(True)
        self.box.setInsertPolicy(QComboBox.InsertPolicy.NoInsert)
        self.box.setAccessibleName(self.tr("Device that the details are for"))
        self.box.setToolTip(
            self.tr("To compare, choose another GPU or type its name, such as RTX 4070. Training does not use it.")
        )
        self.uses.setTextFormat(Qt.TextFormat.PlainText)
        self.uses.setWordWrap(True)
        self.uses.setProperty("role", "muted")
        row, column = QHBoxLayout(), QVBoxLayout(self)
        row.addWidget(label)
        row.addWidget(self.box, 1)
        column.setContentsMargins(0, 0, 0, 0)
        column.addLayout(row)
        column.addWidget(self.uses)

    def _fill(self) -> None:
        """List this PC's device first; what was chosen stays."""
        former = self.card if self.box.count() else HERE
        self.box.clear()
        self.box.addItem(self._here(), HERE)
        self.box.addItem(NAMED, NAMED)
        for gigabytes in GIGABYTES:
            self.box.addItem(self.tr("As if on {size} GB").format(size=gigabytes), f"{gigabytes}GB")
        self.box.setCurrentIndex(max(self.box.findData(former), 0))
        if self.box.findData(former) < 0 and former != HERE:
            self.box.setEditText(former)

    def _here(self) -> str:
        card = self._forecaster.here
        if self._on_cpu or card is None:
            return self.tr("This PC: CPU")
        return self.tr("This PC: {card}").format(card=_short(card.name))

    def _uses(self) -> str:
        """Return what is to be said of this PC's GPU."""
        forecaster = self._forecaster
        if forecaster.cards is None:
            return ""
        if forecaster.card_error is not None:
            return in_words(forecaster.card_error)
        card = forecaster.here
        if card is None:
            return self.tr("No NVIDIA GPU was found, so training uses the CPU.")
        if self._on_cpu:
            return self.tr("The job says to train on the CPU.")
        if self.card != HERE:
            return ""
        free = self.tr("{free} of {total} free.").format(
            free=words.gigabytes(card.free_bytes), total=words.gigabytes(card.total_bytes)
        )
        told = [f"{use.name} {words.gigabytes(use.bytes)}" if use.bytes else use.name for use in card.uses[:_NAMES]]
        others = self.tr("Also in use by {programs}.").format(programs=", ".join(told)) if told else ""
        return f"{free} {others}".strip()


def _short(name: str) -> str:
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")
