"""What one command is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Menu = Literal["file", "edit", "view", "pictures", "captions", "find", "train", "runs", "presets", "help"]


@dataclass(frozen=True, slots=True)
class Action:
    """One command, as every place that offers it sees it."""

    id: str
    """Stable name, `room.verb`."""
    title: str
    """What it does, in English and marked with QT_TRANSLATE_NOOP("Action", ...)."""
    menu: Menu
    """The menu it stands in, which is its group in palette and sheet too."""
    run: str
    """The owner's method that does it; it takes the new state where `checked` is given, else nothing."""
    keys: tuple[str, ...] = ()
    """Default shortcuts as Qt writes them portably: "Ctrl+K", "Right". The first one is shown."""
    enabled: str | None = None
    """The owner's method or property that tells whether it can be done now; None: always."""
    checked: str | None = None
    """The owner's method or property that tells whether it is on; None: it is nothing that can be on."""
    icon: str | None = None
    """A name of app/qt/icons."""
    tip: str = ""
    """One more sentence, marked like the title, where the title does not say it all."""
