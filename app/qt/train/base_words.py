"""Words about bases, for the picker and its list."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, QLocale

from app.core.models.verdict import Family, Found, Told, Tool, Verdict
from app.qt.words import QT_TRANSLATE_NOOP
from trainer.errors import joined

FAMILIES: dict[Family, str] = {"sd15": "SD 1.5", "sdxl": "SDXL"}
"""Names, the same in every language."""
_VELOCITY = QT_TRANSLATE_NOOP("Bases", "predicts velocity (v)")
_UNDECIDED = QT_TRANSLATE_NOOP("Bases", "nothing tells what it predicts: look it up and set Prediction")
_OWN_FOLDER = QT_TRANSLATE_NOOP("Bases", "your folder")
_CHOOSE = QT_TRANSLATE_NOOP("Bases", "The model that the LoRA will change.")
_LINK = QT_TRANSLATE_NOOP("Bases", "Is downloaded when training starts. What it is shows then.")
_HUB = QT_TRANSLATE_NOOP("Bases", "From the Hugging Face Hub. Is downloaded when training starts.")
_HUB_HERE = QT_TRANSLATE_NOOP("Bases", "From the Hugging Face Hub. Is on this PC already.")


def family_of(told: Told) -> str:
    """Return the badge of a base; empty where nothing is known."""
    return FAMILIES[told.family] if told.family else ""


def owner_of(tool: Tool) -> str:
    """Return whose folder it is."""
    return tool or _tr(_OWN_FOLDER)


def size_words(size: int) -> str:
    """Return bytes as people read them, or nothing where they are not known."""
    return QLocale().formattedDataSize(size, 1, QLocale.DataSizeFormat.DataSizeSIFormat) if size else ""


def details(found: Found) -> str:
    """Return the second line of a base in the list: what is wrong with it, else where it lies."""
    if found.told.problem:
        return found.told.problem
    parts = (owner_of(found.tool), size_words(found.bytes), _prediction(found.told), str(found.path.parent))
    return " · ".join(part for part in parts if part)


def verdict_words(verdict: Verdict) -> str:
    """Return the line below the field."""
    told = verdict.told
    if told.problem:
        return joined(told.problem, told.remedy)
    if verdict.place == "link":
        return _tr(_LINK)
    if verdict.place == "hub":
        return _tr(_HUB_HERE if told.family else _HUB)
    if verdict.place == "nowhere":
        return _tr(_CHOOSE)
    return " · ".join(part for part in (size_words(verdict.bytes), _prediction(told)) if part)


def _prediction(told: Told) -> str:
    """Most bases predict noise: only what differs is worth a word."""
    if told.velocity is None:
        return _tr(_UNDECIDED)
    return _tr(_VELOCITY) if told.velocity else ""


def _tr(text: str) -> str:
    return QCoreApplication.translate("Bases", text)
