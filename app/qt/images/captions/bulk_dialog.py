"""Dialog for editing many captions: operation, scope, and a preview of the changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from PySide6.QtCore import QLocale, QSize, Qt, QTimer, Signal
from PySide6.QtWidgets import (
    QButtonGroup,
    QCheckBox,
    QComboBox,
    QDialog,
    QDialogButtonBox,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QRadioButton,
    QSpinBox,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.core.edits import bulk
from app.core.edits.bulk import CanceledError, CaptionSnapshots, SnapshotCaption
from app.core.edits.history import Edit
from app.core.library import LibraryChange, LibraryImage, ValueChange
from app.core.session import Session
from app.core.tags.completion import Completion
from app.core.tags.splitting import Lines, split_tags
from app.core.words import full_message
from app.qt.images.captions.preview import ChangeList, ChangeRow
from app.qt.images.captions.tag_line import Complete, TagField
from app.qt.widgets import ComboBox, SpinBox
from trainer.errors import ImpastoError

_Field = TypeVar("_Field", bound=QWidget)
Make = Callable[[Sequence[SnapshotCaption], Lines], Edit]
"""Function that makes the edit from the captions, using the form's values; it runs on a worker."""
_SCOPES: tuple[Scope, ...] = ("all", "shown", "selected")
_PAUSE_MS = 120
"""Milliseconds without input after which the preview is updated."""


class Form(QWidget):
    """Base class for the forms, one per operation; emits `changed` when an option changes."""

    changed = Signal()

    def __init__(self, complete: Complete) -> None:
        super().__init__()
        self._complete = complete
        self.form = QFormLayout(self)
        self.form.setContentsMargins(0, 0, 0, 0)
        self.form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.AllNonFixedFieldsGrow)
        self.build()

    def build(self) -> None:
        """Add the controls to the form."""

    def title(self) -> str:
        """Return the operation's name for the list."""
        raise NotImplementedError

    def make(self) -> Make | None:
        """Return the function that makes the edit; None while input is missing."""
        raise NotImplementedError

    def _tags(self, label: str) -> TagField:
        field = TagField(self._complete)
        field.textChanged.connect(lambda _: self.changed.emit())
        return self._row(label, field)

    def _line(self, label: str) -> QLineEdit:
        field = QLineEdit()
        field.textChanged.connect(lambda _: self.changed.emit())
        return self._row(label, field)

    def _choice(self, label: str, choices: Sequence[str]) -> QComboBox:
        box = ComboBox()
        box.addItems(choices)
        box.currentIndexChanged.connect(lambda _: self.changed.emit())
        return self._row(label, box)

    def _number(self, label: str, least: int, most: int) -> QSpinBox:
        box = SpinBox()
        box.setRange(least, most)
        box.valueChanged.connect(lambda _: self.changed.emit())
        return self._row(label, box)

    def _check(self, label: str, on: bool) -> QCheckBox:
        box = QCheckBox(label)
        box.setChecked(on)
        box.toggled.connect(lambda _: self.changed.emit())
        self.form.addRow("", box)
        return box

    def _row(self, label: str, field: _Field) -> _Field:
        field.setAccessibleName(label)
        self.form.addRow(label, field)
        return field

    def _add_note(self, words: str) -> None:
        label = QLabel(words)
        label.setWordWrap(True)
        label.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.form.addRow(label)


class AddForm(Form):
    """Form for adding tags at the start, at the end, or at a given position."""

    def build(self) -> None:
        """Add the controls for the tags and their position."""
        self.tags = self._tags(self.tr("Tags"))
        self.where = self._choice(
            self.tr("Where"), [self.tr("At the end"), self.tr("At the start"), self.tr("At position")]
        )
        self.place = self._number(self.tr("Position"), 1, 999)
        self.where.currentIndexChanged.connect(lambda _: self._update_position_row())
        self._update_position_row()

    def title(self) -> str:
        """Return the operation's name."""
        return self.tr("Add tags")

    def make(self) -> Make | None:
        """Return the function that makes the edit; None while input is missing."""
        tags = split_tags(self.tags.text(), "variants")  # as in the editor, a pasted list may have one tag per line
        at = (None, 0, self.place.value() - 1)[self.where.currentIndex()]
        return (lambda captions, lines: bulk.add_tags(captions, tags, at, lines)) if tags else None

    def _update_position_row(self) -> None:
        self.form.setRowVisible(self.place, self.where.currentIndex() == 2)


class RemoveForm(Form):
    """Form for removing tags."""

    def build(self) -> None:
        """Add the controls."""
        self.tags = self._tags(self.tr("Tags"))

    def title(self) -> str:
        """Return the operation's name."""
        return self.tr("Remove tags")

    def make(self) -> Make | None:
        """Return the function that makes the edit; None while input is missing."""
        tags = split_tags(self.tags.text(), "variants")  # as in the editor, a pasted list may have one tag per line
        return (lambda captions, lines: bulk.remove_tags(captions, tags, lines)) if tags else None


class RenameForm(Form):
    """Form for renaming a tag."""

    def build(self) -> None:
        """Add the controls."""
        self.old = self._tags(self.tr("Tag"))
        self.new = self._tags(self.tr("Rename to"))

    def title(self) -> str:
        """Return the operation's name."""
        return self.tr("Rename tag")

    def make(self) -> Make | None:
        """Return the function that makes the edit; None while input is missing."""
        old, new = self.old.text().strip(), self.new.text().strip()
        return (lambda captions, lines: bulk.rename_tag(captions, old, new, lines)) if old and new else None


class ReplaceForm(Form):
    """Form for replacing text or matches of a regular expression."""

    def build(self) -> None:
        """Add the controls."""
        self.sought = self._line(self.tr("Find"))
        self.replacement = self._line(self.tr("Replace with"))
        self.pattern = self._check(self.tr("Regular expression"), False)
        self.capitals = self._check(self.tr("Match case"), True)

    def title(self) -> str:
        """Return the operation's name."""
        return self.tr("Find and replace")

    def make(self) -> Make | None:
        """Return the function that makes the edit; None while input is missing."""
        find, replacement = self.sought.text(), self.replacement.text()
        pattern, capitals = self.pattern.isChecked(), self.capitals.isChecked()
        if not find:
            return None
        return lambda captions, _: bulk.replace_text(captions, find, replacement, pattern=pattern, capitals=capitals)


class SortForm(Form):
    """Form for sorting tags."""

    def build(self) -> None:
        """Add the controls."""
        self.order = self._choice(self.tr("Order"), [self.tr("Alphabetical"), self.tr("Most frequent first")])
        self.keep = self._number(self.tr("Keep first"), 0, 99)
        self.keep.setToolTip(
            self.tr("Number of tags at the start of each caption that stay in place, such as a trigger word")
        )

    def title(self) -> str:
        """Return the operation's name."""
        return self.tr("Sort tags")

    def make(self) -> Make | None:
        """Return the function that makes the edit; None while input is missing."""
        order: bulk.Order = "frequency" if self.order.currentIndex() else "alphabet"
        keep = self.keep.value()
        return lambda captions, lines: bulk.sort_tags(captions, order, keep, lines)


class RepeatedForm(Form):
    """Form for removing repeated tags."""

    def build(self) -> None:
        """Add the controls."""
        self._add_note(self.tr("Keeps only the first occurrence of each tag in a caption."))

    def title(self) -> str:
        """Return the operation's name."""
        return self.tr("Remove repeated tags")

    def make(self) -> Make | None:
        """Return the function that makes the edit; None while input is missing."""
        return bulk.remove_repeated


class UnderscoresForm(Form):
    """Form for converting between underscores and spaces."""

    def build(self) -> None:
        """Add the controls."""
        words = [self.tr("Underscores to spaces"), self.tr("Spaces to underscores")]
        self.direction = self._choice(self.tr("Convert"), words)
        self._add_note(self.tr("Emoticons such as ^_^ stay unchanged."))

    def title(self) -> str:
        """Return the operation's name."""
        return self.tr("Underscores and spaces")

    def make(self) -> Make | None:
        """Return the function that makes the edit; None while input is missing."""
        return bulk.spaces_to_underscores if self.direction.currentIndex() else bulk.underscores_to_spaces


class TidyForm(Form):
    """Form for cleaning up commas and spaces."""

    def build(self) -> None:
        """Add the controls."""
        self._add_note(self.tr("Separates tags with “, ” and removes empty tags and extra spaces."))

    def title(self) -> str:
        """Return the operation's name."""
        return self.tr("Clean up commas and spaces")

    def make(self) -> Make | None:
        """Return the function that makes the edit; None while input is missing."""
        return bulk.tidy


FORMS: tuple[type[Form], ...] = (
    AddForm,
    RemoveForm,
    RenameForm,
    ReplaceForm,
    SortForm,
    RepeatedForm,
    UnderscoresForm,
    TidyForm,
)


Scope = Literal["all", "shown", "selected"]


class BulkDialog(QDialog):
    """Dialog for editing many captions at once; a worker computes the preview, and new input restarts it."""

    message_shown = Signal(str)

    def __init__(self, session: Session, lines: Lines, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._lines = session, lines
        self._edit: Edit | None = None
        self._snapshot: CaptionSnapshots | None = None
        self.operations, self.stack = QListWidget(), QStackedWidget()
        self.scopes: dict[Scope, QRadioButton] = {}
        self.count, self.fault = QLabel(), QLabel()
        self.preview = ChangeList()
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        self.apply_button = self.buttons.addButton("", QDialogButtonBox.ButtonRole.AcceptRole)
        self._pause = QTimer(self)
        self._pause.setSingleShot(True)
        self._pause.setInterval(_PAUSE_MS)
        self.setWindowTitle(self.tr("Edit many captions"))
        self.resize(900, 620)
        self._build()
        self._connect_signals()
        self.operations.setCurrentRow(0)
        self._start_preview()

    @property
    def form(self) -> Form:
        """Return the form of the selected operation."""
        form = self.stack.currentWidget()
        assert isinstance(form, Form)
        return form

    @property
    def scope(self) -> Scope:
        """Return which captions to edit: all, those of the shown images, or those of the selected images."""
        return next(scope for scope, button in self.scopes.items() if button.isChecked())

    # --- building

    def _build(self) -> None:
        self.operations.setAccessibleName(self.tr("Operation"))
        self.operations.setFixedWidth(200)
        for kind in FORMS:
            form = kind(self._complete)
            form.changed.connect(self._schedule_preview)
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
        row.addWidget(QLabel(self.tr("In")))
        for scope in _SCOPES:
            button = self.scopes[scope] = QRadioButton()
            group.addButton(button)
            row.addWidget(button)
        row.addStretch(1)
        counts = {scope: len(self._images(scope)) for scope in _SCOPES}
        number = QLocale().toString
        self.scopes["all"].setText(self.tr("all images ({count})").format(count=number(counts["all"])))
        self.scopes["shown"].setText(self.tr("shown images ({count})").format(count=number(counts["shown"])))
        self.scopes["selected"].setText(self.tr("selected images ({count})").format(count=number(counts["selected"])))
        for scope, button in self.scopes.items():
            button.setEnabled(counts[scope] > 0)
        chosen: Scope = "selected" if counts["selected"] > 1 else "shown" if counts["shown"] else "all"
        self.scopes[chosen].setChecked(True)
        return row

    def _connect_signals(self) -> None:
        self.operations.currentRowChanged.connect(self._on_operation_changed)
        for button in self.scopes.values():
            button.toggled.connect(lambda on: self._schedule_preview() if on else None)
        self._pause.timeout.connect(self._start_preview)
        self.buttons.accepted.connect(self._apply)
        self.buttons.rejected.connect(self.reject)
        end = self._session.library.altered.connect(self._on_library_altered)
        self.finished.connect(lambda _: end())
        self.finished.connect(lambda _: self._cancel_preview())

    def _complete(self, typed: str) -> Sequence[Completion]:
        return self._session.completer.complete(typed)

    # --- the preview

    def _on_operation_changed(self, row: int) -> None:
        self.stack.setCurrentIndex(row)
        # Forms differ in height; the preview gets the remaining space.
        self.stack.setFixedHeight(self.form.sizeHint().height())
        self._schedule_preview()

    def _on_library_altered(self, altered: LibraryChange) -> None:
        if "caption" in altered.what or altered.added or altered.removed:
            self._schedule_preview()

    def _images(self, scope: Scope) -> list[LibraryImage]:
        view, library = self._session.view, self._session.library.images
        if scope == "all":
            return list(library.values())
        return [library[number] for number in (view.ids if scope == "shown" else view.scope())]

    def _schedule_preview(self) -> None:
        """Schedule a new preview; the edit cannot be applied until the preview is shown."""
        self._cancel_preview()
        self._edit = None
        self._update_apply_button(0)
        self._pause.start()

    def _start_preview(self) -> None:
        make, lines = self.form.make(), self._lines
        self._cancel_preview()
        self.fault.hide()
        if make is None:
            self._show(None, 0)
            return
        captions = self._snapshot = CaptionSnapshots(self._images(self.scope))
        self.count.setText(self.tr("Checking %n caption(s)…", "", len(captions)))

        def done(edit: Edit) -> None:
            if captions is self._snapshot:
                self._show(edit, len(captions))

        def failed(fault: BaseException) -> None:
            if captions is self._snapshot and isinstance(fault, ImpastoError):
                self._show(None, 0)
                self.fault.setText(full_message(fault))
                self.fault.show()
            elif not isinstance(fault, ImpastoError | CanceledError):
                raise fault

        self._session.tasks.run(lambda: make(captions, lines), done, failed)

    def _show(self, edit: Edit | None, of: int) -> None:
        self._edit = edit
        changes = edit.changes if edit else ()
        self.preview.list.show(changes, self._row)
        words = self.tr("Changes {count} of %n caption(s)", "", of).format(count=QLocale().toString(len(changes)))
        self.count.setText(words if edit is not None else "")
        self._update_apply_button(len(changes))

    def _row(self, change: ValueChange) -> ChangeRow:
        image = self._session.library.images.get(change.image)
        before = None if change.before is None else str(change.before)
        return ChangeRow(image.name if image else "", before, str(change.after or ""))

    def _update_apply_button(self, count: int) -> None:
        self.apply_button.setText(self.tr("Change %n caption(s)", "", count) if count else self.tr("Change"))
        self.apply_button.setEnabled(bool(count))

    def _cancel_preview(self) -> None:
        self._pause.stop()
        if self._snapshot:
            self._snapshot.cancel()
            self._snapshot = None

    def _apply(self) -> None:
        if self._edit:
            edit = self._edit
            self.accept()
            self._session.history.do(edit)
            self.message_shown.emit(edit.name)
