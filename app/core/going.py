"""Where one page asks to go to another: the window shows the page, the page shows the thing."""

from __future__ import annotations

from pathlib import Path

from app.core.events import Event


class Going:
    """Each event names what should be shown."""

    def __init__(self) -> None:
        self.run: Event[Path] = Event()
        """A run's folder, on the Runs page."""
        self.job: Event[Path] = Event()
        """A job file, on the Train page."""
        self.recipe: Event[str] = Event()
        """A preset by name: a new job from it, on the Train page."""
        self.lora: Event[Path] = Event()
        """A LoRA file, in the viewer."""
        self.preset: Event[Path] = Event()
        """A preset file or picture that was received, on the Presets page."""
