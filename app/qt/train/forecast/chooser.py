"""Which card is planned for: this PC's, or as if there were another; and who else uses the one that is here."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.core.planning.forecaster import GIGABYTES, HERE, NAMED, Forecaster
from app.core.words import in_words
from app.qt.inputs import ComboBox
from app.qt.train.forecast import words

_NAMES = 4


class CardChooser(QWidget):
    """`chosen` with `HERE`, or a card as the planner takes it: a name or an amount of memory."""

    chosen = Signal(str)

    def __init__(self, forecaster: Forecaster, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._forecaster = forecaster
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
        return str(self.box.itemData(known)) if known >= 0 else text or NAMED

    def renew(self) -> None:
        """Show the cards of this PC as they are now."""
        first = self._here()
        if (self.box.itemText(0) if self.box.itemData(0) == HERE else None) != first:
            self._fill()
        self.uses.setText(self._uses())
        self.uses.setVisible(bool(self.uses.text()))

    def _build(self) -> None:
        label = QLabel(self.tr("On"))
        label.setBuddy(self.box)
        self.box.setEditable(True)
        self.box.setInsertPolicy(QComboBox.InsertPolicy.NoInsert)
        self.box.setAccessibleName(self.tr("Card to plan for"))
        self.box.setToolTip(self.tr("Choose a card, or type the name of any NVIDIA card, such as RTX 4070."))
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
        """List this PC's card first, where there is one; what was chosen stays."""
        former = self.card if self.box.count() else HERE
        self.box.clear()
        if here := self._here():
            self.box.addItem(here, HERE)
        self.box.addItem(NAMED, NAMED)
        for gigabytes in GIGABYTES:
            self.box.addItem(self.tr("As if on {size} GB").format(size=gigabytes), f"{gigabytes}GB")
        self.box.setCurrentIndex(max(self.box.findData(former), 0))
        if self.box.findData(former) < 0 and former != HERE:
            self.box.setEditText(former)

    def _here(self) -> str | None:
        card = self._forecaster.here
        return self.tr("This PC: {card}").format(card=_short(card.name)) if card else None

    def _uses(self) -> str:
        """What is to be said of this PC's card."""
        forecaster = self._forecaster
        if forecaster.cards is None:
            return ""
        if forecaster.card_error is not None:
            return in_words(forecaster.card_error)
        card = forecaster.here
        if card is None:
            return self.tr("This PC has no NVIDIA card, so this is planned for one that is not here.")
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
