"""Read a received preset and compare it with the library before it is added. For workers."""

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
    """A received preset and what adding it would change."""

    preset: Preset
    file: Path
    """Temporary file with the preset, for the planner to read while the preset is shown."""
    existing: PresetEntry | None
    """The preset in the library with the same name and family, if any."""
    built_in: bool
    """Whether a built-in preset has its name, so that it needs another one."""
    free_name: str
    """Its name, with a number appended if the name is taken."""
    changes: tuple[tuple[str, str, str], ...]
    """Key, old and new value of each difference from `existing` or, without one, from the defaults."""

    @property
    def is_unchanged(self) -> bool:
        """Return whether the library already has the same preset, key for key."""
        return self.existing is not None and not self.changes


def receive_file(path: Path) -> Received:
    """Read a preset file or an image that contains a preset; raise JobError for anything else."""
    return _received(lambda: load_preset_or_image(path))


def receive_text(text: str, source: str) -> Received:
    """Read a pasted preset; raise JobError for anything else. `source` names the text in errors."""
    return _received(lambda: read_pasted(text, source))


def _received(read: Callable[[], Preset]) -> Received:
    preset = read()
    file = presets_folder() / "arriving" / "preset.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(file, dump_preset(preset.replaced(preview=None)), durable=False)
    existing = preset_with_same_name(preset)
    return Received(
        preset,
        file,
        existing,
        is_built_in(preset),
        free_name(preset.name, preset.base.family, read_library()),
        tuple(changed_keys(existing.preset if existing else None, preset)),
    )
