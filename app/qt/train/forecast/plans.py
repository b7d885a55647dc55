"""The plans beside each other: what each takes, how long it runs, how it is done; a button puts one into the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.core.jobs.settings import title_of
from app.core.planning.answer import Answer, Plan
from app.qt.train.forecast import words
from app.qt.train.forecast.clearing import clear
from app.qt.train.form.editors import shown

_TITLE = 84


class Row(NamedTuple):
    """One plan as it is offered."""

    title: str
    plan: Plan
    note: str
    keys: Mapping[str, Any]
    """What the button puts into the job."""


class PlanTable(QWidget):
    """`taken` with the keys of a plan that the user wants, and with its title."""

    taken = Signal(object, str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: dict[str, QPushButton] = {}
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(8)

    def show_answer(self, answer: Answer) -> None:
        """Show the plans of an answer."""
        clear(self._column)
        self.buttons.clear()
        for row in self._rows(answer):
            self._column.addWidget(self._line(row, answer))
        if answer.best is not None and not answer.whole:
            waiting = QLabel(self.tr("Its neighbours are being worked out…"))
            waiting.setProperty("role", "muted")
            self._column.addWidget(waiting)

    def _rows(self, answer: Answer) -> Iterator[Row]:
        if answer.pick is not None:
            found = [
                (self.tr("Pick"), answer.pick, ""),
                (self.tr("Quicker"), answer.quicker, words.lacking(answer.missing, answer.card.uses)),
                (self.tr("Smaller"), answer.smaller, self.tr("leaves room for other programs")),
                (self.tr("Quantised"), answer.quantised, ""),
            ]
            yield from (Row(title, plan, note, plan.keys) for title, plan, note in found if plan is not None)
            return
        if answer.lighter is not None:
            keys = {f"recipe.{key}": value for key, value in answer.changes.items()}
            changes = ", ".join(f"{title_of(key)} {shown(value)}" for key, value in keys.items())
            yield Row(self.tr("Would fit"), answer.lighter, self.tr("with {keys}").format(keys=changes), keys)
        if answer.smaller is not None:
            yield Row(self.tr("Smallest"), answer.smaller, words.lacking(answer.missing, answer.card.uses), {})

    def _line(self, row: Row, answer: Answer) -> QWidget:
        line = QFrame()
        title, figures = QLabel(row.title), QLabel(self._figures(row.plan))
        title.setProperty("role", "heading")
        figures.setTextFormat(Qt.TextFormat.PlainText)
        title.setMinimumWidth(_TITLE)
        head = QHBoxLayout()
        head.addWidget(title)
        head.addWidget(figures, 1)
        if row.keys:
            head.addWidget(self._button(row))
        told = [words.fit(row.plan.fit, answer.effective_batch), words.cost(row.plan), row.note]
        how = QLabel("; ".join(text for text in told if text))
        how.setTextFormat(Qt.TextFormat.PlainText)
        how.setWordWrap(True)
        how.setProperty("role", "muted")
        column = QVBoxLayout(line)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(head)
        column.addWidget(how)
        return line

    def _figures(self, plan: Plan) -> str:
        return f"{words.duration(plan.forecast.seconds)} · {words.gigabytes(plan.needed)}"

    def _button(self, row: Row) -> QPushButton:
        from trainer.config.write import toml_value  # the schema takes a fifth of a second, after the window

        button = self.buttons[row.title] = QPushButton(self.tr("Use"))
        button.setAccessibleName(self.tr("Use this plan: {plan}").format(plan=row.title))
        keys = ", ".join(f"{key} = {toml_value(value)}" for key, value in row.keys.items())
        button.setToolTip(self.tr("Writes into the job: {keys}").format(keys=keys))
        button.clicked.connect(lambda: self.taken.emit(row.keys, row.title))
        return button
