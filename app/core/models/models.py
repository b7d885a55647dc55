"""What the pages ask about models on this PC: bases to train on, those used last, and where LoRAs belong."""

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
from app.core.tasks import Post, Tasks, raise_again
from trainer.config.credentials import without_secrets
from trainer.protocol import places
from trainer.protocol.records import json_keys, to_record

_MOST = 40


@json_keys("recent", "folders", "loras", "passed_over")
@dataclass(frozen=True, slots=True)
class Choices:
    """What the user chose; texts, newest first."""

    recent: tuple[str, ...] = ()
    """Texts of `base.model`."""
    folders: tuple[str, ...] = ()
    """Folders of models, or of tools, that are searched too."""
    loras: tuple[str, ...] = ()
    """Folders that the user exported LoRAs to."""
    passed_over: tuple[str, ...] = ()
    """Folders of tools whose models are not wanted."""


class ModelChoices:
    """The choices in force; each change is on disk soon, and when `settle` returns."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = DeferredWriter(path or places.home() / "models.json", "the models in use were")
        self.choices = self._file.load(_choices, Choices(), "no base is remembered", _text)

    @property
    def notice(self) -> str:
        """What was wrong with the file, in a sentence."""
        return self._file.notice

    def put_first(self, what: str, text: str) -> bool:
        """Put a text first in one of the lists; returns whether that changes anything."""
        others = tuple(one for one in getattr(self.choices, what) if one != text)
        return self._keep(replace(self.choices, **{what: (text, *others)[:_MOST]}))

    def remove(self, what: str, text: str) -> bool:
        """Take a text out of one of the lists; returns whether it was in it."""
        return self._keep(replace(self.choices, **{what: tuple(o for o in getattr(self.choices, what) if o != text)}))

    def settle(self) -> None:
        """Wait until what changed is on disk."""
        self._file.settle()

    def _keep(self, choices: Choices) -> bool:
        if choices == self.choices:
            return False
        self.choices = choices
        self._file.write(_text(choices))
        return True


def _text(choices: Choices) -> str:
    return json.dumps(to_record(choices), indent=1) + "\n"  # ASCII, since names on Linux need not be text


def _choices(kept: Any, left_out: list[str]) -> Choices:
    recent, folders, loras, passed_over = (
        _texts(kept.get(key, []), key, left_out) for key in ("recent", "folders", "loras", "passed_over")
    )
    return Choices(recent, folders, loras, passed_over)


def _texts(value: object, name: str, left_out: list[str]) -> tuple[str, ...]:
    if not isinstance(value, list):
        left_out.append(name)
        return ()
    left_out += [f"{name}: {repr(text)[:80]}" for text in value if not isinstance(text, str)]
    return tuple(dict.fromkeys(text for text in value if isinstance(text, str)))[:_MOST]


class Models:
    """Belongs to the thread that makes it; the disks are read on threads of its own, and nothing on them is changed."""

    def __init__(self, post: Post) -> None:
        self.bases: tuple[FoundBase, ...] = ()
        """What was found where the user wants it: those that can be trained on first, by name."""
        self.installations: tuple[Installation, ...] = ()
        """The tools that were found, and folders that the user named."""
        self.looking = False
        """Whether a search runs."""
        self.changed: Emitter[None] = Emitter()
        """Any of these, or of the choices, is another now."""
        self.judged: dict[str, BaseVerdict] = {}
        """What those used last were when they were looked at."""
        self._kept = ModelChoices()
        self._post = post
        self._tasks = Tasks(post)
        self._stop = threading.Event()
        self._looked = False
        self._all: tuple[FoundBase, ...] = ()

    @property
    def notice(self) -> str:
        """What was wrong with the file of choices, in a sentence."""
        return self._kept.notice

    @property
    def recent(self) -> tuple[str, ...]:
        """The texts for `base.model` that were used last, newest first."""
        return tuple(map(without_secrets, self._kept.choices.recent))

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that the user named."""
        return tuple(map(Path, self._kept.choices.folders))

    def look(self, *, again: bool = False) -> None:
        """Search this PC, once in a sitting; `again` searches anew. `changed` tells of each find and of the end."""
        if self.looking or (self._looked and not again):
            return
        self.looking = self._looked = True
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
        """End the search; what it found so far stays."""
        if self.looking:
            self._end(self._stop)
            self._looked = False

    def judge(self, text: str, done: Callable[[BaseVerdict], None]) -> None:
        """Find out what a text for `base.model` means, and call `done` with it."""
        found = self._all
        self._tasks.run(lambda: judge(text, found), done, raise_again, kept=False)

    def look_at_recent(self) -> None:
        """Find out what the bases used last are now; `changed` tells when `judged` says it."""
        texts, found = self.recent, self._all
        self._tasks.run(lambda: {text: judge(text, found) for text in texts}, self._know, raise_again, kept=False)

    def used(self, text: str) -> None:
        """Remember that a base was used."""
        if text and self._kept.put_first("recent", without_secrets(text)):
            self.changed.emit(None)

    def add_folder(self, folder: Path) -> None:
        """Search this folder too, now and from now on."""
        self._kept.remove("passed_over", str(folder))
        if self._kept.put_first("folders", str(folder)):
            self._search_again()

    def wants(self, installation: Installation) -> bool:
        """Tell whether the models of a tool are offered."""
        return str(installation.folder) not in self._kept.choices.passed_over

    def count_of(self, installation: Installation) -> int:
        """Return how many bases that can be trained on lie in the folders of a tool, wanted or not."""
        return sum(not one.description.problem and _in_any(one.path, installation.bases) for one in self._all)

    def want(self, installation: Installation, wanted: bool) -> None:
        """Offer the models of a tool, or not."""
        change = self._kept.remove if wanted else self._kept.put_first
        if change("passed_over", str(installation.folder)):
            self._sort()

    def destinations(self) -> list[Destination]:
        """Return the folders that LoRAs can be copied to, the user's own first; the first call begins the search.

        `changed` tells when there may be more.
        """
        self.look()
        own = [Destination("", Path(folder)) for folder in self._kept.choices.loras]
        others = [Destination(one.tool, one.loras[0]) for one in self.installations if one.loras and self.wants(one)]
        return own + [one for one in others if one.folder not in {mine.folder for mine in own}]

    def add_destination(self, folder: Path) -> None:
        """Remember a folder that the user chose for LoRAs."""
        if self._kept.put_first("loras", str(folder)):
            self.changed.emit(None)

    def close(self) -> None:
        """End the search; what was chosen is on disk."""
        self._stop.set()
        self._kept.settle()
        self._tasks.close()

    def _know(self, judged: dict[str, BaseVerdict]) -> None:
        if judged != self.judged:
            self.judged = judged
            self.changed.emit(None)

    def _search_again(self) -> None:
        self.stop_looking()
        self.look(again=True)

    def _take(self, tools: tuple[Installation, ...], found: tuple[FoundBase, ...], stop: threading.Event) -> None:
        if stop is self._stop and not stop.is_set():
            self.installations, self._all = tools, found
            self._sort()

    def _end(self, stop: threading.Event) -> None:
        stop.set()
        if stop is self._stop and self.looking:
            self.looking = False
            self.changed.emit(None)

    def _sort(self) -> None:
        """Offer what lies in a folder that some wanted tool uses, and what belongs to none."""
        wanted, unwanted = _places(filter(self.wants, self.installations)), _places(self._unwanted())
        offered = [one for one in self._all if _in_any(one.path, wanted) or not _in_any(one.path, unwanted)]
        self.bases = tuple(sorted(offered, key=_order))
        self.changed.emit(None)

    def _unwanted(self) -> list[Installation]:
        return [one for one in self.installations if not self.wants(one)]


def _places(installations: Iterable[Installation]) -> list[Path]:
    return [place for one in installations for place in one.bases]


def _in_any(path: Path, places: Iterable[Path]) -> bool:
    return any(_lies_in(path, place) for place in places)


def _lies_in(path: Path, place: Path) -> bool:
    return place == path or place in path.parents


def _order(found: FoundBase) -> tuple[bool, str, str]:
    return bool(found.description.problem), found.name.casefold(), str(found.path)
