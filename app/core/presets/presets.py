"""Read and write the preset library on workers, and notify pages of changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from app.core.events import Emitter
from app.core.presets.cost_estimates import CostEstimates
from app.core.tasks import Tasks
from trainer.errors import ImpastoError, JobError

# These modules import Pillow, which would delay the window: workers import them.
if TYPE_CHECKING:
    from trainer.config.presets.creating import CreatedPreset
    from trainer.config.presets.library import Origin, PresetEntry, PresetLibrary, PresetVersion, Received
    from trainer.config.presets.preset import Preset

    Past = tuple[PresetVersion, list[tuple[str, str, str]]]
    """A version, and the settings that restoring it would change, each as (key, current value, restored value)."""

_Result = TypeVar("_Result")
Refused = Callable[[ImpastoError], None] | None
"""Callback for the error if an action fails; if None, `failed` is emitted instead."""


class Presets:
    """Access to the preset library, for the thread that creates it; callbacks run on that thread."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.entries: PresetLibrary | None = None
        """The library; None until it has been read for the first time."""
        self.changed: Emitter[None] = Emitter()
        self.failed: Emitter[ImpastoError] = Emitter()
        self.cost_estimates = CostEstimates(tasks.post)
        self._reads = count(1)
        self._newest = 0
        """Sequence number of the read that produced `entries`."""

    def close(self) -> None:
        """Stop the planner."""
        self.cost_estimates.close()

    def reload(self) -> None:
        """Read the library again."""
        self._change(lambda: None, lambda _: None)

    def receive(self, source: Path | str, then: Callable[[Received], None], refused: Refused = None) -> None:
        """Read a preset from a file, an image that contains a preset, or pasted text; do not add it to the library."""

        def work() -> Received:
            from trainer.config.presets.library import receive_file, receive_text

            return receive_file(source) if isinstance(source, Path) else receive_text(source, "The text")

        self._run(work, then, refused)

    def add(
        self, preset: Preset, name: str, origin: Origin, then: Callable[[Path], None], refused: Refused = None
    ) -> None:
        """Save a preset under a name, replacing any preset of that name; call `then` with its path."""

        def work() -> Path:
            from trainer.config.presets.creating import revised
            from trainer.config.presets.library import is_built_in, require_free, save_preset

            named = preset if name == preset.name else revised(preset, {"name": name})
            if is_built_in(named):
                require_free(named)
            return save_preset(named, origin)[0]

        self._change(work, then, refused)

    def duplicate(self, entry: PresetEntry, then: Callable[[Path], None]) -> None:
        """Copy a preset to the user's presets, under its name with a number appended."""
        self._change(lambda: _save_under_free_name(entry.preset)[0], then)

    def create_from_lora(
        self, lora: Path, then: Callable[[tuple[Path, CreatedPreset]], None], refused: Refused = None
    ) -> None:
        """Create a preset from the metadata of a LoRA file."""

        def work() -> tuple[Path, CreatedPreset]:
            from trainer.config.presets.creating import preset_of_lora

            created = preset_of_lora(lora)
            path, preset = _save_under_free_name(created.preset)
            return path, replace(created, preset=preset)

        self._change(work, then, refused)

    def revise(
        self, entry: PresetEntry, details: Mapping[str, object], then: Callable[[Path], None], refused: Refused = None
    ) -> None:
        """Change details of a preset, given by key, and keep the old state as a version.

        "image" is the path of a new preview image, or None to remove the preview.
        """

        def work() -> Path:
            from trainer.config.presets.creating import revised
            from trainer.config.presets.library import require_free, rewrite_preset
            from trainer.config.presets.preview_image import make_preview

            changed = dict(details)
            if "image" in changed:
                image = changed.pop("image")
                changed["preview"] = {"image": make_preview(image)} if isinstance(image, Path) else None
            preset = revised(entry.preset, changed)
            require_free(preset, but=entry.path)
            rewrite_preset(entry.path, preset)
            return entry.path

        self._change(work, then, refused)

    def versions(self, entry: PresetEntry, then: Callable[[list[Past]], None]) -> None:
        """Call `then` with the earlier versions of a preset that differ from it, the latest first."""

        def work() -> list[Past]:
            from trainer.config.presets.exchange import load_preset
            from trainer.config.presets.library import changed_keys, versions_of

            found = []
            for version in versions_of(entry.path):
                try:
                    changes = changed_keys(entry.preset, load_preset(version.path))
                except JobError:  # a damaged file that was replaced is kept as a version too, but cannot be restored
                    continue
                if changes:
                    found.append((version, changes))
            return found

        self._run(work, then)

    def restore(
        self, entry: PresetEntry, version: PresetVersion, then: Callable[[Path], None], refused: Refused = None
    ) -> None:
        """Restore an earlier version of a preset; the current state is kept as a version."""

        def work() -> Path:
            from trainer.config.presets.exchange import load_preset
            from trainer.config.presets.library import require_free, rewrite_preset

            preset = load_preset(version.path)
            require_free(preset, but=entry.path)
            rewrite_preset(entry.path, preset)
            return entry.path

        self._change(work, then, refused)

    def export(self, preset: Preset, target: Path, then: Callable[[Path], None]) -> None:
        """Export a preset: into an image if `target` ends in .png, otherwise as a preset file."""

        def work() -> Path:
            from trainer.config.presets.exchange import save_as_image
            from trainer.config.presets.preset import dump_preset
            from trainer.protocol import files

            if target.suffix.lower() == ".png":
                save_as_image(preset, target)
            else:
                files.write_text(target, dump_preset(preset))
            return target

        self._run(work, then)

    def _change(self, work: Callable[[], _Result], then: Callable[[_Result], None], refused: Refused = None) -> None:
        """Run `work`, which changes files, then read the library again, then call `then`."""

        def work_and_read() -> tuple[_Result, int, PresetLibrary]:
            from trainer.config.presets.library import read_library

            return work(), next(self._reads), read_library()

        def on_read(outcome: tuple[_Result, int, PresetLibrary]) -> None:
            result, number, library = outcome
            if number > self._newest:  # with two workers, the earlier read may arrive later
                self._newest, self.entries = number, library
                self.changed.emit(None)
            then(result)

        self._run(work_and_read, on_read, refused)

    def _run(self, work: Callable[[], _Result], then: Callable[[_Result], None], refused: Refused = None) -> None:
        self._tasks.run(work, then, lambda fault: (refused or self.failed.emit)(_in_words(fault)))


def _in_words(fault: BaseException) -> ImpastoError:
    """Return a task's failure as an error to show to the user; reraise unexpected exceptions."""
    if isinstance(fault, ImpastoError):
        return fault
    if isinstance(fault, OSError):
        sentence = f"Could not write the preset: {fault.strerror or fault}."
        return JobError("preset.unwritable", sentence, "Check the disk and your permissions for the folder.")
    raise fault


def _save_under_free_name(preset: Preset) -> tuple[Path, Preset]:
    """Save a preset to the user's presets, numbered if its name is taken; return its path and the preset."""
    from trainer.config.presets.creating import revised
    from trainer.config.presets.library import free_name, read_library, save_preset

    name = free_name(preset.name, preset.base.family, read_library())
    named = preset if name == preset.name else revised(preset, {"name": name})
    return save_preset(named)[0], named
