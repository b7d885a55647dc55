"""Marks words for translation where they stand in a table, long before anybody can be asked which language to show.

And makes sentences of reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from trainer.errors import sentence_and_remedy, with_period


def QT_TRANSLATE_NOOP(context: str, text: str) -> str:  # noqa: N802 - lupdate looks for this name
    """Return the text as it is: `lupdate` finds it here, and QCoreApplication.translate(context, ...) uses it later.

    Qt's own function of this name is typed as returning any object.
    """
    return text


def sentence_of(reason: str) -> str:
    """Return a reason of a check, "must be ..., not ...", as a sentence of its own."""
    return with_period(reason[:1].upper() + reason[1:])


class Explained(Protocol):
    """What an error or an event that tells of one says."""

    @property
    def sentence(self) -> str:
        """What happened, and why."""

    @property
    def remedy(self) -> str:
        """What to do."""


def in_words(fault: Explained) -> str:
    """Return what happened and what to do, one after the other."""
    return sentence_and_remedy(fault.sentence, fault.remedy)


def first_names(files: Sequence[Path]) -> str:
    """Return the names of a few files, for a sentence."""
    return ", ".join(file.name for file in files[:3]) + (" …" if len(files) > 3 else "")
