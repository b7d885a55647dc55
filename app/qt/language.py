"""Puts the user's language in force: our own words, and Qt's for its dialogs and buttons."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QCoreApplication, QLibraryInfo, QLocale, QTranslator

FOLDER = Path(__file__).resolve().parents[1] / "i18n"
_OURS = "impasto"


def languages() -> list[str]:
    """Return the codes of the languages that the app speaks."""
    return sorted(path.stem.partition("_")[2] for path in FOLDER.glob(f"{_OURS}_*.qm"))


def speak(application: QCoreApplication, language: str) -> None:
    """Load the words of a language ("system": the system's); English where there are none.

    English has a translation as well: its plural forms.
    """
    locale = QLocale.system() if language == "system" else QLocale(language)
    QLocale.setDefault(locale)
    qt = QLibraryInfo.path(QLibraryInfo.LibraryPath.TranslationsPath)
    _install(application, QLocale("en"), _OURS, str(FOLDER))
    _install(application, locale, "qtbase", qt)
    if locale.language() != QLocale.Language.English:
        _install(application, locale, _OURS, str(FOLDER))


def _install(application: QCoreApplication, locale: QLocale, name: str, folder: str) -> None:
    translator = QTranslator(application)
    if translator.load(locale, name, "_", folder):
        application.installTranslator(translator)
