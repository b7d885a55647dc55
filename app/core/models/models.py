"""Models on this PC: bases to train on, recently used bases, and folders for LoRAs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.core.events import Emitter
from app.core.models.search import Search
from app.core.models.tools import Installation, this_pc
from app.core.models.verdict import BaseVerdict, Destination, FoundBase, judge
from app.core.settings.deferred_writer import DeferredWriter
from app.core.tasks import Post, Tasks, reraise
from trainer.config.credentials import without_secrets
from trainer.protocol import places
from trainer.protocol.records import json_keys, to_record

_MOST = 40


@json_keys("recent", "folders", "loras", "passed_over")
@dataclass(frozen=True, slots=True)
class Choices:
    """The user's model choices, newest first."""

    recent: tuple[str, ...] = ()
    """Values of `base.model`."""
    folders: tuple[str, ...] = ()
    """Additional model or tool folders to search."""
    loras: tuple[str, ...] = ()
    """Folders the user exported LoRAs to."""
    passed_over: tuple[str, ...] = ()
    """Tool folders whose models are hidden."""


class ModelChoices:
    """The user's current choices. Changes are written in the background; `settle` waits for the writes."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = DeferredWriter(path or places.home() / "models.json", "the model choices")
        self.choices = self._file.load(_decode, Choices(), "Recent bases and chosen folders were reset.", _text)

    @property
    def notice(self) -> str:
        """Return a sentence about a problem with the choices file, or ""."""
        return self._file.notice

    def put_first(self, what: str, text: str) -> bool:
        """Put an entry first in the list `what`, moving it if it is already there; return whether the list changed."""
        others = tuple(one for one in getattr(self.choices, what) if one != text)
        return self._keep(replace(self.choices, **{what: (text, *others)[:_MOST]}))

    def remove(self, what: str, text: str) -> bool:
        """Remove an entry from the list `what`; return whether the list changed."""
        return self._keep(replace(self.choices, **{what: tuple(o for o in getattr(self.choices, what) if o != text)}))

    def settle(self) -> None:
        """Wait until all changes are on disk."""
        self._file.settle()

    def _keep(self, choices: Choices) -> bool:
        if choices == self.choices:
            return False
        self.choices = choices
        self._file.write(_text(choices))
        return True


def _text(choices: Choices) -> str:
    return json.dumps(to_record(choices), indent=1) + "\n"  # ASCII escapes: file names on Linux may not be valid UTF-8


def _decode(content: Any, left_out: list[str]) -> Choices:
    recent, folders, loras, passed_over = (
        _texts(content.get(key, []), key, left_out) for key in ("recent", "folders", "loras", "passed_over")
    )
    return Choices(recent, folders, loras, passed_over)


def _texts(value: object, name: str, left_out: list[str]) -> tuple[str, ...]:
    if not isinstance(value, list):
        left_out.append(name)
        return ()
    left_out += [f"{name}: {repr(text)[:80]}" for text in value if not isinstance(text, str)]
    return tuple(dict.fromkeys(text for text in value if isinstance(text, str)))[:_MOST]


class Models:
    """Models found on this PC.

    Use it only from the thread that created it. Disks are read on worker threads and never written to.
    """

    def __init__(self, post: Post) -> None:
        self.bases: tuple[FoundBase, ...] = ()
        """Bases found, without those of hidden tools: trainable ones first, then by name."""
        self.installations: tuple[Installation, ...] = ()
        """Tools found and folders added by the user."""
        self.is_searching = False
        """Whether a search is running."""
        self.changed: Emitter[None] = Emitter()
        """Emitted when a public attribute or a user choice changes."""
        self.judged: dict[str, BaseVerdict] = {}
        """Verdicts from the last check of the recently used bases, by value of `base.model`."""
        self._choices = ModelChoices()
        self._post = post
        self._tasks = Tasks(post)
        self._stop = threading.Event()
        self._looked = False
        self._all: tuple[FoundBase, ...] = ()

    @property
    def notice(self) -> str:
        """Return a sentence about a problem with the choices file, or ""."""
        return self._choices.notice

    @property
    def recent(self) -> tuple[str, ...]:
        """Return the recently used values of `base.model`, newest first."""
        return tuple(map(without_secrets, self._choices.choices.recent))

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders that the user added."""
        return tuple(map(Path, self._choices.choices.folders))

    def search(self, *, again: bool = False) -> None:
        """Search this PC, once per session unless `again`; emit `changed` for each result and at the end."""
        if self.is_searching or (self._looked and not again):
            return
        self.is_searching = self._looked = True
        self._stop = stop = threading.Event()
        folders = self.folders

        def share(tools: tuple[Installation, ...], found: tuple[FoundBase, ...]) -> None:
            self._post(lambda: self._take(tools, found, stop))

        def search() -> None:
            Search(this_pc(), folders, stop.is_set, share).run()

        def failed(fault: BaseException) -> None:
            self._end(stop)
            raise fault

        self._tasks.run(search, lambda _: self._end(stop), failed, kept=False)
        self.changed.emit(None)

    def stop_looking(self) -> None:
        """Stop the search and keep what it has found so far."""
        if self.is_searching:
            self._end(self._stop)
            self._looked = False

    def judge(self, text: str, done: Callable[[BaseVerdict], None]) -> None:
        """Judge a value of `base.model` on a worker and call `done` with the verdict."""
        found = self._all  # taken here, because a running search replaces it on this thread
        self._tasks.run(lambda: judge(text, found), done, reraise, kept=False)

    def look_at_recent(self) -> None:
        """Check the recently used bases on a worker; emit `changed` if `judged` changes."""
        texts, found = self.recent, self._all
        self._tasks.run(lambda: {text: judge(text, found) for text in texts}, self._set_judged, reraise, kept=False)

    def add_recent(self, text: str) -> None:
        """Add a base to the recently used ones."""
        if text and self._choices.put_first("recent", without_secrets(text)):
            self.changed.emit(None)

    def add_folder(self, folder: Path) -> None:
        """Add a folder to search, and search again."""
        self._choices.remove("passed_over", str(folder))
        if self._choices.put_first("folders", str(folder)):
            self._search_again()

    def is_offered(self, installation: Installation) -> bool:
        """Return whether a tool's models are offered."""
        return str(installation.folder) not in self._choices.choices.passed_over

    def count_of(self, installation: Installation) -> int:
        """Return the number of trainable bases in a tool's folders, whether or not the tool is hidden."""
        return sum(not one.description.problem and _in_any(one.path, installation.bases) for one in self._all)

    def set_offered(self, installation: Installation, wanted: bool) -> None:
        """Offer or hide a tool's models."""
        change = self._choices.remove if wanted else self._choices.put_first
        if change("passed_over", str(installation.folder)):
            self._sort()

    def destinations(self) -> list[Destination]:
        """Return the folders that LoRAs can be copied to, those chosen by the user first.

        The first call starts the search; `changed` is emitted when more folders may be available.
        """
        self.search()
        own = [Destination("", Path(folder)) for folder in self._choices.choices.loras]
        others = [
            Destination(one.tool, one.loras[0]) for one in self.installations if one.loras and self.is_offered(one)
        ]
        return own + [one for one in others if one.folder not in {mine.folder for mine in own}]

    def add_destination(self, folder: Path) -> None:
        """Save a folder that the user chose for LoRAs."""
        if self._choices.put_first("loras", str(folder)):
            self.changed.emit(None)

    def close(self) -> None:
        """Stop the search and wait until all choices are on disk."""
        self._stop.set()
        self._choices.settle()
        self._tasks.close()

    def _set_judged(self, judged: dict[str, BaseVerdict]) -> None:
        if judged != self.judged:
            self.judged = judged
            self.changed.emit(None)

    def _search_again(self) -> None:
        self.stop_looking()
        self.search(again=True)

    def _take(self, tools: tuple[Installation, ...], found: tuple[FoundBase, ...], stop: threading.Event) -> None:
        # A result of an earlier search, or of one that has been stopped, may still arrive.
        if stop is self._stop and not stop.is_set():
            self.installations, self._all = tools, found
            self._sort()

    def _end(self, stop: threading.Event) -> None:
        stop.set()
        if stop is self._stop and self.is_searching:
            self.is_searching = False
            self.changed.emit(None)

    def _sort(self) -> None:
        """Set `bases` to the bases found, sorted and without those that only hidden tools have, and emit `changed`."""
        wanted, unwanted = _places(filter(self.is_offered, self.installations)), _places(self._unwanted())
        offered = [one for one in self._all if _in_any(one.path, wanted) or not _in_any(one.path, unwanted)]
        self.bases = tuple(sorted(offered, key=_order))
        self.changed.emit(None)

    def _unwanted(self) -> list[Installation]:
        return [one for one in self.installations if not self.is_offered(one)]


def _places(installations: Iterable[Installation]) -> list[Path]:
    return [place for one in installations for place in one.bases]


def _in_any(path: Path, places: Iterable[Path]) -> bool:
    return any(_is_in(path, place) for place in places)


def _is_in(path: Path, place: Path) -> bool:
    return place == path or place in path.parents


def _order(found: FoundBase) -> tuple[bool, str, str]:
    return bool(found.description.problem), found.name.casefold(), str(found.path)
