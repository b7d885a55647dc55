"""What the pages ask about models on this PC: bases to train on, those used last, and where LoRAs belong."""

from __future__ import annotations

from app.core.events import Event
from app.core.models.found import Destination, Found
from app.core.tasks import Post, Tasks


class Models:
    """Belongs to the thread that makes it; the disks are read on threads of its own."""

    def __init__(self, post: Post) -> None:
        self.bases: tuple[Found, ...] = ()
        """What was found, those that can be trained on first."""
        self.recent: tuple[str, ...] = ()
        """The texts for `base.model` that were used last, newest first."""
        self.changed: Event[None] = Event()
        """Any of these is another now, or the search began or ended."""
        self._tasks = Tasks(post)

    def destinations(self) -> list[Destination]:
        """Return the LoRA folders of the tools on this PC, as far as they are known now."""
        return []

    def used(self, text: str) -> None:
        """Remember that a base was used."""
        self.recent = (text, *(one for one in self.recent if one != text))
        self.changed.emit(None)

    def close(self) -> None:
        """End the search."""
        self._tasks.close()
