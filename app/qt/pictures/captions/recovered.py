"""The dialog that shows what a session that crashed had left unsaved."""

from __future__ import annotations

from PySide6.QtWidgets import QDialog, QDialogButtonBox, QLabel, QVBoxLayout, QWidget

from app.core.edits.wishes import Wish
from app.core.session import Session
from app.qt.pictures.captions.preview import Preview, Row
from app.qt.pictures.captions.value_words import value_words


class RecoveredDialog(QDialog):
    """Lists each value with what it was and what the user had made of it."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Recovered changes"))
        self.resize(760, 460)
        wishes = session.saver.recovered
        words = self.tr(
            "Impasto ended before it had saved %n change(s). Where their files still were as you had seen "
            "them, they are saved now.",
            "",
            len(wishes),
        )
        told = QLabel(
            words + " " + self.tr("Where another program wrote meanwhile, you are asked which version stays.")
        )
        told.setWordWrap(True)
        self.preview = Preview()
        self.preview.setAccessibleName(self.tr("Recovered changes"))
        self.preview.list.show(wishes, _row)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 14, 14, 12)
        column.setSpacing(12)
        column.addWidget(told)
        column.addWidget(self.preview, 1)
        column.addWidget(buttons)


def _row(wish: Wish) -> Row:
    before, after = (value_words(wish.key.field, value) for value in (wish.bases[0], wish.desired))
    return Row(wish.key.path.name, before, after or "")
