"""Words for what can stand in a caption file or a note: captions as they are, ratings and the like spelt out."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

from app.core.edits.save_state import AnyField
from app.core.library import Value


def value_words(field: AnyField, value: Value) -> str | None:
    """Return a value as it is shown; None where there is none."""
    if value is None or isinstance(value, str):
        return value
    if field == "rating":
        return _tr("rated {value} of 5").format(value=value)
    if field == "excluded":
        return _tr("excluded") if value else _tr("included")
    if isinstance(value, tuple):
        left, top, right, bottom = (round(100 * edge) for edge in value)
        return _tr("cropped to {left}-{right} % by {top}-{bottom} %").format(
            left=left, top=top, right=right, bottom=bottom
        )
    if field == "regularisation":
        return _tr("for regularisation") if value else _tr("for training")
    return str(value)


def _tr(text: str) -> str:
    return QCoreApplication.translate("ValueWords", text)
