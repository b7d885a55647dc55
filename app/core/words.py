"""Marks words for translation where they stand in a table, long before anybody can be asked which language to show.

And makes sentences of reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def QT_TRANSLATE_NOOP(context: str, text: str) -> str:  # noqa: N802 - lupdate looks for this name
    """Return the text as it is: `lupdate` finds it here, and QCoreApplication.translate(context, ...) uses it later.

    Qt's own function of this name is typed as returning any object.
    """
    return text


def sentence_of(reason: str) -> str:
    """Return a reason of a check, "must be ..., not ...", as a sentence of its own."""
    text = reason[:1].upper() + reason[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def first_names(files: Sequence[Path]) -> str:
    """Return the names of a few files, for a sentence."""
    return ", ".join(file.name for file in files[:3]) + (" …" if len(files) > 3 else "")
