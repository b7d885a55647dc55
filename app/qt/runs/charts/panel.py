"""What a run learned so far, in charts."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtWidgets import QWidget

from app.core.runs.run import Run
from app.core.session import Session
from app.qt.actions.commands import Commands


class ProgressPanel(QWidget):
    """The charts of the chosen run, with others laid over them."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._runs: Sequence[Run] = ()

    def show_runs(self, runs: Sequence[Run]) -> None:
        """Show these runs; the first is the one that everything else on the page is about."""
        self._runs = runs
