"""Remembers the bases that were used last, and the folders of models that the user named: models.json of `home`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.core.settings.behind import Behind
from trainer.protocol import places
from trainer.protocol.fields import json_keys, to_record

_MOST = 40


@json_keys("recent", "folders", "loras", "passed_over")
@dataclass(frozen=True, slots=True)
class Choices:
    """What the user chose; texts, newest first."""

    recent: tuple[str, ...] = ()
    """Texts of `base.model`."""
    folders: tuple[str, ...] = ()
    """Folders of models, or of tools, that are searched too."""
    loras: tuple[str, ...] = ()
    """Folders that the user exported LoRAs to."""
    passed_over: tuple[str, ...] = ()
    """Folders of tools whose models are not wanted."""


class Kept:
    """The choices in force; each change is on disk soon, and when `settle` returns."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = Behind(path or places.home() / "models.json", "the models in use were")
        self.choices = self._file.load(_choices, Choices(), "no base is remembered", _text)

    @property
    def notice(self) -> str:
        """What was wrong with the file, in a sentence."""
        return self._file.notice

    def put_first(self, what: str, text: str) -> bool:
        """Put a text first in one of the lists; returns whether that changes anything."""
        others = tuple(one for one in getattr(self.choices, what) if one != text)
        return self._keep(replace(self.choices, **{what: (text, *others)[:_MOST]}))

    def remove(self, what: str, text: str) -> bool:
        """Take a text out of one of the lists; returns whether it was in it."""
        return self._keep(replace(self.choices, **{what: tuple(o for o in getattr(self.choices, what) if o != text)}))

    def settle(self) -> None:
        """Wait until what changed is on disk."""
        self._file.settle()

    def _keep(self, choices: Choices) -> bool:
        if choices == self.choices:
            return False
        self.choices = choices
        self._file.write(_text(choices))
        return True


def _text(choices: Choices) -> str:
    return json.dumps(to_record(choices), indent=1) + "\n"  # ASCII, since names on Linux need not be text


def _choices(kept: Any, left_out: list[str]) -> Choices:
    recent, folders, loras, passed_over = (
        _texts(kept.get(key, []), key, left_out) for key in ("recent", "folders", "loras", "passed_over")
    )
    return Choices(recent, folders, loras, passed_over)


def _texts(value: object, name: str, left_out: list[str]) -> tuple[str, ...]:
    if not isinstance(value, list):
        left_out.append(name)
        return ()
    left_out += [f"{name}: {repr(text)[:80]}" for text in value if not isinstance(text, str)]
    return tuple(dict.fromkeys(text for text in value if isinstance(text, str)))[:_MOST]
