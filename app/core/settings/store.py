"""Keeps the preferences in preferences.toml of the per-user folder; a file that cannot be read costs nobody the app."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.core.events import Event
from app.core.settings.aside import set_aside
from app.core.settings.behind import Kept
from app.core.settings.preferences import Preferences
from trainer.protocol import atomic, places


class Settings:
    """The preferences in force; belongs to the thread that made it.

    `notices` holds sentences about what was wrong with the file: the window shows them once.
    """

    def __init__(self, path: Path | None = None) -> None:
        path = path or places.home() / "preferences.toml"
        # The way home is given by the session; before there is one, nobody changes anything.
        self.file = Kept(path, "preferences", "settings.unwritable", lambda work: work())
        self.changed: Event[Preferences] = Event()
        self.notices: list[str] = []
        self.preferences = self._read()

    def change(self, preferences: Preferences) -> None:
        """Put other preferences in force and keep them; where they cannot be written they hold for this session."""
        if preferences == self.preferences:
            return
        self.preferences = preferences
        self.changed.emit(preferences)
        self.file.write(to_toml(preferences))

    def judge(self, **facts: str | int) -> None:
        """Judge pictures and captions for another training: fields of `Judging`."""
        judging = self.preferences.judging.model_copy(update=facts)
        self.change(self.preferences.model_copy(update={"judging": judging}))

    def _read(self) -> Preferences:
        try:
            found = tomllib.loads(atomic.read_text(self.file.path))
        except FileNotFoundError:
            return Preferences()
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            wrong = f"could not be read ({error}), so everything is as in a new installation"
            self.notices.append(set_aside(self.file.path, wrong))
            return Preferences()
        try:
            return Preferences.model_validate(found)
        except ValidationError as error:
            names = ", ".join(".".join(map(str, fault["loc"])) for fault in error.errors())
            wrong = f"has values that mean nothing here ({names}); all others are kept"
            self.notices.append(set_aside(self.file.path, wrong))
            return _without(found, error)


def to_toml(preferences: Preferences) -> str:
    """Return the text of preferences.toml: only what differs from the defaults."""
    from trainer.config.write import toml_value  # the trainer's schema takes a fifth of a second, after the window

    lines = []
    for section, values in preferences.model_dump(exclude_defaults=True).items():
        lines.append(f"[{section}]")
        lines += [f"{toml_value(key)} = {toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _without(found: Mapping[str, Any], error: ValidationError) -> Preferences:
    """Return what is left when the values that an error names are left out."""
    kept = {name: dict(values) if isinstance(values, Mapping) else values for name, values in found.items()}
    for fault in error.errors():
        section, *key = map(str, fault["loc"])
        if key and isinstance(kept.get(section), dict):
            kept[section].pop(key[0], None)
        else:
            kept.pop(section, None)
    return Preferences.model_validate(kept)
