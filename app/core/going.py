"""Where one page asks to go to another: the window shows the page, the page shows the thing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from app.core.events import Event
from app.core.tasks import Tasks, raise_again
from trainer.config.presets.held import holds_preset
from trainer.protocol.files import long_path

Kind = Literal["folder", "lora", "preset", "picture", "other"]

Sorted = Callable[[list[Path], list[Path], list[Path]], None]
"""Takes folders, pictures with captions, and other files."""


class Going:
    """Each event names what should be shown."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.run: Event[Path] = Event()
        """A run's folder, on the Runs page."""
        self.entry: Event[str] = Event()
        """An entry of the queue that was started just now, on the Runs page."""
        self.job: Event[Path] = Event()
        """A job file, on the Train page."""
        self.recipe: Event[str] = Event()
        """A preset as "sdxl/style": a new job from it, on the Train page."""
        self.lora: Event[Path] = Event()
        """A LoRA file, in the viewer."""
        self.preset: Event[Path] = Event()
        """A preset file or picture that was received, on the Presets page."""

    def take(self, paths: Iterable[Path], then: Sorted) -> None:
        """Let LoRAs and presets go to their places; call `then` with the folders and the files that are left.

        What is not there is among the folders. The disk is looked at by a worker: one that sleeps holds up nobody.
        """
        paths = list(paths)

        def go(kinds: list[Kind]) -> None:
            sorted_ = list(zip(paths, kinds, strict=True))
            for path, kind in sorted_:
                if kind == "lora":
                    self.lora.emit(path)
                elif kind == "preset":
                    self.preset.emit(path)
            then(*([path for path, kind in sorted_ if kind == wanted] for wanted in ("folder", "picture", "other")))

        self._tasks.run(lambda: [*map(_kind, paths)], go, raise_again, kept=False)


def _kind(path: Path) -> Kind:
    from trainer.dataset import caption_files, pixels  # late: they bring Pillow

    ending = path.suffix.lower()
    with contextlib.suppress(OSError, ValueError):  # a place that must not be looked at, a name that none can have
        if long_path(path).is_dir():
            return "folder"
        if ending == ".safetensors":
            return "lora"
        if ending == ".toml" or (ending == ".png" and holds_preset(path)):
            return "preset"
        if long_path(path).is_file():
            captions = ending in caption_files.SUFFIXES or path.name == caption_files.METADATA_NAME
            return "picture" if captions or ending in pixels.SUFFIXES else "other"
    return "folder"
