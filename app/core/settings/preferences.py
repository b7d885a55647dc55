"""What the user can choose about the app: one schema, from which the form of the preferences is made.

A room that has something to choose adds a field to a section here, or a section; a field needs a default, `title` and
`description` marked for translation, bounds for a number, `labels` for the words of a Literal. Nothing else: the form,
the file and its checks follow.
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


class PreferenceGroup(BaseModel):
    """A group of preferences; never changed in place."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def choice(default: Any, title: str, description: str, **more: Any) -> Any:
    """Return a field with the words that the form shows; `labels` name the values of a Literal, `unit` a number's."""
    extra: dict[str, Any] = {key: more.pop(key) for key in ("labels", "unit") if key in more}
    return Field(default, title=title, description=description, json_schema_extra=extra, **more)


class Appearance(PreferenceGroup):
    """How the app looks."""

    look: Literal["system", "light", "dark", "contrast"] = choice(
        "system",
        QT_TRANSLATE_NOOP("Preferences", "Colours"),
        QT_TRANSLATE_NOOP("Preferences", "High contrast is white and yellow on black."),
        labels={
            "system": QT_TRANSLATE_NOOP("Preferences", "As the system"),
            "light": QT_TRANSLATE_NOOP("Preferences", "Light"),
            "dark": QT_TRANSLATE_NOOP("Preferences", "Dark"),
            "contrast": QT_TRANSLATE_NOOP("Preferences", "High contrast"),
        },
    )
    scaling: int = choice(
        100,
        QT_TRANSLATE_NOOP("Preferences", "Size of everything"),
        QT_TRANSLATE_NOOP("Preferences", "In addition to what the system asks for; from the next start on."),
        ge=100,
        le=200,
        multiple_of=5,
        unit="%",
    )
    language: str = choice(
        "system",
        QT_TRANSLATE_NOOP("Preferences", "Language"),
        QT_TRANSLATE_NOOP("Preferences", "From the next start on."),
        pattern=r"^(system|[a-z]{2,3}(_[A-Z]{2})?)$",
    )


class StartupPreferences(PreferenceGroup):
    """What happens when the app starts."""

    reopen: bool = choice(
        True,
        QT_TRANSLATE_NOOP("Preferences", "Open what was open last"),
        QT_TRANSLATE_NOOP("Preferences", "The folders that were open when the window was closed."),
    )


class Judging(PreferenceGroup):
    """What was chosen on the images page while no job used the open folders: the next new job starts with it.

    Not in the dialog: where a job uses the folders, its own settings count (app/core/jobs/target.py).
    """

    resolution: int | None = Field(default=None, ge=64, le=4096, multiple_of=64)
    """Training resolution in pixels; None: nothing was chosen, so the base decides."""
    tokens: int = Field(default=75, ge=75, le=225, multiple_of=75)
    """How many tokens of a caption are read."""
    lines: Literal["caption", "variants"] = "caption"
    """How captions of several lines are read, as in `dataset.lines`."""


class NotificationPreferences(PreferenceGroup):
    """How the user is told that a run has ended."""

    notify: bool = choice(
        True,
        QT_TRANSLATE_NOOP("Preferences", "Notice when a run ends"),
        QT_TRANSLATE_NOOP("Preferences", "In the window, and by the system while another window is in front."),
    )
    sound: bool = choice(
        True,
        QT_TRANSLATE_NOOP("Preferences", "Sound when a run ends"),
        QT_TRANSLATE_NOOP("Preferences", "The system's own; also when a run fails."),
    )


class Preferences(PreferenceGroup):
    """All of it."""

    appearance: Appearance = Field(default=Appearance(), title=QT_TRANSLATE_NOOP("Preferences", "Appearance"))
    starting: StartupPreferences = Field(default=StartupPreferences(), title=QT_TRANSLATE_NOOP("Preferences", "Start"))
    judging: Judging = Judging()
    telling: NotificationPreferences = Field(
        default=NotificationPreferences(), title=QT_TRANSLATE_NOOP("Preferences", "Runs")
    )
    shortcuts: dict[str, tuple[str, ...]] = Field(default={})
    """The user's own keys by command; what is not named here has those of the table. Edited in a dialog of its own."""


class Settings:
    """The preferences in force; belongs to the thread that made it.

    `file.notice` is a sentence about what was wrong with the file: the window shows it once.
    """

    def __init__(self, path: Path | None = None) -> None:
        path = path or places.home() / "preferences.toml"
        # The way home is given by the session; before there is one, nobody changes anything.
        self.file = DurableWriter(path, "preferences", "settings.unwritable", lambda work: work())
        self.changed: Emitter[Preferences] = Emitter()
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
    from trainer.config.toml_file import toml_value  # the trainer's schema takes a fifth of a second, after the window

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
