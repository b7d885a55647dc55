"""Makes a form of a section of the preferences: what its JSON schema says is what is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QCoreApplication, Signal
from PySide6.QtWidgets import QCheckBox, QFormLayout, QLabel, QLineEdit, QVBoxLayout, QWidget

from app.core.settings.preferences import Section
from app.qt.inputs import ComboBox, SpinBox

_Editor = tuple[QWidget, Callable[[], Any]]
"""A widget, and the function that reads its value."""


def words(text: str | None) -> str:
    """Return a text of the schema in the user's language."""
    return QCoreApplication.translate("Preferences", text) if text else ""


class SectionForm(QWidget):
    """One row for each preference of a section; `choices` adds values that only the window knows, by name."""

    changed = Signal()

    def __init__(self, section: Section, choices: dict[str, dict[str, str]] | None = None) -> None:
        super().__init__()
        self._section = section
        self._read: dict[str, Callable[[], Any]] = {}
        layout = QFormLayout(self)
        layout.setContentsMargins(16, 18, 16, 16)
        layout.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.FieldsStayAtSizeHint)
        layout.setHorizontalSpacing(20)
        layout.setVerticalSpacing(14)
        for name, schema in type(section).model_json_schema()["properties"].items():
            self._add_row(layout, name, {**schema, "labels": (choices or {}).get(name) or _labels(schema)})

    def section(self) -> Section:
        """Return the section as the form says it; raises pydantic's ValidationError where that is not allowed."""
        return type(self._section)(**{name: read() for name, read in self._read.items()})

    def _add_row(self, layout: QFormLayout, name: str, schema: dict[str, Any]) -> None:
        editor, self._read[name] = self._editor(getattr(self._section, name), schema)
        title = QLabel(words(schema["title"]))
        title.setBuddy(editor)
        editor.setAccessibleName(title.text())
        hint = QLabel(words(schema.get("description")))
        hint.setProperty("role", "muted")
        editor.setAccessibleDescription(hint.text())
        cell = QWidget()
        column = QVBoxLayout(cell)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(3)
        column.addWidget(editor)
        column.addWidget(hint)
        layout.addRow(title, cell)

    def _editor(self, value: Any, schema: dict[str, Any]) -> _Editor:
        if schema["labels"]:
            return self._choice(value, schema["labels"])
        if isinstance(value, bool):
            tick = QCheckBox()
            tick.setChecked(value)
            tick.toggled.connect(self.changed)
            return tick, tick.isChecked
        if isinstance(value, int):
            return self._number(value, schema)
        line = QLineEdit(str(value))
        line.setMinimumWidth(260)
        line.editingFinished.connect(self.changed)
        return line, line.text

    def _choice(self, value: str, labels: dict[str, str]) -> _Editor:
        box = ComboBox()
        for key, label in labels.items():
            box.addItem(words(label), key)
        box.setCurrentIndex(max(box.findData(value), 0))
        box.currentIndexChanged.connect(self.changed)
        return box, box.currentData

    def _number(self, value: int, schema: dict[str, Any]) -> _Editor:
        box = SpinBox()
        box.setRange(schema["minimum"], schema["maximum"])
        box.setSingleStep(schema.get("multipleOf", 1))
        box.setSuffix(f" {schema['unit']}" if "unit" in schema else "")
        box.setValue(value)
        box.setMaximumWidth(110)
        box.lineEdit().setTextMargins(5, 0, 0, 0)  # Qt passes over the style sheet's padding here
        box.editingFinished.connect(self.changed)
        return box, box.value


def _labels(schema: dict[str, Any]) -> dict[str, str]:
    """The words for each value of a Literal; the values themselves where the schema gives none."""
    labels: dict[str, str] = schema.get("labels", {})
    return {value: labels.get(value, value) for value in schema.get("enum", ())}
