"""Mark texts for translation without Qt, and build messages from errors and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from trainer.errors import sentence_and_remedy, with_period


def QT_TRANSLATE_NOOP(context: str, text: str) -> str:  # noqa: N802 - lupdate looks for this name
    """Return the text unchanged; calls mark their text for `lupdate` and for QCoreApplication.translate.

    Qt's own function of this name is typed as returning `object`.
    """
    return text


def sentence_of(reason: str) -> str:
    """Return a validation reason, such as "must be ..., not ...", as a sentence."""
    return with_period(reason[:1].upper() + reason[1:])


class Explained(Protocol):
    """An error, or an event about an error."""

    @property
    def sentence(self) -> str:
        """Return what happened and why."""

    @property
    def remedy(self) -> str:
        """Return what to do."""


def full_message(fault: Explained) -> str:
    """Return the sentence and the remedy as one text."""
    return sentence_and_remedy(fault.sentence, fault.remedy)


def first_names(files: Sequence[Path]) -> str:
    """Return the names of the first three files for a message, followed by " …" if there are more."""
    return ", ".join(file.name for file in files[:3]) + (" …" if len(files) > 3 else "")
