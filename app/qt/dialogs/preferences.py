"""The preferences: a page for each section of the schema, and one for the keys. What is changed counts at once."""

from __future__ import annotations

from PySide6.QtCore import QLocale
from PySide6.QtWidgets import QDialog, QLabel, QTabWidget, QVBoxLayout, QWidget

from app.core.settings.preferences import Preferences, Section, Settings
from app.core.words import QT_TRANSLATE_NOOP
from app.qt.actions.commands import Commands
from app.qt.dialogs.form import SectionForm, words
from app.qt.dialogs.parts import close_row
from app.qt.dialogs.shortcuts import ShortcutEditor
from app.qt.language import languages


class PreferencesDialog(QDialog):
    """Made from the schema alone; closing it asks nothing, since every change is in force and on disk already.

    Where the disk refuses, the window says so.
    """

    def __init__(self, settings: Settings, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self._forms: dict[str, SectionForm] = {}
        self.setWindowTitle(self.tr("Preferences"))
        self.resize(640, 520)
        self.tabs = QTabWidget()
        self.tabs.setAccessibleName(self.windowTitle())
        self.tabs.setDocumentMode(True)
        self.fault = QLabel()
        self.fault.setProperty("role", "bad")
        self.fault.setWordWrap(True)
        self.fault.hide()
        for name, field in Preferences.model_fields.items():
            section = getattr(settings.preferences, name)
            if isinstance(section, Section) and field.title:
                self._add_section(name, words(field.title), section)
        self.shortcuts = ShortcutEditor(commands, settings.preferences.shortcuts)
        self.shortcuts.changed.connect(self._keep)
        self.tabs.addTab(self.shortcuts, self.tr("Keys"))
        buttons = close_row(self)
        column = QVBoxLayout(self)
        column.addWidget(self.tabs)
        column.addWidget(self.fault)
        column.addWidget(buttons)

    def _add_section(self, name: str, title: str, section: Section) -> None:
        form = self._forms[name] = SectionForm(section, {"language": _language_names()})
        form.changed.connect(self._keep)
        self.tabs.addTab(form, title)

    def _keep(self) -> None:
        try:
            sections = {name: form.section() for name, form in self._forms.items()}
            self._settings.change(
                self._settings.preferences.model_copy(update={**sections, "shortcuts": self.shortcuts.own.copy()})
            )
        except ValueError as error:  # as pydantic's errors are
            self.fault.setText(self.tr("This could not be kept: {error}").format(error=error))
            self.fault.show()
        else:
            self.fault.hide()


def _language_names() -> dict[str, str]:
    """Each language in its own words, so that whoever speaks it finds it."""
    names = {code: QLocale(code).nativeLanguageName().capitalize() or code for code in languages()}
    return {"system": QT_TRANSLATE_NOOP("Preferences", "As the system"), **names}
