"""What went on when the app was seen last: the next start tells what became of it meanwhile."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.settings.stored import load
from app.core.tasks import Single, Tasks
from trainer.protocol import files, places

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unfinished:
    """Runs that lived, and entries of the queue that ran or waited, by their ids."""

    runs: frozenset[Path] = frozenset()
    entries: frozenset[str] = frozenset()


class Memory:
    """Keeps it in a file of the user's; a file that cannot be read holds nothing, for nothing but a notice is lost."""

    def __init__(self, tasks: Tasks) -> None:
        self._path = places.home() / "unfinished.json"
        self._writing = Single(tasks)
        found, notice = load(self._path, _unfinished, Unfinished(), "what ended meanwhile is not reported")
        if notice:
            _log.info("%s", notice)
        self._wanted = self._kept = found

    @property
    def kept(self) -> Unfinished:
        """What the file holds."""
        return self._kept

    def keep(self, unfinished: Unfinished) -> None:
        """Put this into the file soon."""
        self._wanted = unfinished
        if unfinished != self._kept and not self._writing.busy:
            self._kept = unfinished
            self._writing.run(lambda: self._write(unfinished), lambda _: self.keep(self._wanted))

    def close(self) -> None:
        """Put into the file what is not there yet; called when no worker writes any more."""
        if self._writing.busy or self._wanted != self._kept:
            self._write(self._wanted)

    def _write(self, unfinished: Unfinished) -> None:
        kept = {"runs": sorted(map(str, unfinished.runs)), "entries": sorted(unfinished.entries)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(self._path, kept, durable=False)
        except OSError as error:
            _log.info("what went on was not kept: %s", error)


def _unfinished(found: Any, left_out: list[str]) -> Unfinished:
    runs, entries = (_texts(found[key], left_out) for key in ("runs", "entries"))
    return Unfinished(frozenset(map(Path, runs)), frozenset(entries))


def _texts(found: Any, left_out: list[str]) -> list[str]:
    left_out += [repr(text)[:80] for text in found if not isinstance(text, str)]
    return [text for text in found if isinstance(text, str)]
