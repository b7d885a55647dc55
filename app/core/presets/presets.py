"""The presets at hand, as the pages see them: read and written by workers, told when they are other ones."""

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

# The rooms of presets bring Pillow, for which the window does not wait: they are loaded by the workers.
if TYPE_CHECKING:
    from app.core.presets.receiving import Received
    from trainer.config.presets.creating import CreatedPreset
    from trainer.config.presets.library import Origin, PresetEntry, PresetLibrary, PresetVersion
    from trainer.config.presets.preset import Preset

    Past = tuple[PresetVersion, list[tuple[str, str, str]]]
    """A version, with the keys that going back to it would change: key, value now, value then."""

_Result = TypeVar("_Result")
Refused = Callable[[ImpastoError], None] | None
"""Who hears of it when something is not done; None: whoever listens to `failed`."""


class Presets:
    """Belongs to the thread that makes it. What is asked for comes back on it; what fails is told by `failed`."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.entries: PresetLibrary | None = None
        """None until it was read for the first time."""
        self.changed: Emitter[None] = Emitter()
        self.failed: Emitter[ImpastoError] = Emitter()
        self.cost_estimates = CostEstimates(tasks.post)
        self._readings = count(1)
        self._newest = 0
        """The number of the reading that `shelf` comes from."""

    def close(self) -> None:
        """End the planner."""
        self.cost_estimates.close()

    def look(self) -> None:
        """Read all of them again."""
        self._change(lambda: None, lambda _: None)

    def receive(self, source: Path | str, then: Callable[[Received], None], refused: Refused = None) -> None:
        """Read what somebody sent: a file, a picture that holds a preset, or text. Nothing is kept yet."""

        def work() -> Received:
            from app.core.presets.receiving import receive_file, receive_text

            return receive_file(source) if isinstance(source, Path) else receive_text(source, "The text")

        self._run(work, then, refused)

    def keep(
        self, preset: Preset, name: str, origin: Origin, then: Callable[[Path], None], refused: Refused = None
    ) -> None:
        """Keep a preset under a name, in the place of one that has it; `then` is given where."""

        def work() -> Path:
            from trainer.config.presets.creating import revised
            from trainer.config.presets.library import is_built_in, require_free, save_preset

            kept = preset if name == preset.name else revised(preset, {"name": name})
            if is_built_in(kept):
                require_free(kept)
            return save_preset(kept, origin)[0]

        self._change(work, then, refused)

    def duplicate(self, shelved: PresetEntry, then: Callable[[Path], None]) -> None:
        """Make an own preset of any, under its name with a number."""
        self._change(lambda: _kept_free(shelved.preset)[0], then)

    def make_of_lora(
        self, lora: Path, then: Callable[[tuple[Path, CreatedPreset]], None], refused: Refused = None
    ) -> None:
        """Make an own preset of what a LoRA file says of itself."""

        def work() -> tuple[Path, CreatedPreset]:
            from trainer.config.presets.creating import preset_of_lora

            made = preset_of_lora(lora)
            path, preset = _kept_free(made.preset)
            return path, replace(made, preset=preset)

        self._change(work, then, refused)

    def revise(
        self, shelved: PresetEntry, details: Mapping[str, object], then: Callable[[Path], None], refused: Refused = None
    ) -> None:
        """Change details of a preset; what it was stays as a version. `picture` is a file to show, or None for none."""

        def work() -> Path:
            from trainer.config.presets.creating import revised
            from trainer.config.presets.library import require_free, rewrite_preset
            from trainer.config.presets.preview_image import make_preview

            changed = dict(details)
            if "picture" in changed:
                image = changed.pop("picture")
                changed["preview"] = {"image": make_preview(image)} if isinstance(image, Path) else None
            preset = revised(shelved.preset, changed)
            require_free(preset, but=shelved.path)
            rewrite_preset(shelved.path, preset)
            return shelved.path

        self._change(work, then, refused)

    def versions(self, shelved: PresetEntry, then: Callable[[list[Past]], None]) -> None:
        """Tell what a preset was before, the latest first; not what it is now."""

        def work() -> list[Past]:
            from trainer.config.presets.exchange import load_preset
            from trainer.config.presets.library import changed_keys, versions_of

            found = []
            for version in versions_of(shelved.path):
                try:
                    changes = changed_keys(shelved.preset, load_preset(version.path))
                except JobError:  # a broken file that was replaced is kept too, and nothing to go back to
                    continue
                if changes:
                    found.append((version, changes))
            return found

        self._run(work, then)

    def go_back(
        self, shelved: PresetEntry, version: PresetVersion, then: Callable[[Path], None], refused: Refused = None
    ) -> None:
        """Make a preset what it was; what it is now stays as a version."""

        def work() -> Path:
            from trainer.config.presets.exchange import load_preset
            from trainer.config.presets.library import require_free, rewrite_preset

            preset = load_preset(version.path)
            require_free(preset, but=shelved.path)
            rewrite_preset(shelved.path, preset)
            return shelved.path

        self._change(work, then, refused)

    def save(self, preset: Preset, target: Path, then: Callable[[Path], None]) -> None:
        """Write a preset for others: into a picture where the name ends so, else as its file."""

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
        """Do something to the files, read them all again, and only then go on."""

        def both() -> tuple[_Result, int, PresetLibrary]:
            from trainer.config.presets.library import read_library

            return work(), next(self._readings), read_library()

        def have(came: tuple[_Result, int, PresetLibrary]) -> None:
            result, number, shelf = came
            if number > self._newest:  # of two workers the one that began earlier may come later
                self._newest, self.entries = number, shelf
                self.changed.emit(None)
            then(result)

        self._run(both, have, refused)

    def _run(self, work: Callable[[], _Result], then: Callable[[_Result], None], refused: Refused = None) -> None:
        self._tasks.run(work, then, lambda fault: (refused or self.failed.emit)(_in_words(fault)))


def _in_words(fault: BaseException) -> ImpastoError:
    """Return what hindered a task as an error for the user; faults that nobody expects are raised again."""
    if isinstance(fault, ImpastoError):
        return fault
    if isinstance(fault, OSError):
        sentence = f"The preset cannot be written: {fault.strerror or fault}."
        return JobError("preset.unwritable", sentence, "Check the disk and your rights to the folder.")
    raise fault


def _kept_free(preset: Preset) -> tuple[Path, Preset]:
    """Keep a preset among the own ones, under its name or with a number behind it; return where, and as what."""
    from trainer.config.presets.creating import revised
    from trainer.config.presets.library import free_name, read_library, save_preset

    name = free_name(preset.name, preset.base.family, read_library())
    kept = preset if name == preset.name else revised(preset, {"name": name})
    return save_preset(kept)[0], kept
