"""The dialog that changes many captions: what to do, to which of them, and what that changes, before it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from PySide6.QtCore import QLocale, QSize, QTimer, Signal
from PySide6.QtWidgets import (
    QButtonGroup,
    QDialog,
    QDialogButtonBox,
    QHBoxLayout,
    QLabel,
    QListWidget,
    QListWidgetItem,
    QRadioButton,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.core.edits.bulk import CalledOffError, Snapshot
from app.core.edits.history import Edit
from app.core.library import Altered, Change, Picture
from app.core.session import Session
from app.core.tags.completion import Completion
from app.core.tags.splitting import Lines
from app.core.words import in_words
from app.qt.pictures.captions.forms import FORMS, Form
from app.qt.pictures.captions.preview import Preview, Row
from trainer.errors import ImpastoError

Scope = Literal["all", "shown", "selected"]
_SCOPES: tuple[Scope, ...] = ("all", "shown", "selected")
_PAUSE_MS = 120
"""A pause of typing after which the preview is made anew."""


class BulkDialog(QDialog):
    """One edit of many captions; the preview is made by a worker and called off by the next key."""

    said = Signal(str)

    def __init__(self, session: Session, lines: Lines, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._lines = session, lines
        self._edit: Edit | None = None
        self._snapshot: Snapshot | None = None
        self.operations, self.stack = QListWidget(), QStackedWidget()
        self.scopes: dict[Scope, QRadioButton] = {}
        self.count, self.fault = QLabel(), QLabel()
        self.preview = Preview()
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        self.apply_button = self.buttons.addButton("", QDialogButtonBox.ButtonRole.AcceptRole)
        self._pause = QTimer(self)
        self._pause.setSingleShot(True)
        self._pause.setInterval(_PAUSE_MS)
        self.setWindowTitle(self.tr("Change many captions"))
        self.resize(900, 620)
        self._build()
        self._listen()
        self.operations.setCurrentRow(0)
        self._look()

    @property
    def form(self) -> Form:
        """The form of what is chosen."""
        form = self.stack.currentWidget()
        assert isinstance(form, Form)
        return form

    @property
    def scope(self) -> Scope:
        """Which captions are meant."""
        return next(scope for scope, button in self.scopes.items() if button.isChecked())

    # --- building

    def _build(self) -> None:
        self.operations.setAccessibleName(self.tr("What to do"))
        self.operations.setFixedWidth(200)
        for kind in FORMS:
            form = kind(self._complete)
            form.changed.connect(self._start_soon)
            self.stack.addWidget(form)
            item = QListWidgetItem(form.title(), self.operations)
            item.setSizeHint(QSize(0, self.fontMetrics().height() + 14))
        self.fault.setProperty("role", "bad")
        self.fault.setWordWrap(True)
        self.fault.hide()
        self.count.setProperty("role", "heading")
        right = QVBoxLayout()
        right.setSpacing(10)
        right.addWidget(self.stack)
        right.addLayout(self._scope_row())
        for widget in (self.count, self.fault):
            right.addWidget(widget)
        right.addWidget(self.preview, 1)
        row = QHBoxLayout()
        row.setSpacing(14)
        row.addWidget(self.operations)
        row.addLayout(right, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 14, 14, 12)
        column.setSpacing(12)
        column.addLayout(row, 1)
        column.addWidget(self.buttons)
        self.apply_button.setDefault(True)

    def _scope_row(self) -> QHBoxLayout:
        row, group = QHBoxLayout(), QButtonGroup(self)
        row.addWidget(QLabel(self.tr("Of")))
        for scope in _SCOPES:
            button = self.scopes[scope] = QRadioButton()
            group.addButton(button)
            row.addWidget(button)
        row.addStretch(1)
        counts = {scope: len(self._pictures(scope)) for scope in _SCOPES}
        number = QLocale().toString
        self.scopes["all"].setText(self.tr("all pictures ({count})").format(count=number(counts["all"])))
        self.scopes["shown"].setText(self.tr("those shown ({count})").format(count=number(counts["shown"])))
        self.scopes["selected"].setText(self.tr("those selected ({count})").format(count=number(counts["selected"])))
        for scope, button in self.scopes.items():
            button.setEnabled(counts[scope] > 0)
        chosen: Scope = "selected" if counts["selected"] > 1 else "shown" if counts["shown"] else "all"
        self.scopes[chosen].setChecked(True)
        return row

    def _listen(self) -> None:
        self.operations.currentRowChanged.connect(self._choose)
        for button in self.scopes.values():
            button.toggled.connect(lambda on: self._start_soon() if on else None)
        self._pause.timeout.connect(self._look)
        self.buttons.accepted.connect(self._apply)
        self.buttons.rejected.connect(self.reject)
        end = self._session.library.altered.connect(self._altered)
        self.finished.connect(lambda _: end())
        self.finished.connect(lambda _: self._call_off())

    def _complete(self, typed: str) -> Sequence[Completion]:
        return self._session.completer.complete(typed)

    # --- the preview

    def _choose(self, row: int) -> None:
        self.stack.setCurrentIndex(row)
        # The forms differ in height; the preview gets what is left.
        self.stack.setFixedHeight(self.form.sizeHint().height())
        self._start_soon()

    def _altered(self, altered: Altered) -> None:
        if "caption" in altered.what or altered.added or altered.removed:
            self._start_soon()

    def _pictures(self, scope: Scope) -> list[Picture]:
        view, library = self._session.view, self._session.library.pictures
        if scope == "all":
            return list(library.values())
        return [library[number] for number in (view.ids if scope == "shown" else view.scope())]

    def _start_soon(self) -> None:
        """Make the preview anew after a pause; nothing can be applied that is not seen."""
        self._call_off()
        self._edit = None
        self._offer(0)
        self._pause.start()

    def _look(self) -> None:
        make, lines = self.form.make(), self._lines
        self._call_off()
        self.fault.hide()
        if make is None:
            self._show(None, 0)
            return
        captions = self._snapshot = Snapshot(self._pictures(self.scope))
        self.count.setText(self.tr("Looking at %n caption(s)…", "", len(captions)))

        def have(edit: Edit) -> None:
            if captions is self._snapshot:
                self._show(edit, len(captions))

        def failed(fault: BaseException) -> None:
            if captions is self._snapshot and isinstance(fault, ImpastoError):
                self._show(None, 0)
                self.fault.setText(in_words(fault))
                self.fault.show()
            elif not isinstance(fault, ImpastoError | CalledOffError):
                raise fault

        self._session.tasks.run(lambda: make(captions, lines), have, failed)

    def _show(self, edit: Edit | None, of: int) -> None:
        self._edit = edit
        changes = edit.changes if edit else ()
        self.preview.list.show(changes, self._row)
        words = self.tr("Changes {count} of %n caption(s)", "", of).format(count=QLocale().toString(len(changes)))
        self.count.setText(words if edit is not None else "")
        self._offer(len(changes))

    def _row(self, change: Change) -> Row:
        picture = self._session.library.pictures.get(change.picture)
        before = None if change.before is None else str(change.before)
        return Row(picture.name if picture else "", before, str(change.after or ""))

    def _offer(self, count: int) -> None:
        self.apply_button.setText(self.tr("Change %n caption(s)", "", count) if count else self.tr("Change"))
        self.apply_button.setEnabled(bool(count))

    def _call_off(self) -> None:
        self._pause.stop()
        if self._snapshot:
            self._snapshot.call_off()
            self._snapshot = None

    def _apply(self) -> None:
        if self._edit:
            edit = self._edit
            self.accept()
            self._session.history.do(edit)
            self.said.emit(edit.name)
