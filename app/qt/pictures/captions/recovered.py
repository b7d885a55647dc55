"""The dialog that shows what an earlier session left unsaved."""

from __future__ import annotations

from PySide6.QtWidgets import QDialog, QDialogButtonBox, QLabel, QVBoxLayout, QWidget

from app.core.edits.save_state import SaveRequest
from app.core.session import Session
from app.qt.pictures.captions.preview import Preview, Row
from app.qt.pictures.captions.value_words import value_words


class RecoveredDialog(QDialog):
    """Lists each value with what it was and what the user had made of it."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Recovered changes"))
        self.resize(760, 460)
        requests = session.saver.recovered
        words = self.tr(
            "Impasto stopped before it saved %n change(s). Those whose files were still as you saw them are saved now.",
            "",
            len(requests),
        )
        told = QLabel(
            words + " " + self.tr("Where another program wrote in the meantime, you choose which version to keep.")
        )
        told.setWordWrap(True)
        self.preview = Preview()
        self.preview.setAccessibleName(self.tr("Recovered changes"))
        self.preview.list.show(requests, _row)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 14, 14, 12)
        column.setSpacing(12)
        column.addWidget(told)
        column.addWidget(self.preview, 1)
        column.addWidget(buttons)


def _row(request: SaveRequest) -> Row:
    before, after = (value_words(request.key.field, value) for value in (request.bases[0], request.desired))
    return Row(request.key.path.name, before, after or "")
