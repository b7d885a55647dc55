"""Define the user's preferences of the app as a schema, and load and save them.

The preferences dialog, the file and its validation are built from this schema, so a new preference only needs a field
with a default, a `title` and `description` marked for translation, bounds for a number, and `labels` for a Literal.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.core.events import Emitter
from app.core.settings.deferred_writer import DurableWriter
from app.core.words import QT_TRANSLATE_NOOP
from trainer.protocol import places
from trainer.protocol.reading import read_toml

_RENAMED_COMMANDS = {
    "window.pictures": "window.images",
    "presets.save_picture": "presets.save_image",
    "samples.beside": "samples.side_by_side",
}
"""Current ids of commands, by the ids that 0.1.0 stored; `_current_id` also renames all that start with "pictures."."""


class PreferenceGroup(BaseModel):
    """An immutable group of preferences."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def choice(default: Any, title: str, description: str, **more: Any) -> Any:
    """Return a field with the texts for the dialog; `more` may contain `labels` for a Literal's values, or a `unit`."""
    extra: dict[str, Any] = {key: more.pop(key) for key in ("labels", "unit") if key in more}
    return Field(default, title=title, description=description, json_schema_extra=extra, **more)


class Appearance(PreferenceGroup):
    """Appearance of the app."""

    look: Literal["system", "light", "dark", "contrast"] = choice(
        "system",
        QT_TRANSLATE_NOOP("Preferences", "Theme"),
        QT_TRANSLATE_NOOP("Preferences", "High contrast shows white and yellow on black."),
        labels={
            "system": QT_TRANSLATE_NOOP("Preferences", "System"),
            "light": QT_TRANSLATE_NOOP("Preferences", "Light"),
            "dark": QT_TRANSLATE_NOOP("Preferences", "Dark"),
            "contrast": QT_TRANSLATE_NOOP("Preferences", "High contrast"),
        },
    )
    scaling: int = choice(
        100,
        QT_TRANSLATE_NOOP("Preferences", "Interface scale"),
        QT_TRANSLATE_NOOP("Preferences", "In addition to the system's scale. Takes effect after a restart."),
        ge=100,
        le=200,
        multiple_of=5,
        unit="%",
    )
    language: str = choice(
        "system",
        QT_TRANSLATE_NOOP("Preferences", "Language"),
        QT_TRANSLATE_NOOP("Preferences", "Takes effect after a restart."),
        pattern=r"^(system|[a-z]{2,3}(_[A-Z]{2})?)$",
    )


class StartupPreferences(PreferenceGroup):
    """What the app does when it starts."""

    reopen: bool = choice(
        True,
        QT_TRANSLATE_NOOP("Preferences", "Reopen folders"),
        QT_TRANSLATE_NOOP("Preferences", "Opens the folders that were open when you closed the window."),
    )


class Judging(PreferenceGroup):
    """Settings chosen on the Images page while no job uses the open folders; the next new job starts with them.

    They are not in the dialog. If a job uses the folders, its own settings apply (app/core/jobs/target.py).
    """

    resolution: int | None = Field(default=None, ge=64, le=4096, multiple_of=64)
    """Training resolution in pixels; None for the default of the base."""
    tokens: int = Field(default=75, ge=75, le=225, multiple_of=75)
    """Maximum number of caption tokens used in training."""
    lines: Literal["caption", "variants"] = "caption"
    """How captions with several lines are read, as in `dataset.lines`."""


class NotificationPreferences(PreferenceGroup):
    """Notifications about the end of a run."""

    notify: bool = choice(
        True,
        QT_TRANSLATE_NOOP("Preferences", "Notify when a run ends"),
        QT_TRANSLATE_NOOP(
            "Preferences", "In the window, or as a system notification while another window is in front."
        ),
    )
    sound: bool = choice(
        True,
        QT_TRANSLATE_NOOP("Preferences", "Play a sound when a run ends"),
        QT_TRANSLATE_NOOP("Preferences", "Plays the system sound, also when a run fails."),
    )


class Preferences(PreferenceGroup):
    """All preferences of the app."""

    appearance: Appearance = Field(default=Appearance(), title=QT_TRANSLATE_NOOP("Preferences", "Appearance"))
    starting: StartupPreferences = Field(
        default=StartupPreferences(), title=QT_TRANSLATE_NOOP("Preferences", "Startup")
    )
    judging: Judging = Judging()
    telling: NotificationPreferences = Field(
        default=NotificationPreferences(), title=QT_TRANSLATE_NOOP("Preferences", "Runs")
    )
    shortcuts: dict[str, tuple[str, ...]] = Field(default={})
    """The user's shortcuts by command; other commands have their defaults. Edited in a separate dialog."""


class Settings:
    """The current preferences, for the thread that creates it.

    `file.notice` is a message about any problem with the file; the window shows it once.
    """

    def __init__(self, path: Path | None = None) -> None:
        path = path or places.home() / "preferences.toml"
        # The session replaces `post` with its own; before that, nothing changes the preferences.
        self.file = DurableWriter(path, "preferences", "settings.unwritable", lambda work: work())
        self.changed: Emitter[Preferences] = Emitter()
        self.preferences = self._read()

    def change(self, preferences: Preferences) -> None:
        """Apply and save preferences; if they cannot be saved, they apply until the app closes."""
        if preferences == self.preferences:
            return
        self.preferences = preferences
        self.changed.emit(preferences)
        self.file.write(to_toml(preferences))

    def set_checks(self, **facts: str | int) -> None:
        """Change fields of `Judging`: the settings that images and captions are checked against."""
        judging = self.preferences.judging.model_copy(update=facts)
        self.change(self.preferences.model_copy(update={"judging": judging}))

    def _read(self) -> Preferences:
        lost = "All preferences were reset to their defaults."
        return self.file.load(_preferences, Preferences(), lost, to_toml, lambda path: read_toml(path, "settings"))


def to_toml(preferences: Preferences) -> str:
    """Return the text of preferences.toml, with only the values that differ from the defaults."""
    from trainer.config.toml_file import toml_value  # late: importing the trainer's schema takes 0.2 s

    lines = []
    for section, values in preferences.model_dump(exclude_defaults=True).items():
        lines.append(f"[{section}]")
        lines += [f"{toml_value(key)} = {toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _current_id(command: str) -> str:
    """Return the current id of a command; `command` may be the id that 0.1.0 stored."""
    if command.startswith("pictures."):
        return command.replace("pictures", "images", 1)
    return _RENAMED_COMMANDS.get(command, command)


def _preferences(found: Any, left_out: list[str]) -> Preferences:
    if isinstance(shortcuts := found.get("shortcuts"), Mapping):
        found = {**found, "shortcuts": {_current_id(command): keys for command, keys in shortcuts.items()}}
    try:
        return Preferences.model_validate(found)
    except ValidationError as error:
        left_out += [".".join(map(str, fault["loc"])) for fault in error.errors()]
        return _without(found, error)


def _without(found: Mapping[str, Any], error: ValidationError) -> Preferences:
    """Return the preferences without the values that failed validation."""
    valid = {name: dict(values) if isinstance(values, Mapping) else values for name, values in found.items()}
    for fault in error.errors():
        section, *key = map(str, fault["loc"])
        if key and isinstance(valid.get(section), dict):
            valid[section].pop(key[0], None)
        else:
            valid.pop(section, None)
    return Preferences.model_validate(valid)
