"""Where one page asks to go to another: the window shows the page, the page shows the thing."""

from __future__ import annotations

from pathlib import Path

from app.core.events import Event
from trainer.config.presets.held import holds_preset


class Going:
    """Each event names what should be shown."""

    def __init__(self) -> None:
        self.run: Event[Path] = Event()
        """A run's folder, on the Runs page."""
        self.job: Event[Path] = Event()
        """A job file, on the Train page."""
        self.recipe: Event[str] = Event()
        """A preset as "sdxl/style": a new job from it, on the Train page."""
        self.lora: Event[Path] = Event()
        """A LoRA file, in the viewer."""
        self.preset: Event[Path] = Event()
        """A preset file or picture that was received, on the Presets page."""

    def take(self, path: Path) -> bool:
        """Go where a file of the user's belongs; False for what is no LoRA and no preset."""
        ending = path.suffix.lower()
        if ending == ".safetensors":
            self.lora.emit(path)
        elif ending == ".toml" or (ending == ".png" and holds_preset(path)):
            self.preset.emit(path)
        else:
            return False
        return True
