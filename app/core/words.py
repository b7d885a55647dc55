"""Marks words for translation where they stand in a table, long before anybody can be asked which language to show."""

from __future__ import annotations


def QT_TRANSLATE_NOOP(context: str, text: str) -> str:  # noqa: N802 - lupdate looks for this name
    """Return the text as it is: `lupdate` finds it here, and QCoreApplication.translate(context, ...) uses it later.

    Qt's own function of this name is typed as returning any object.
    """
    return text
