"""What can be done to many captions: for each a form that asks for what it needs, and makes the edit of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QCheckBox, QComboBox, QFormLayout, QLabel, QLineEdit, QSpinBox, QWidget

from app.core.edits import bulk
from app.core.edits.bulk import Words
from app.core.edits.history import Edit
from app.core.tags.splitting import Lines, split_tags
from app.qt.inputs import ComboBox, SpinBox
from app.qt.pictures.captions.tag_field import Complete, TagField

_Field = TypeVar("_Field", bound=QWidget)
Make = Callable[[Sequence[Words], Lines], Edit]
"""Runs on a worker: all that the form asked for is inside already."""


class Form(QWidget):
    """One of them; `changed` when the user asks for something else."""

    changed = Signal()

    def __init__(self, complete: Complete) -> None:
        super().__init__()
        self._complete = complete
        self.form = QFormLayout(self)
        self.form.setContentsMargins(0, 0, 0, 0)
        self.form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.AllNonFixedFieldsGrow)
        self.build()

    def build(self) -> None:
        """Put the controls into the form."""

    def title(self) -> str:
        """Return what it does, for the list of them."""
        raise NotImplementedError

    def make(self) -> Make | None:
        """Return what makes the edit; None while something is missing."""
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

    def _explain(self, words: str) -> None:
        label = QLabel(words)
        label.setWordWrap(True)
        label.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.form.addRow(label)


class AddForm(Form):
    """Tags to the front, the end, or a place between."""

    def build(self) -> None:
        """See Form."""
        self.tags = self._tags(self.tr("Tags"))
        self.where = self._choice(
            self.tr("Where"), [self.tr("At the end"), self.tr("At the front"), self.tr("At place")]
        )
        self.place = self._number(self.tr("Place"), 1, 999)
        self.where.currentIndexChanged.connect(lambda _: self._ask())
        self._ask()

    def title(self) -> str:
        """See Form."""
        return self.tr("Add tags")

    def make(self) -> Make | None:
        """See Form."""
        tags = split_tags(self.tags.text(), "variants")  # as in the editor, a pasted list may have lines
        at = (None, 0, self.place.value() - 1)[self.where.currentIndex()]
        return (lambda captions, lines: bulk.add_tags(captions, tags, at, lines)) if tags else None

    def _ask(self) -> None:
        self.form.setRowVisible(self.place, self.where.currentIndex() == 2)


class RemoveForm(Form):
    """Tags away."""

    def build(self) -> None:
        """See Form."""
        self.tags = self._tags(self.tr("Tags"))

    def title(self) -> str:
        """See Form."""
        return self.tr("Remove tags")

    def make(self) -> Make | None:
        """See Form."""
        tags = split_tags(self.tags.text(), "variants")  # as in the editor, a pasted list may have lines
        return (lambda captions, lines: bulk.remove_tags(captions, tags, lines)) if tags else None


class RenameForm(Form):
    """One tag written differently, or given up for another."""

    def build(self) -> None:
        """See Form."""
        self.old = self._tags(self.tr("Tag"))
        self.new = self._tags(self.tr("Write instead"))

    def title(self) -> str:
        """See Form."""
        return self.tr("Rename a tag")

    def make(self) -> Make | None:
        """See Form."""
        old, new = self.old.text().strip(), self.new.text().strip()
        return (lambda captions, lines: bulk.rename_tag(captions, old, new, lines)) if old and new else None


class ReplaceForm(Form):
    """Text, or what a regular expression finds."""

    def build(self) -> None:
        """See Form."""
        self.sought = self._line(self.tr("Find"))
        self.replacement = self._line(self.tr("Write instead"))
        self.pattern = self._check(self.tr("Regular expression"), False)
        self.capitals = self._check(self.tr("Capitals matter"), True)

    def title(self) -> str:
        """See Form."""
        return self.tr("Find and replace")

    def make(self) -> Make | None:
        """See Form."""
        find, replacement = self.sought.text(), self.replacement.text()
        pattern, capitals = self.pattern.isChecked(), self.capitals.isChecked()
        if not find:
            return None
        return lambda captions, _: bulk.replace_text(captions, find, replacement, pattern=pattern, capitals=capitals)


class SortForm(Form):
    """Tags in order."""

    def build(self) -> None:
        """See Form."""
        self.order = self._choice(self.tr("Order"), [self.tr("By the alphabet"), self.tr("The most frequent first")])
        self.keep = self._number(self.tr("Leave in front"), 0, 99)
        self.keep.setToolTip(self.tr("So many first tags of each caption stay where they are, such as a trigger word"))

    def title(self) -> str:
        """See Form."""
        return self.tr("Sort tags")

    def make(self) -> Make | None:
        """See Form."""
        order: bulk.Order = "frequency" if self.order.currentIndex() else "alphabet"
        keep = self.keep.value()
        return lambda captions, lines: bulk.sort_tags(captions, order, keep, lines)


class RepeatedForm(Form):
    """Tags that stand twice."""

    def build(self) -> None:
        """See Form."""
        self._explain(self.tr("Of a tag that stands in a caption more than once, the first stays."))

    def title(self) -> str:
        """See Form."""
        return self.tr("Remove repeated tags")

    def make(self) -> Make | None:
        """See Form."""
        return bulk.remove_repeated


class UnderscoresForm(Form):
    """Underscores and spaces."""

    def build(self) -> None:
        """See Form."""
        words = [self.tr("Spaces for underscores"), self.tr("Underscores for spaces")]
        self.direction = self._choice(self.tr("Write"), words)
        self._explain(self.tr("Faces such as ^_^ stay as they are."))

    def title(self) -> str:
        """See Form."""
        return self.tr("Underscores and spaces")

    def make(self) -> Make | None:
        """See Form."""
        return bulk.spaces_to_underscores if self.direction.currentIndex() else bulk.underscores_to_spaces


class TidyForm(Form):
    """Stray commas and spaces."""

    def build(self) -> None:
        """See Form."""
        self._explain(self.tr("Tags are parted by one comma and one space; empty ones and needless spaces go."))

    def title(self) -> str:
        """See Form."""
        return self.tr("Tidy commas and spaces")

    def make(self) -> Make | None:
        """See Form."""
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
