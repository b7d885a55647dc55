"""Keeps the preferences in preferences.toml of the per-user folder; a file that cannot be read costs nobody the app."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.core.events import Event
from app.core.settings.behind import Kept
from app.core.settings.preferences import Preferences
from trainer.protocol import places
from trainer.protocol.reading import read_toml


class Settings:
    """The preferences in force; belongs to the thread that made it.

    `file.notice` is a sentence about what was wrong with the file: the window shows it once.
    """

    def __init__(self, path: Path | None = None) -> None:
        path = path or places.home() / "preferences.toml"
        # The way home is given by the session; before there is one, nobody changes anything.
        self.file = Kept(path, "preferences", "settings.unwritable", lambda work: work())
        self.changed: Event[Preferences] = Event()
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
        lost = "everything is as in a new installation"
        return self.file.load(_preferences, Preferences(), lost, to_toml, lambda path: read_toml(path, "settings"))


def to_toml(preferences: Preferences) -> str:
    """Return the text of preferences.toml: only what differs from the defaults."""
    from trainer.config.write import toml_value  # the trainer's schema takes a fifth of a second, after the window

    lines = []
    for section, values in preferences.model_dump(exclude_defaults=True).items():
        lines.append(f"[{section}]")
        lines += [f"{toml_value(key)} = {toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _preferences(found: Any, left_out: list[str]) -> Preferences:
    try:
        return Preferences.model_validate(found)
    except ValidationError as error:
        left_out += [".".join(map(str, fault["loc"])) for fault in error.errors()]
        return _without(found, error)


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
