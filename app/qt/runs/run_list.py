"""The list of runs: how each stands and how far it is."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QListView, QWidget

from app.core.session import Session


class RunList(QListView):
    """All runs, the latest first; the chosen ones are laid over each other in the charts."""

    chosen = Signal()
    """Other runs are chosen."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.setAccessibleName(self.tr("Runs"))
        self.setSelectionMode(QListView.SelectionMode.ExtendedSelection)
