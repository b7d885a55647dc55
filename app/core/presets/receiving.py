"""A preset that somebody sent, read and set against what is here, before anybody has agreed to it. For workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.config.presets.exchange import load_preset_or_image, read_pasted
from trainer.config.presets.library import (
    PresetEntry,
    changed_keys,
    free_name,
    is_built_in,
    preset_with_same_name,
    presets_folder,
    read_library,
)
from trainer.config.presets.preset import Preset, dump_preset
from trainer.protocol import files


@dataclass(frozen=True, slots=True)
class Received:
    """What came, and what it would change."""

    preset: Preset
    place: Path
    """A file that holds it for as long as it is looked at, for the planner to read."""
    former: PresetEntry | None
    """The one that has its name and family here."""
    built_in: bool
    """Its name is that of a preset that comes with Impasto, so that it needs another."""
    free_name: str
    """Its name, or with a number behind it where that is taken."""
    changes: tuple[tuple[str, str, str], ...]
    """Key, value here, value there; against `former`, else against a job that states nothing."""

    @property
    def had_already(self) -> bool:
        """The one here is the same, key for key."""
        return self.former is not None and not self.changes


def receive_file(path: Path) -> Received:
    """Read a preset's file, or a picture that holds one; raises JobError in words for anything else."""
    return _received(lambda: load_preset_or_image(path))


def receive_text(text: str, source: str) -> Received:
    """Read a preset that was pasted; raises JobError in words for anything else."""
    return _received(lambda: read_pasted(text, source))


def _received(read: Callable[[], Preset]) -> Received:
    preset = read()
    place = presets_folder() / "arriving" / "preset.toml"
    place.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(place, dump_preset(preset.replaced(preview=None)), durable=False)
    former = preset_with_same_name(preset)
    return Received(
        preset,
        place,
        former,
        is_built_in(preset),
        free_name(preset.name, preset.base.family, read_library()),
        tuple(changed_keys(former.preset if former else None, preset)),
    )
